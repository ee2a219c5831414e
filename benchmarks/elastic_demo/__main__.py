"""Kill, drain and restart elastic replicas in mid-fit: `python -m benchmarks.elastic_demo`.

Trains the GPT-2 of `make demo` twice with three replicas, each a process of its own, that share a
folder as their store: first undisturbed, then with one SIGKILL and one SIGTERM, each followed by a
restart.
Prints a timeline and the criteria with their values, and writes the result page. The exit code is 1
if final weights differ or a process fails. Further words are overrides for both runs, such as
`trainer.max_steps=600`.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.common.page import provenance, result_page, write_page
from benchmarks.common.pretraining import composed
from benchmarks.elastic_demo.job import FOUNDERS, Act, Outcome, run
from benchmarks.elastic_demo.replica import Plan, Row
from recipes.training.evaluation import token_loss
from recipes.training.pretraining import build_data, build_module

PAGE = Path(__file__).with_name("result.md")
TITLE = "What do elastic replicas lose when one is killed and one is drained?"
STEPS = 600
STEP_S = 0.03  # least: on a fast machine, too, a replica joins while most of the fit lies ahead
HOLD = 0.9  # share of the steps after which a replica waits until all have joined
ACTS = {  # by the share of the steps that replica "a" has taken
    0.2: ("SIGKILL", "b"),
    0.3: ("start", "b2"),
    0.45: ("SIGTERM", "c"),
    0.55: ("start", "c2"),
}
FINISHERS = {"undisturbed": {"a", "b", "c"}, "disturbed": {"a", "b2", "c2"}}
EXIT_CODES = {"b": {-9}, "c": {143}}  # in the disturbed run; of all others 0
MAX_LOSS_PERCENT = 1.0
MAX_SECONDS = 300.0
SMOOTH = 50  # steps of the moving average in the picture
HOW_TO_READ = """\
*Steps lost*: gaps and repetitions in the logs of a and c, and what the last line of a replica lacks
to the end of the fit (not for the killed one and the drained one, which leaves). A replica that
joins skips to the others' next exchange.
*Stall*: the time from one step to the next, so a step's own computation is in it. *Undisturbed*:
the longest such time of the undisturbed run, which contains an exchange and the wait for the
slowest replica.
*Picture*: the members and the loss are those of replica a, and a dotted line is at the step that a
had taken when the script acted. The lowest panel shows the slowest replica of each step.
*Validation loss*: nats per token over the whole validation split, with the final weights of replica
a. While a replica is away, its share of the data is not trained on, so the losses are not equal.
All processes share one machine and loopback: the seconds do not apply to slow links."""


class Check(NamedTuple):
    """A criterion, with the value that was found."""

    name: str
    value: str
    bound: str
    met: bool
    must: bool = False  # if missed, the exit code is 1

    @property
    def verdict(self) -> str:
        """What is printed."""
        return "met" if self.met else "missed"


def lost_steps(outcome: Outcome, steps: int) -> int:
    """Return the number of steps that survivors took twice or not at all."""
    killed = {name for name, code in outcome.exits.items() if code == -9}
    lost = 0
    for name, rows in outcome.logs.items():
        if name in killed or not rows:
            continue
        if name in FOUNDERS:
            lost += sum(abs(after.step - before.step - 1) for before, after in pairwise(rows))
        if name in outcome.finished:
            lost += abs(steps - rows[-1].step)
    return lost


def longest_stall(logs: Iterable[Sequence[Row]]) -> float:
    """Return the longest time in seconds from one step of a replica to its next."""
    return max(
        (after.at_s - before.at_s for rows in logs for before, after in pairwise(rows)),
        default=math.nan,
    )


def failed(outcome: Outcome, finishers: set[str], exits: Mapping[str, set[int]]) -> list[str]:
    """Return the replicas that ended in another way than planned."""
    wrong = {n for n, code in outcome.exits.items() if code not in exits.get(n, {0})}
    return sorted(wrong | (finishers ^ outcome.finished.keys()))


def checks_of(
    runs: Mapping[str, Outcome],
    losses: Mapping[str, float],
    steps: int,
    grace_s: float,
    seconds: float,
) -> list[Check]:
    """Return all criteria."""
    calm, rough = runs["undisturbed"], runs["disturbed"]
    wrong = failed(calm, FINISHERS["undisturbed"], {})
    wrong += failed(rough, FINISHERS["disturbed"], EXIT_CODES)
    lost = lost_steps(rough, steps)
    stall, calm_stall = longest_stall(rough.logs.values()), longest_stall(calm.logs.values())
    hashes = [len({one["hash"] for one in outcome.finished.values()}) for outcome in runs.values()]
    percent = 100 * (losses["disturbed"] / losses["undisturbed"] - 1)
    stall_bound = grace_s + calm_stall
    return [
        Check("processes that failed", ", ".join(wrong) or "0", "0", not wrong, must=True),
        Check(
            "different final weights (SHA-256), undisturbed and disturbed",
            " and ".join(map(str, hashes)),
            "1 and 1",
            hashes == [1, 1],
            must=True,
        ),
        Check("survivors' steps lost", str(lost), "0", lost == 0),
        Check(
            "longest stall",
            f"{stall:.2f} s",
            f"{grace_s:g} s grace + {calm_stall:.2f} s undisturbed",
            stall <= stall_bound,
        ),
        Check(
            "validation loss against the undisturbed run",
            f"{percent:+.2f} %",
            f"at most {MAX_LOSS_PERCENT:+g} %",
            percent <= MAX_LOSS_PERCENT,
        ),
        Check(
            "time of everything",
            f"{seconds:.0f} s",
            f"{MAX_SECONDS:.0f} s",
            seconds <= MAX_SECONDS,
        ),
    ]


def validation_loss(config: dict[str, Any], path: Path) -> float:
    """Return the loss of saved weights over the validation split; NaN without a file."""
    if not path.exists():
        return math.nan
    data = build_data(config)
    module = build_module(config, data)
    module.load_state_dict(torch.load(path, weights_only=True))
    return token_loss(module, data.val_dataloader())


def slowest_times(logs: Iterable[Sequence[Row]]) -> dict[int, float]:
    """Return the longest time in seconds that any replica took to get to each step."""
    found: dict[int, float] = {}
    for rows in logs:
        for before, after in pairwise(rows):
            found[after.step] = max(found.get(after.step, 0.0), after.at_s - before.at_s)
    return dict(sorted(found.items()))


def draw(runs: Mapping[str, Outcome], path: Path) -> None:
    """Write the picture: members, training loss and stalls, over the steps of the fit."""
    # narrow, so that the text stays readable on a phone
    figure = Figure(figsize=(5, 6.6), layout="constrained")
    FigureCanvasAgg(figure)  # not pyplot: it keeps global state and may need a display
    members, loss, stall = figure.subplots(3, 1, sharex=True)
    for (name, outcome), colour in zip(runs.items(), ("0.6", "C0"), strict=True):
        rows = outcome.logs["a"]
        exchanged = [row for row in rows if row.members]
        members.step(
            [row.step for row in exchanged],
            [row.members for row in exchanged],
            where="post",
            color=colour,
            label=name,
        )
        losses = [row.loss for row in rows]
        width = min(SMOOTH, len(losses))
        if width:
            smooth = np.convolve(losses, np.ones(width) / width, "valid")
            loss.plot([row.step for row in rows[width - 1 :]], smooth, color=colour)
        slowest = slowest_times(outcome.logs.values())
        stall.plot(list(slowest), list(slowest.values()), lw=0.8, color=colour)
    for event in runs["disturbed"].timeline:
        if event.text.startswith(("SIG", "start")):
            for axes in (members, loss, stall):
                axes.axvline(event.step, color="C3", lw=0.8, ls=":")
            members.text(event.step, 3.2, event.text, rotation=30, fontsize=9)
    members.set(ylim=(0, 5.2), yticks=range(4), ylabel="members of an exchange")
    loss.set(ylabel=f"training loss of a\n(mean of {SMOOTH} steps)")
    stall.set(ylabel="time of a step (s),\nslowest replica", xlabel="step", yscale="log")
    stall.yaxis.set_major_formatter("{x:g}")
    figure.legend(loc="outside upper center", ncols=2)
    figure.savefig(path, dpi=160)


def opening(checks: Sequence[Check], picture: str) -> list[str]:
    """Return the question and the finding, for the top of the page."""
    missed = [check.name for check in checks if not check.met]
    verdict = f"missed: {'; '.join(missed)}" if missed else "all criteria are met"
    return [
        "`make elastic-demo` trains a small GPT-2 on Shakespeare with three elastic replicas. One"
        " is killed and one gets SIGTERM; both are started again and join. What does that cost?",
        "",
        f"**Found:** {verdict}.",
        "",
        *table(checks),
        "",
        f"![members, loss and stalls]({picture})",
    ]


def table(checks: Sequence[Check]) -> list[str]:
    """Return the criteria as Markdown lines."""
    lines = ["| criterion | value | bound | verdict |", "|---|---|---|---|"]
    return [*lines, *(f"| {c.name} | {c.value} | {c.bound} | {c.verdict} |" for c in checks)]


def body(
    runs: Mapping[str, Outcome], losses: Mapping[str, float], plan: Plan, work: str
) -> list[str]:
    """Return method, timeline and figures."""
    settings = ", ".join(f"`{name}={value}`" for name, value in plan.strategy.items())
    lines = [
        "## Method",
        "",
        f"Two runs of {plan.config['trainer']['max_steps']} steps, {work}. {settings}. A step takes"
        f" at least {plan.step_s:g} s. After step {plan.hold_step}, replicas wait until all have"
        " joined.",
        "",
        *HOW_TO_READ.splitlines(),
        "",
    ]
    for name, outcome in runs.items():
        events = [str(event) for event in outcome.timeline]
        found = ", ".join(f"{n} {one['hash'][:12]}" for n, one in outcome.finished.items())
        lines += [
            f"## {name.capitalize()}",
            "",
            f"Validation loss {losses[name]:.4f}; final weights: {found}.",
            "",
            *["```text", *events, "```", ""],
        ]
    return lines[:-1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run both, print and write everything; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.elastic_demo", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--work", type=Path, default=Path("outputs/bench/elastic_demo"))
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--grace", type=float, default=1.0, help="seconds (%(default)s)")
    parser.add_argument("--step-seconds", type=float, default=STEP_S)
    parser.add_argument("--sync-every", type=int, default=20)
    options, more = parser.parse_known_args(arguments)
    block = provenance("elastic_demo", arguments, options.page)
    begun_s = time.monotonic()
    config = composed(
        ["experiment=demo", "trainer.devices=1", f"trainer.max_steps={STEPS}"]
        + ["trainer.limit_val_batches=0", *more]
    )
    steps = int(config["trainer"]["max_steps"])
    strategy = {
        "max_replicas": 3,
        "min_replicas": 2,
        "grace": options.grace,
        "sync_every": options.sync_every,
    }
    torch.set_num_threads(1)
    build_data(config).prepare_data()  # once, not in every replica

    acts = [Act(round(share * steps), *act) for share, act in ACTS.items()]
    runs, losses = {}, {}
    for name, planned in {"undisturbed": [], "disturbed": acts}.items():
        folder = options.work / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        plan = Plan(config, strategy, folder.resolve(), options.step_seconds, round(HOLD * steps))
        print(f"== {name}", flush=True)
        runs[name] = run(plan, planned)
        losses[name] = validation_loss(config, folder / "a.pt")
        print(f"validation loss {losses[name]:.4f}", flush=True)

    seconds = time.monotonic() - begun_s
    checks = checks_of(runs, losses, steps, options.grace, seconds)
    print("== criteria")
    for check in checks:
        print(f"{check.name}: {check.value}; bound {check.bound}: {check.verdict}")
    picture = options.page.with_suffix(".png")
    options.page.parent.mkdir(parents=True, exist_ok=True)
    draw(runs, picture)
    text = body(runs, losses, plan, "one seed")
    write_page(options.page, result_page(TITLE, opening(checks, picture.name), [block], text))
    return int(any(check.must and not check.met for check in checks))


if __name__ == "__main__":
    sys.exit(main())
