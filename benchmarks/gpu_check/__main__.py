"""Check correctness and cost on a GPU: `make gpu-check`, or `python -m benchmarks.gpu_check`.

Each stage prints what it measured, the bound and a verdict, and all of them together write one
Markdown page. Without a GPU the stages that a CPU can play run, in small sizes, and times are not
judged. Half an hour on one GPU; with two or four, NCCL is checked too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.common.page import BENCHMARKS, provenance, result_page, write_page
from benchmarks.gpu_check.stages import FITS, NEED_A_GPU, STAGES, Check, Machine

PAGE = BENCHMARKS.parent / "build" / "gpu_check.md"  # may be made with uncommitted changes
TITLE = "What does the library do on a GPU?"
NO_GPU = (
    "No CUDA device here: the CPU played what it could, in small sizes, and times are not judged."
)
VERDICTS = {True: "holds", False: "**MISSED**", None: "not judged"}


def shown(value: float | str) -> str:
    """Return a measured value as text."""
    return value if isinstance(value, str) else f"{value:.4g}"


def run_stage(name: str, machine: Machine) -> list[Check]:
    """Run a stage and print its checks; one that raises has missed."""
    print(f"-- {name}", flush=True)
    found: list[Check] = []

    def add(check: Check) -> None:
        found.append(check)
        what, value, bound, holds, note = check
        verdict = VERDICTS[holds].strip("*")
        print(f"{verdict:10}  {what}: {shown(value)} ({bound}) {note}".rstrip(), flush=True)

    if name in NEED_A_GPU and not machine.is_gpu:
        add(Check(name, "needs a CUDA device", "-", None))
        return found
    try:
        for check in STAGES[name](machine):
            add(check)
    except Exception as error:  # noqa: BLE001 - the other stages are worth having
        text = f"{type(error).__name__}: {error}".partition("\n")[0][:120]
        add(Check(name, text, "runs to its end", False))
    return found


def page_lines(found: Mapping[str, Sequence[Check]]) -> list[str]:
    """Return a table for each stage, as Markdown lines."""
    lines: list[str] = []
    for name, checks in found.items():
        description = (STAGES[name].__doc__ or "").partition("\n")[0]
        lines += [f"## {name}", "", description, "", "| check | measured | bound | verdict |"]
        lines.append("|---|---|---|---|")
        for what, value, bound, holds, note in checks:
            measured = f"{shown(value)} ({note})" if note else shown(value)
            cells = (what, measured, bound, VERDICTS[holds])
            lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
        lines.append("")
    return lines[:-1]


def opening(found: Mapping[str, Sequence[Check]], machine: Machine) -> list[str]:
    """Return the finding, for the top of the page."""
    checks = [check for stage in found.values() for check in stage]
    judged = [check for check in checks if check.holds is not None]
    missed = [check for check in judged if not check.holds]
    count = f"{len(judged) - len(missed)} of {len(judged)} bounds hold"
    lines = [f"- **Found:** {count}, and {len(checks) - len(judged)} values were not judged."]
    lines += [f"- **Missed:** {c.what}: {shown(c.value)} ({c.bound})." for c in missed]
    return lines if machine.is_gpu else [NO_GPU, "", *lines]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages and write the page; return 1 if a bound was missed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--stages", nargs="+", choices=[*STAGES], default=[*STAGES])
    parser.add_argument("--kinds", nargs="+", choices=FITS, default=FITS, help="fits to run")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="a GPU if there is one")
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args(arguments)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    machine = Machine(device, options.kinds)
    block = provenance("gpu_check", arguments, options.page)
    if machine.is_gpu:
        name, memory = torch.cuda.get_device_name(), torch.cuda.mem_get_info()[1]
        block.append(f"- GPU: {name}, {memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}")
    else:
        print(NO_GPU, flush=True)

    found = {name: run_stage(name, machine) for name in options.stages}
    finding = opening(found, machine)
    write_page(options.page, result_page(TITLE, finding, [block], page_lines(found)))
    print("\n".join(finding))
    return int(any(check.holds is False for checks in found.values() for check in checks))


if __name__ == "__main__":
    sys.exit(main())
