"""`commfree-plan`: predict the utilization of a training run on the command line.

::

    commfree-plan --parameters 124e6 --blocks 12 --outside 39e6 --step-time 0.35 --bandwidth 0.1

The recipe `recipes.plan` does the same for a transformers model with exact counts, and draws it.
"""

from __future__ import annotations

import argparse
import math
import textwrap
from collections.abc import Iterator, Sequence

from commfree_planner.advice import Advice, advise, plain
from commfree_planner.bytes_sent import GRADIENT_DTYPES, WIRE_DTYPES
from commfree_planner.choice import Choice, alternatives, choose
from commfree_planner.inside import inside_line
from commfree_planner.methods import Method, methods
from commfree_planner.model import Model
from commfree_planner.training import Training

_WIDTH = 80  # columns of a standard terminal
TARGETS = (0.5, 0.9, 0.99)  # utilizations whose bandwidth is shown


def main(arguments: Sequence[str] | None = None) -> None:
    """Print tables and advice; exit with a message and status 2 if the arguments are invalid."""
    parser = _parser()
    options = parser.parse_args(arguments)

    try:
        training, advice = _plan(options)
        choice = choose(training, options.bandwidth, options.target, advice)
        within = [] if options.replica_size == 1 else [inside_line(training, options.replica_size)]
    except (TypeError, ValueError) as error:
        parser.error(str(error))

    print("\n".join(_lines(training, options.bandwidth, choice, advice, options.target)))
    for line in within:
        print("", *_folded(line), sep="\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="commfree-plan",
        description="Predict the utilization of a training run at a bandwidth, by simulation.",
        epilog="elastic replicas: a bucket is as fast as all of them together; a hub is one machine"
        " with a link like a replica's, which carries the bytes of all.",
    )
    add = parser.add_argument
    add("--parameters", type=_count, required=True, help="trainable parameters, such as 124e6")
    add("--blocks", type=int, required=True, help="transformer blocks")
    add("--outside", type=_count, default=0, help="parameters outside of the blocks: embeddings")
    add("--step-time", type=float, required=True, help="seconds of a step without waiting")
    add("--bandwidth", type=float, required=True, help="Gbit/s that one replica can send")
    add("--latency", type=float, default=0.0, help="of the link, one way, seconds: half a ping")
    add("--loss", type=float, default=0.0, help="share of packets lost; needs --latency")
    add("--bbr", action="store_true", help="TCP uses BBR instead of CUBIC")
    add("--sync-time", type=float, default=0.0, help="seconds per cycle of encoding and decoding")
    add("--tokens-per-step", type=_count, help="of a replica; adds the row of tensor parallelism")
    add("--width", type=int, help="activations per token; default: GPT-2's")
    add("--num-replicas", type=int, default=2)
    add("--replica-size", type=int, default=1, help="ranks of a replica; if above 1, adds a line")
    add("--sync-every", type=int, help="to fix it; default: 100 in the tables")
    add("--num-fragments", type=int, help="default: 3 blocks per fragment")
    add("--overlap-steps", type=int, help="to fix it; default: 1 in the tables")
    add("--wire-dtype", choices=WIRE_DTYPES, default="fp4")
    add("--gradient-dtype", choices=GRADIENT_DTYPES, default="fp32", help="of DDP's gradients")
    add("--target", type=float, default=0.95, help="share of the time for computing")
    return parser


def _count(text: str) -> int:
    """Parse an integer such as 124e6; raise argparse's error for other text."""
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number: write 124e6") from None
    if not math.isfinite(number) or number != int(number):
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer")
    return int(number)


def _plan(options: argparse.Namespace) -> tuple[Training, Advice]:
    """Return the training that the options describe, and the advice for it."""
    parameters, blocks, outside = options.parameters, options.blocks, options.outside
    if blocks < 1 or not 0 <= outside <= parameters - blocks:
        raise ValueError(
            f"{parameters:,} parameters are too few for {outside:,} outside of blocks and at least"
            f" one in each of {blocks} blocks. Pass counts of the whole model."
        )

    in_blocks = parameters - outside
    sizes = [in_blocks * (i + 1) // blocks - in_blocks * i // blocks for i in range(blocks)]
    pace = {"sync_every": options.sync_every, "overlap_steps": options.overlap_steps}
    fixed = {name: steps for name, steps in pace.items() if steps is not None}
    training = Training(
        Model(tuple(sizes), outside, options.width),
        options.step_time,
        num_replicas=options.num_replicas,
        num_fragments=options.num_fragments,
        wire_dtype=options.wire_dtype,
        gradient_dtype=options.gradient_dtype,
        latency_s=options.latency,
        loss=options.loss,
        bbr=options.bbr,
        sync_seconds=options.sync_time,
        tokens_per_step=options.tokens_per_step,
        **fixed,
    )
    return training, advise(training, options.bandwidth, options.target, fixed)


def _lines(
    training: Training, gbit_per_s: float, choice: Choice, advice: Advice, target: float
) -> Iterator[str]:
    compared = methods(training)
    yield from _aligned(_utilization_rows(training, compared, gbit_per_s))
    yield ""
    yield from _aligned(_bandwidth_rows(training, compared))
    yield ""

    setting = f" ({choice.setting})" if choice.setting else ""
    yield from _folded(f"Use strategy={choice.strategy}{setting}: {choice.utilization:.1%}.")
    for reason in choice.reasons:
        yield from _folded(f"- {reason}", "  ")
    yield ""
    for line in alternatives(training, gbit_per_s, target, choice, advice):
        yield from _folded(line, "  " if line.startswith("- ") else "")


def _utilization_rows(
    training: Training, compared: Sequence[Method], gbit_per_s: float
) -> list[list[str]]:
    rows = [["method", "setting", f"at {gbit_per_s:g} Gbit/s", "seconds/step", "MB/step"]]
    for name, setting, exchange in compared:
        reached = training.utilization(exchange, gbit_per_s)
        seconds = training.step_seconds / reached
        sent = exchange.bytes_per_step / 1e6
        rows.append([name, setting, f"{reached:.1%}", plain(seconds, 4), plain(sent, 4)])
    return rows


def _bandwidth_rows(training: Training, compared: Sequence[Method]) -> list[list[str]]:
    rows = [["Gbit/s needed", "", *(f"for {target:.0%}" for target in TARGETS)]]
    for name, setting, exchange in compared:
        needed = (training.needed_gbit_per_s(exchange, target) for target in TARGETS)
        cells = ("never" if math.isinf(gbit) else plain(gbit) for gbit in needed)
        rows.append([name, setting, *cells])
    return rows


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table: two columns of text, then numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, widths, strict=True)
        yield "  ".join(
            text.ljust(width) if place < 2 else text.rjust(width)
            for place, (text, width) in enumerate(cells)
        )


def _folded(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent=indent, break_on_hyphens=False)


if __name__ == "__main__":
    main()
