"""Measure the error and speed of the wire formats: `python -m benchmarks.wire`.

The first part trains the recipes' small GPT-2 in this process, takes outer gradients (old minus
new weights after `--sync-every` steps of AdamW) and measures the error of each format, and of E3M0
with other blocks and scales. The second part times encoding and decoding on one thread, relative to
copying the same fp32 values between two buffers; the operations take turns. Further words are
overrides for the training, such as `data=synthetic`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.common.page import draw_bars, provenance, result_page, write_page
from benchmarks.common.timing import Timing, seconds_of, take_turns
from benchmarks.wire.errors import Error, grid_errors, outer_gradients, wire_errors
from lightning_commfree.diloco import CODECS
from lightning_commfree.diloco.codec import BLOCK, Codec, Fp4Codec, Int2Codec, Int8Codec, decode_all

PAGE = Path(__file__).with_name("result.md")
TITLE = "How large is the error of the wire formats, and how fast are they?"
COPY = "copy"
TIMED: dict[str, Codec] = {
    **CODECS,
    "int8 in torch operations": Int8Codec(compiled=False),
    "fp4 in torch operations": Fp4Codec(compiled=False),
    "int2 in torch operations": Int2Codec(compiled=False),
}
COPY_TO_NEW = "copy into new memory"
NEAREST = "power of two, nearest"
PLAIN_SCALES = (NEAREST, "fp16 largest", "fp32 largest")
SEARCHED = ("power of two, least error", "fp32, least error of 24")
OTHER_TOPS = (NEAREST, "power of two, down", "power of two, up", *SEARCHED)
CLEARLY = 0.1  # share of the error that another block or scale must save to replace the choice
CLEARLY_BITS = 0.5  # with at most this many bits per value more than the chosen format

HOW_TO_READ_ERRORS = """\
Over all outer gradients together. Error: the norm of (decoded - value) over the norm of the values.
Zeroed: the share of nonzero values that become zero."""
HOW_TO_READ_GRID = """\
Each cell: error / zeroed, at bits per value. A scale of one byte is a power of two; the others are
the block's exact largest magnitude."""
HOW_TO_READ_TOPS = """\
Down and up: the power of two below and above the block's largest magnitude, instead of the nearest.
Least error: the scale with the least squared error for each block, of four powers of two or of 24
fp32 scales over three octaves; an encoder would have to try all of them."""
HOW_TO_READ_TIMES = """\
One thread; medians of operations that take turns; ratio to copying the same fp32 values between two
buffers. All operations write to existing buffers, except for the copy into new memory, whose pages
the system must allocate; this is why a thread keeps its scratch memory. On a CPU, int8, fp4 and
int2 are loops compiled by numba. Without numba they are torch operations, where each step of the
arithmetic is a pass over scratch memory that stays in the cache: eleven passes to encode fp4 and
six to decode it, each at a fraction of a copy, because memory is hardly slower than cache here."""


def operations(values: Tensor) -> dict[str, Callable[[], object]]:
    """Return the copies, and encoding and decoding of fp32 `values` with every format."""
    copied, decoded = torch.empty_like(values), torch.empty_like(values)
    table: dict[str, Callable[[], object]] = {
        COPY: lambda: copied.copy_(values),
        COPY_TO_NEW: values.clone,
    }
    for name, wire in TIMED.items():
        size = wire.num_bytes(values.numel())
        payload = torch.empty(size, dtype=torch.uint8, device=values.device)
        wire.encode(values, out=payload)
        table |= {
            f"{name} encode": partial(wire.encode, values, payload),
            f"{name} decode": partial(decode_all, wire, payload, decoded),
        }
    return table


def opening(errors: Mapping[str, Error], timings: Mapping[str, Timing], picture: str) -> list[str]:
    """Return the question and the finding, for the top of the page."""
    fp4, int8 = errors["fp4"], errors["int8"]
    return [
        "Outer gradients are sent with few bits per value. How large is the error, and how long do"
        " encoding and decoding take?",
        "",
        f"- **Found:** fp4 takes {fp4.bits_per_value:.2f} bits per value, with an error of"
        f" {100 * fp4.relative_rms:.0f} % of the norm and a cosine of {fp4.cosine:.3f}; int8 takes"
        f" {int8.bits_per_value:.2f} bits, with {100 * int8.relative_rms:.1f} %.",
        f"- Encoding fp4 takes {timings['fp4 encode'].ratio:.2f} times as long as copying the fp32"
        f" values, decoding it {timings['fp4 decode'].ratio:.2f} times.",
        "",
        f"![error by wire format]({picture})",
    ]


def draw(errors: Mapping[str, Error], path: Path) -> None:
    """Draw the error of each format as a PNG."""
    groups = {
        f"{name}, {error.bits_per_value:.1f} bits": {"error": 100 * error.relative_rms}
        for name, error in errors.items()
    }
    draw_bars(path, "Error of an outer gradient by format", "% of its norm", groups)


def verdict(grid: dict[tuple[int | None, str], Error]) -> str:
    """Return which block size and scale the figures support."""
    chosen = grid[BLOCK, NEAREST]
    most_bits = chosen.bits_per_value + CLEARLY_BITS
    affordable = {k: e for k, e in grid.items() if e.bits_per_value <= most_bits}
    searched = {k: e for k, e in affordable.items() if k[1] in SEARCHED}
    one_pass = {k: e for k, e in affordable.items() if k[1] not in SEARCHED}
    saved = 1 - min(e.relative_rms for e in one_pass.values()) / chosen.relative_rms
    conclusion = (
        f"Without a search nothing saves {100 * CLEARLY:.0f} % of the error: the choice stands."
        if saved < CLEARLY
        else f"{100 * saved:.1f} % without a search: the figures do not support the choice."
    )
    return (
        f"Chosen: blocks of {BLOCK}, one byte of scale, an error of {chosen.relative_rms:.4f} at"
        f" {chosen.bits_per_value:.3f} bits per value. Within {CLEARLY_BITS} bits more, the least"
        f" error without a search is {_best(one_pass, chosen)}; the least of all is"
        f" {_best(searched, chosen)}, where every block is encoded with every candidate."
        f" {conclusion}"
    )


def _best(errors: dict[tuple[int | None, str], Error], chosen: Error) -> str:
    (block, scale), best = min(errors.items(), key=lambda item: item[1].relative_rms)
    saved = 100 * (1 - best.relative_rms / chosen.relative_rms)
    more = 100 * (best.bits_per_value / chosen.bits_per_value - 1)
    return (
        f"{best.relative_rms:.4f} ({saved:.1f} % less for {more:.1f} % more bytes;"
        f" {_block_name(block)}, scale: {scale})"
    )


def error_lines(gradients: Sequence[Sequence[Tensor]]) -> list[str]:
    """Return the measured errors as Markdown lines."""
    flat = [values for cycle in gradients for values in cycle]
    grid = grid_errors(flat)
    fragments = range(len(gradients[0]))
    by_fragment = [wire_errors([cycle[p] for cycle in gradients]) for p in fragments]
    sizes = ", ".join(f"{values.numel():,}" for values in gradients[0])
    return [
        "## Error",
        "",
        f"{len(gradients)} outer gradients of {len(fragments)} fragments ({sizes} values).",
        HOW_TO_READ_ERRORS,
        "",
        "| wire_dtype | bits per value | error | cosine | zeroed | error by fragment |",
        "|---|---|---|---|---|---|",
        *(
            f"| {name} | {e.bits_per_value:.3f} | {e.relative_rms:.4f} | {e.cosine:.5f}"
            f" | {100 * e.zeroed:.2f} %"
            f" | {', '.join(f'{errors[name].relative_rms:.4f}' for errors in by_fragment)} |"
            for name, e in wire_errors(flat).items()
        ),
        "",
        "## E3M0 by block and scale",
        "",
        HOW_TO_READ_GRID,
        "",
        *_grid_table(grid, PLAIN_SCALES),
        "",
        HOW_TO_READ_TOPS,
        "",
        *_grid_table(grid, OTHER_TOPS),
        "",
        verdict(grid),
        "",
    ]


def time_lines(timings: Mapping[str, Timing], numel: int, rounds: int) -> list[str]:
    """Return the measured times as Markdown lines."""
    return [
        "## Time",
        "",
        f"{numel:,} values, {rounds} rounds.",
        HOW_TO_READ_TIMES,
        "",
        "| operation | median ms | GB of fp32 per second | ratio to copy |",
        "|---|---|---|---|",
        *(
            f"| {name} | {1e3 * seconds:.3f} | {4 * numel / seconds / 1e9:.1f} | {ratio:.2f} |"
            for name, (seconds, ratio) in timings.items()
        ),
    ]


def _grid_table(grid: dict[tuple[int | None, str], Error], scales: Sequence[str]) -> list[str]:
    blocks = list(dict.fromkeys(block for block, _ in grid))

    def cell(block: int | None, scale: str) -> str:
        e = grid[block, scale]
        return f"{e.relative_rms:.4f} / {100 * e.zeroed:.1f} % at {e.bits_per_value:.3f}"

    return [
        f"| block | {' | '.join(scales)} |",
        "|---" * (len(scales) + 1) + "|",
        *(
            f"| {_block_name(block)} | {' | '.join(cell(block, scale) for scale in scales)} |"
            for block in blocks
        ),
    ]


def _block_name(block: int | None) -> str:
    return "whole fragment" if block is None else f"blocks of {block}"


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sync-every", type=int, default=100, help="steps (%(default)s)")
    parser.add_argument("--cycles", type=int, default=4, help="outer gradients (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=16, help="blocks per step (%(default)s)")
    parser.add_argument("--numel", type=int, default=2**24, help="values timed (%(default)s)")
    parser.add_argument("--rounds", type=int, default=21, help="measured rounds (%(default)s)")
    parser.add_argument("--device", type=torch.device, default="cpu", help="%(default)s or cuda")
    parser.add_argument("--page", type=Path, default=PAGE)
    options, overrides = parser.parse_known_args(arguments)
    counts = {k: getattr(options, k) for k in ("sync_every", "cycles", "numel", "rounds")}
    if min(counts.values()) < 1:
        parser.error(f"{counts} must all be 1 or more")
    block = provenance("wire", arguments, options.page)
    with _one_thread():
        gradients = outer_gradients(
            options.sync_every, options.cycles, options.batch_size, overrides
        )
        values = 1e-3 * torch.randn(options.numel, device=options.device)
        clock = partial(seconds_of, device=options.device)
        timings = take_turns(operations(values), options.rounds, clock)
    picture = options.page.with_suffix(".png")
    errors = wire_errors([gradient for of_fragment in gradients for gradient in of_fragment])
    draw(errors, picture)
    body = [*error_lines(gradients), *time_lines(timings, options.numel, options.rounds)]
    first = opening(errors, timings, picture.name)
    write_page(options.page, result_page(TITLE, first, [block], body))


if __name__ == "__main__":
    main()
