"""Lightning's own tests with our strategies in place of `ddp`, and what they then do otherwise.

    python tests/outside/lightning_suite.py CHECKOUT [--strategies streaming_diloco ...] [PATH ...]

CHECKOUT is a checkout of Lightning's repository at the installed version; PATH, files and folders
below its `tests/tests_pytorch`. Every test runs with `ddp` in place of `auto` and with each of our
strategies (`stand_in.py`). A test that passes with `ddp` and not with ours is a difference, and
`reasons.toml` says why it is one. The exit code is 1 if a difference has no reason there.

With `--brief`, `ddp` runs only what fails with one of ours and has no reason: nothing else can be a
difference without one. Every other test counts as one that passes with `ddp`, whether it does or
not.

Not part of CI, which has no such checkout. It needs what Lightning's tests import (cloudpickle,
scikit-learn, jsonargparse); tests whose imports are missing fail alike with `ddp` and do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).parent
OURS = ("streaming_diloco", "distributed_lion", "domino_tp")
PATHS = ("trainer", "callbacks", "checkpointing", "loops", "strategies", "tuner", "test_cli.py")
_BAD = ("failed", "error")
_PYTEST = (
    *("-p", "stand_in", "-q", "--tb=short", "--timeout=240", "--dist", "load"),
    *("-p", "no:cacheprovider"),  # tests that list their folder would find its files
    *("-o", "addopts=", "-o", "xfail_strict=false"),
)


@dataclass(frozen=True)
class Reason:
    """Why some tests do not pass with ours.

    Attributes:
        text: for the reader.
        said: pattern that the failure's message matches; empty: any.
        tests: pattern that the test's name matches; empty: any.
        strategies: for which it holds; empty: all.
    """

    text: str
    said: str = ""
    tests: str = ""
    strategies: Sequence[str] = field(default=())

    def explains(self, strategy: str, test: str, said: str) -> bool:
        """Return whether this is why."""
        return (
            (not self.strategies or strategy in self.strategies)
            and re.search(self.tests, test) is not None
            and re.search(self.said, said, re.DOTALL) is not None
        )


@dataclass(frozen=True)
class Outcome:
    """How a test ended, and the message of a failure."""

    outcome: str
    said: str


def read_reasons(path: Path) -> list[Reason]:
    """Return the reasons that a TOML file holds, in its order: the first that explains counts."""
    return [Reason(**entry) for entry in tomllib.loads(path.read_text())["reason"]]


def read_outcomes(path: Path) -> dict[str, Outcome]:
    """Return how each test ended; a failure at its end counts, whatever its call came to."""
    found: dict[str, Outcome] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        row = json.loads(line)
        if row["test"] not in found or row["outcome"] in _BAD:
            found[row["test"]] = Outcome(row["outcome"], row["said"])
    return found


def differences(
    control: dict[str, Outcome], ours: dict[str, Outcome], names: Iterable[str] = ()
) -> dict[str, str]:
    """Return test and message of what passes in the control and not with ours.

    Args:
        control: outcomes with `ddp`.
        ours: outcomes with one of our strategies.
        names: tests that are left out.
    """
    gone = Outcome("missing", "the test process ended before this test, or in it")
    return {
        test: ours.get(test, gone).said
        for test, outcome in control.items()
        if outcome.outcome == "passed"
        and ours.get(test, gone).outcome != "passed"
        and test not in names
    }


def settled(ours: dict[str, dict[str, Outcome]], reasons: Sequence[Reason]) -> set[str]:
    """Return the tests that, with each of our strategies, pass or fail for a known reason."""

    def is_settled(strategy: str, test: str, end: Outcome) -> bool:
        why = (reason.explains(strategy, test, end.said) for reason in reasons)
        return end.outcome == "passed" or (end.outcome in _BAD and any(why))

    sets = [
        {test for test, end in run.items() if is_settled(strategy, test, end)}
        for strategy, run in ours.items()
    ]
    return set.intersection(*sets)


def run_tests(
    options: argparse.Namespace, strategy: str, outcomes: Path, leave_out: Collection[str] = ()
) -> dict[str, Outcome]:
    """Run Lightning's tests with a strategy in place of `ddp`, and return how they ended.

    Args:
        options: of the command.
        strategy: one of `OURS`, or "ddp".
        outcomes: where they are written.
        leave_out: tests that count as passed without a run.
    """
    tests = options.checkout.resolve() / "tests"
    passed = [{"test": test, "outcome": "passed", "said": ""} for test in leave_out]
    outcomes.write_text("".join(json.dumps(row) + "\n" for row in passed))
    left_out = outcomes.with_suffix(".left_out")
    left_out.write_text("\n".join(leave_out))

    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")},  # of a run around
        "COMMFREE_STAND_IN": strategy,
        "COMMFREE_OUTCOMES": str(outcomes),
        "COMMFREE_LEAVE_OUT": str(left_out),
        "PYTHONPATH": os.pathsep.join(
            [str(HERE), str(tests), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
        ),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "offline",
    }
    command = [sys.executable, "-m", "pytest", *_PYTEST, "-n", str(options.workers)]
    command += ["--rootdir", str(tests)]
    command += [str(tests / "tests_pytorch" / path) for path in options.paths]
    with outcomes.with_suffix(".log").open("w") as log:
        subprocess.run(command, cwd=tests, env=environment, stdout=log, stderr=log, check=False)
    return read_outcomes(outcomes)


def report(
    strategy: str, found: dict[str, str], reasons: Sequence[Reason], tests: int
) -> list[str]:
    """Print a table of the differences by reason; return the tests that have none."""
    counts: Counter[str] = Counter()
    without = []
    for test, said in found.items():
        reason = next((r for r in reasons if r.explains(strategy, test, said)), None)
        if reason is None:
            without.append(test)
        else:
            counts[reason.text] += 1
    print(f"\n## {strategy}: {len(found)} of {tests} tests that pass with `ddp` do not\n")
    if found:
        print("| tests | reason |\n|---|---|")
    for text, count in counts.most_common():
        print(f"| {count} | {text} |")
    for test in without:
        lines = found[test].strip().splitlines() or ["no message"]
        print(f"| 1 | **none**: `{test}`: {lines[0][:160]} |")
    return without


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and report; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("paths", nargs="*", default=list(PATHS), help="%(default)s")
    parser.add_argument("--strategies", nargs="+", choices=OURS, default=list(OURS))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--work", type=Path, default=Path("outputs/lightning_suite"))
    parser.add_argument("--reasons", type=Path, default=HERE / "reasons.toml")
    parser.add_argument("--keep", action="store_true", help="read outcomes that are there already")
    parser.add_argument("--brief", action="store_true", help="`ddp` only where it is needed")
    options = parser.parse_args(arguments)
    if not (options.checkout / "tests" / "tests_pytorch").is_dir():
        parser.error(
            f"{options.checkout} is no checkout of Lightning: no tests/tests_pytorch in it"
        )
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    reasons = read_reasons(options.reasons)
    outcomes: dict[str, dict[str, Outcome]] = {}
    for strategy in (*options.strategies, "ddp"):
        path = work / f"{strategy}.jsonl"
        if options.keep and path.exists():
            outcomes[strategy] = read_outcomes(path)
        else:
            briefly = options.brief and strategy == "ddp"
            leave_out = settled(outcomes, reasons) if briefly else ()
            outcomes[strategy] = run_tests(options, strategy, path, leave_out)
    control = outcomes.pop("ddp")
    passed = sum(outcome.outcome == "passed" for outcome in control.values())
    print(f"Lightning {version('lightning')}: {passed} tests of {options.checkout} pass with `ddp`")
    without = []
    for strategy, ours in outcomes.items():
        without += report(strategy, differences(control, ours), reasons, passed)
    print(f"\n{len(without)} differences without a reason")
    return 1 if without or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
