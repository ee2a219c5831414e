"""Time a step of Distributed Lion without communication: `python -m benchmarks.lion_step`.

One run on one thread, compared with AdamW on the same parameters. Steps take turns and are measured
in CPU time, so that other load on the machine has little influence. `make gpu-check` times them on
a GPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.common.page import draw_bars, provenance, result_page, write_page
from benchmarks.common.timing import Timing, take_turns
from benchmarks.lion_step import operations as ops

PAGE = Path(__file__).with_name("result.md")
TITLE = "How long does a step of Distributed Lion take without communication?"
MODELS = {  # blocks, width, vocabulary, positions
    "5.8M": (6, 256, 4096, 128),
    "16.7M": (8, 384, 6400, 128),
    "toy": (1, 16, 64, 8),
}
HOW_TO_READ = """\
CPU time; ratios of medians to `torch.optim.AdamW(foreach=True)` on parameters of the same shapes
and values. Single worker: `DistributedLion.step`, including its vote. One of several workers: the
work of one of two workers, which casts the ballots of all buckets, reads results of two planes and
applies the step; counting is not included. AdamW's fused kernel is shown for comparison."""


def cpu_seconds_of(operation: Callable[[], object]) -> float:
    """Return the CPU seconds of this process for an operation."""
    start = time.process_time()
    operation()
    return time.process_time() - start


def opening(steps: Mapping[str, Mapping[str, Timing]], picture: str) -> list[str]:
    """Return the question and the finding, for the top of the page."""
    lines = [
        "A worker of Distributed Lion packs the signs of its update into bits and applies the"
        " result of the vote. How long does this take compared with a step of AdamW?",
        "",
    ]
    for model, timings in steps.items():
        lines.append(
            f"- **Found, {model} parameters, one thread:** a single worker takes"
            f" {timings[ops.LION].ratio:.2f} of AdamW's time, one of several workers"
            f" {timings[ops.WORKER].ratio:.2f}, not including the counting of votes."
        )
    return [*lines, "", f"![milliseconds of an optimizer step]({picture})"]


def draw(steps: Mapping[str, Mapping[str, Timing]], path: Path) -> None:
    """Draw the times of the optimizer steps as a PNG."""
    groups = {
        f"{model} parameters": {name: 1e3 * timing.seconds for name, timing in timings.items()}
        for model, timings in steps.items()
    }
    draw_bars(path, "An optimizer step on one thread", "ms of CPU time", groups)


def step_lines(timings: dict[str, Timing], shapes: Sequence[tuple[int, ...]]) -> list[str]:
    """Return the times of the optimizer steps as Markdown lines, with the verdict on the target."""
    numel = sum(torch.Size(shape).numel() for shape in shapes)
    alone = timings[ops.LION].ratio
    return [
        f"### GPT-2, {numel:,} parameters in {len(shapes)} tensors",
        "",
        "| step | ms | ratio to AdamW |",
        "|---|---|---|",
        *(_row(name, timing) for name, timing in timings.items()),
        "",
        f"Target, a single worker takes at most AdamW's time: {alone:.3f},"
        f" {'met' if alone <= 1 else 'missed'}.",
        "",
    ]


def _row(name: str, timing: Timing) -> str:
    return f"| {name} | {1e3 * timing.seconds:.2f} | {timing.ratio:.3f} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lion_step", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--rounds", type=int, default=21, help="measured rounds (%(default)s)")
    parser.add_argument("--models", nargs="+", default=["5.8M", "16.7M"], choices=list(MODELS))
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"rounds={options.rounds} must be 1 or more")
    block = provenance("lion_step", arguments, options.page)
    cpu = torch.device("cpu")
    torch.set_num_threads(1)  # this process measures and ends
    lines = ["## A whole step", "", HOW_TO_READ, ""]
    steps = {}
    for model in options.models:
        shapes = ops.gpt2_shapes(*MODELS[model])
        steps[model] = take_turns(ops.step_operations(shapes, cpu), options.rounds, cpu_seconds_of)
        lines += step_lines(steps[model], shapes)
    picture = options.page.with_suffix(".png")
    draw(steps, picture)
    block.append("- threads: 1")
    write_page(options.page, result_page(TITLE, opening(steps, picture.name), [block], lines[:-1]))


if __name__ == "__main__":
    main()
