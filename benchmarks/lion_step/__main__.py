"""Time a step of Distributed Lion without communication: `python -m benchmarks.lion_step`.

One run on one thread. First the vote alone: packing the signs of fp32 values, counting ballots and
unpacking the result, compared with a copy of the values and `numpy.packbits`. Then whole optimizer
steps, compared with AdamW on the same parameters. Operations take turns and are measured in CPU
time, so that other load on the machine has little influence. With a GPU, its times follow, compared
with the limit of its memory bandwidth.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks.common.page import draw_bars, provenance, result_page, write_page
from benchmarks.common.timing import Timing, seconds_of, take_turns
from benchmarks.lion_step import operations as ops

PAGE = Path(__file__).with_name("result.md")
TITLE = "How long does a step of Distributed Lion take without communication?"
WORKERS = (2, 3, 4, 8, 16, 32)
MODELS = {  # blocks, width, vocabulary, positions
    "5.8M": (6, 256, 4096, 128),
    "16.7M": (8, 384, 6400, 128),
    "toy": (1, 16, 64, 8),
}
# bytes per parameter that must be read or written: fp32 values once each, and packed planes
FLOOR_BYTES = {
    ops.PACK: 4 + 1 / 8,
    ops.UNPACK: 4 + 2 / 8,
    ops.CAST: 8 + 2 / 8,  # gradient and momentum; two planes
    ops.APPLY: 20 + 2 / 8,  # gradient read, momentum and parameter read and written; two planes
    ops.LION: 28 + 4 / 8,
    ops.WORKER: 28 + 4 / 8,
    ops.ADAMW: 28,  # gradient read, parameter and both moments read and written
    ops.ADAMW_FUSED: 28,
}

HOW_TO_READ_VOTE = """\
CPU time; ratios of medians to copying the same fp32 values between two buffers. *Pack* compares
with 0 and packs in chunks, like a worker; `numpy.packbits` gets the same comparison over all values
at once. *Vote* counts the ballots of n workers on one rank's share of the parameters (1/n of them),
including ties; *unpack and add* finds the same signs by unpacking every ballot and adding in int16.
*Unpack* reads a result of two planes (with ties) as fp32. Pack + vote + unpack is the sum of the
medians."""
HOW_TO_READ_STEP = """\
CPU time; ratios of medians to `torch.optim.AdamW(foreach=True)` on parameters of the same shapes
and values. Single worker: `DistributedLion.step`, including its vote. One of several workers: the
work of one of two workers, which casts the ballots of all buckets, reads results of two planes and
applies the step; counting is not included and is in the table below. AdamW's fused kernel is shown
for comparison."""


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


def vote_lines(timings: dict[str, Timing], numel: int) -> list[str]:
    """Return the times of packing, counting and unpacking as Markdown lines."""
    lines = ["## Pack, vote, unpack", "", f"{numel:,} parameters.", HOW_TO_READ_VOTE, ""]
    lines += ["| operation | ms | ratio to the copy |", "|---|---|---|"]
    for name in (ops.COPY, ops.PACKBITS, ops.PACK, ops.UNPACK):
        if name in timings:
            lines.append(_row(name, timings[name]))
    lines += ["", "| n | vote, ms | unpack and add, ms | ratio | pack + vote + unpack, ms"]
    lines[-1] += " | ratio to the copy | ratio to `numpy.packbits` |"
    lines.append("|---|---|---|---|---|---|---|")
    packbits = timings.get(ops.PACKBITS)
    for n in WORKERS:
        ours, plain = timings[ops.vote_name(n)].seconds, timings[ops.plain_name(n)].seconds
        whole = timings[ops.PACK].seconds + ours + timings[ops.UNPACK].seconds
        against = f"{whole / packbits.seconds:.2f}" if packbits else "-"
        lines.append(
            f"| {n} | {1e3 * ours:.3f} | {1e3 * plain:.3f} | {plain / ours:.1f} | {1e3 * whole:.2f}"
            f" | {whole / timings[ops.COPY].seconds:.2f} | {against} |"
        )
    return lines


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


def gpu_lines(rounds: int, numel: int, model: str) -> list[str]:
    """Measure on the GPU, relative to its memory bandwidth; without one, return the reason."""
    title = ["## On a GPU, relative to its memory bandwidth", ""]
    if not torch.cuda.is_available():
        return [*title, "Not measured: this machine has no CUDA device."]
    device = torch.device("cuda")
    clock = partial(seconds_of, device=device)
    votes = take_turns(ops.vote_operations(numel, WORKERS, device), rounds, clock)
    shapes = ops.gpt2_shapes(*MODELS[model])
    steps = take_turns(ops.step_operations(shapes, device), rounds, clock)
    bytes_per_s = 8 * numel / votes[ops.COPY].seconds
    lines = [
        *title,
        f"{torch.cuda.get_device_name(device)}; a copy of {numel:,} fp32 values reads and writes"
        f" {bytes_per_s / 1e9:.0f} GB per second. Floor: the time for all bytes that must be read"
        " or written once, at this rate. Times include all work on the GPU; a"
        " `DistributedLion.step` includes the transfer of packed bytes to the host and back.",
        "",
        "| operation | ms | floor, ms | ratio to the floor |",
        "|---|---|---|---|",
    ]
    params = sum(torch.Size(shape).numel() for shape in shapes)
    floors = {name: FLOOR_BYTES[name] * numel for name in (ops.PACK, ops.UNPACK)}
    floors |= {ops.vote_name(n): numel / 8 + 2 * numel / n / 8 for n in WORKERS}
    floors |= {name: FLOOR_BYTES[name] * params for name in steps}
    for name, num_bytes in floors.items():
        seconds, floor = (votes | steps)[name].seconds, num_bytes / bytes_per_s
        lines.append(
            f"| {name} | {1e3 * seconds:.3f} | {1e3 * floor:.3f} | {seconds / floor:.1f} |"
        )
    return lines


def _row(name: str, timing: Timing) -> str:
    return f"| {name} | {1e3 * timing.seconds:.2f} | {timing.ratio:.3f} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lion_step", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--numel", type=int, default=2**24, help="voted parameters (%(default)s)")
    parser.add_argument("--rounds", type=int, default=21, help="measured rounds (%(default)s)")
    parser.add_argument("--models", nargs="+", default=["5.8M", "16.7M"], choices=list(MODELS))
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args(arguments)
    if options.numel < 1 or options.rounds < 1:
        parser.error(f"numel={options.numel} and rounds={options.rounds} must both be 1 or more")
    block = provenance("lion_step", arguments, options.page)
    cpu = torch.device("cpu")
    torch.set_num_threads(1)  # this process measures and ends
    timings = take_turns(
        ops.vote_operations(options.numel, WORKERS, cpu), options.rounds, cpu_seconds_of
    )
    lines = ["## A whole step", "", HOW_TO_READ_STEP, ""]
    steps = {}
    for model in options.models:
        shapes = ops.gpt2_shapes(*MODELS[model])
        steps[model] = take_turns(ops.step_operations(shapes, cpu), options.rounds, cpu_seconds_of)
        lines += step_lines(steps[model], shapes)
    lines += [*vote_lines(timings, options.numel), ""]
    lines += gpu_lines(options.rounds, options.numel, options.models[-1])
    picture = options.page.with_suffix(".png")
    draw(steps, picture)
    block.append("- threads: 1")
    write_page(options.page, result_page(TITLE, opening(steps, picture.name), [block], lines))


if __name__ == "__main__":
    main()
