"""Check correctness and cost on a GPU: `make gpu-check`, or `python -m benchmarks.gpu_check`.

The most telling stages come first: kernels and the cost of a step within five minutes, sanitizers
last; half an hour on one GPU. With two or four, NCCL is checked too. Every part of a stage prints
what it measured, the bound and a verdict, and then the Markdown page is written with all parts so
far. A call that is stopped loses only the part that was running: call again to continue. Without a
GPU, the stages that a CPU can play run in small sizes, and times are not judged.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.common.page import BENCHMARKS, provenance, result_page, write_page
from benchmarks.gpu_check.stages import FITS, NEED_A_GPU, PER_KIND, STAGES, Check, Machine

PAGE = BENCHMARKS.parent / "build" / "gpu_check.md"  # may be made with uncommitted changes
TITLE = "What does the library do on a GPU?"
NO_GPU = (
    "No CUDA device here: the CPU played what it could, in small sizes, and times are not judged."
)
VERDICTS = {True: "holds", False: "**MISSED**", None: "not judged"}
Found = dict[str, list[Check]]  # by name of the part


class Part(NamedTuple):
    """A stage, or what it does for one kind of fit; the unit that a second call does not repeat."""

    stage: str
    machine: Machine

    @property
    def name(self) -> str:
        """Name of the part on the page."""
        return ": ".join([self.stage, *(self.machine.kinds if self.stage in PER_KIND else ())])


def parts_of(stages: Sequence[str], machine: Machine) -> list[Part]:
    """Return the parts of stages, in the order of `STAGES`."""
    parts = []
    for stage in (stage for stage in STAGES if stage in stages):
        kinds = [kind for kind in PER_KIND.get(stage, ()) if kind in machine.kinds]
        each = [machine._replace(kinds=(kind,)) for kind in kinds]
        parts += [Part(stage, one) for one in (each if stage in PER_KIND else [machine])]
    return parts


def shown(value: float | str) -> str:
    """Return a measured value as text."""
    return value if isinstance(value, str) else f"{value:.4g}"


def run_part(part: Part) -> list[Check]:
    """Run a part and print its checks; one that raises has missed."""
    print(f"-- {part.name}", flush=True)
    found: list[Check] = []

    def add(check: Check) -> None:
        found.append(check)
        what, value, bound, holds, note = check
        verdict = VERDICTS[holds].strip("*")
        print(f"{verdict:10}  {what}: {shown(value)} ({bound}) {note}".rstrip(), flush=True)

    if part.stage in NEED_A_GPU and not part.machine.is_gpu:
        add(Check(part.name, "needs a CUDA device", "-", None))
        return found
    try:
        for check in STAGES[part.stage](part.machine):
            add(check)
    except Exception as error:  # noqa: BLE001 - the other stages are worth having
        text = f"{type(error).__name__}: {error}".partition("\n")[0][:120]
        add(Check(part.name, text, "runs to its end", False))
    return found


def load(path: Path, made_by: Sequence[str]) -> Found:
    """Return what earlier calls found with the same code on the same machine.

    Args:
        path: of the JSON file beside the page.
        made_by: provenance without the command.
    """
    if not path.exists():
        return {}
    saved = json.loads(path.read_text())
    if saved["made_by"] != list(made_by):
        print(f"{path} is of other code, versions or another machine: starting over", flush=True)
        return {}
    return {name: [Check(*check) for check in checks] for name, checks in saved["found"].items()}


def save(path: Path, made_by: Sequence[str], found: Found) -> None:
    """Write what was found so far, for the next call."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"made_by": list(made_by), "found": found}, indent=1) + "\n")


def page_lines(found: Mapping[str, Sequence[Check]]) -> list[str]:
    """Return a table for each part, as Markdown lines."""
    lines: list[str] = []
    for name, checks in found.items():
        description = (STAGES[name.partition(":")[0]].__doc__ or "").partition("\n")[0]
        lines += [f"## {name}", "", description, "", "| check | measured | bound | verdict |"]
        lines.append("|---|---|---|---|")
        for what, value, bound, holds, note in checks:
            measured = f"{shown(value)} ({note})" if note else shown(value)
            cells = (what, measured, bound, VERDICTS[holds])
            lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
        lines.append("")
    return lines[:-1]


def opening(found: Mapping[str, Sequence[Check]], left: Sequence[str], is_gpu: bool) -> list[str]:
    """Return the finding, for the top of the page.

    Args:
        found: by name of the part.
        left: parts that have not run yet.
        is_gpu: as in `Machine`.
    """
    checks = [check for part in found.values() for check in part]
    judged = [check for check in checks if check.holds is not None]
    missed = [check for check in judged if not check.holds]
    count = f"{len(judged) - len(missed)} of {len(judged)} bounds hold"
    lines = [f"- **Found:** {count}, and {len(checks) - len(judged)} values were not judged."]
    lines += [f"- **Missed:** {c.what}: {shown(c.value)} ({c.bound})." for c in missed]
    if left:
        lines.append(f"- **Not run yet:** {'; '.join(left)}. The same command continues.")
    return lines if is_gpu else [NO_GPU, "", *lines]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts that are left, writing the page after each; return 1 if a bound was missed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--stages", nargs="+", choices=[*STAGES], default=[*STAGES])
    parser.add_argument("--kinds", nargs="+", choices=FITS, default=FITS, help="fits to run")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="a GPU if there is one")
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--again", action="store_true", help="repeat what earlier calls have done")
    options = parser.parse_args(arguments)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    machine = Machine(device, options.kinds)
    block = provenance("gpu_check", arguments, options.page)
    if machine.is_gpu:
        name, memory = torch.cuda.get_device_name(), torch.cuda.mem_get_info()[1]
        block.append(f"- GPU: {name}, {memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}")
    else:
        print(NO_GPU, flush=True)

    command, made_by = block[0], [*block[1:], f"- device: {device}"]
    results, parts = options.page.with_suffix(".json"), parts_of(options.stages, machine)
    found = {} if options.again else load(results, made_by)
    names = [part.name for part in parts_of([*STAGES], Machine(device))]  # in order on the page
    for part in parts:
        if part.name in found:
            print(f"-- {part.name}: from an earlier call, `--again` repeats it", flush=True)
            continue
        found[part.name] = run_part(part)
        found = {name: found[name] for name in names if name in found}
        save(results, made_by, found)
        left = [other.name for other in parts if other.name not in found]
        finding = opening(found, left, machine.is_gpu)
        lines = result_page(TITLE, finding, [[command, *made_by]], page_lines(found))
        write_page(options.page, lines)
    print("\n".join(opening(found, [], machine.is_gpu)))
    return int(any(check.holds is False for checks in found.values() for check in checks))


if __name__ == "__main__":
    # a time limit ends this process by SIGTERM: let it kill the processes of its fits
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
