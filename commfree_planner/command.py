"""`commfree-plan`: what a link makes of a training, on the command line.

::

    commfree-plan --parameters 124e6 --blocks 12 --outside 39e6 --step-time 0.35 --bandwidth 0.1

The recipe `recipes.plan` does the same for a model of transformers, counted exactly, and draws it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from commfree_planner.advice import Advice, advise
from commfree_planner.bytes_sent import GRADIENT_DTYPES, WIRE_DTYPES
from commfree_planner.model import Model
from commfree_planner.training import Method, Training, methods

TARGETS = (0.5, 0.9, 0.99)  # utilizations whose bandwidth the table names


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table and the advice; what cannot be planned ends with a sentence and status 2."""
    parser = _parser()
    options = parser.parse_args(arguments)

    try:
        training, advice = _planned(options)
    except (TypeError, ValueError) as error:
        parser.error(str(error))

    print("\n".join(_lines(training, options.bandwidth, advice, options.target)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="commfree-plan",
        description="What a link makes of a training, before anything is trained: a simulation.",
    )
    add = parser.add_argument
    add("--parameters", type=_count, required=True, help="trainable ones, such as 124e6")
    add("--blocks", type=int, required=True, help="transformer blocks")
    add("--outside", type=_count, default=0, help="of them outside of the blocks: embeddings")
    add("--step-time", type=float, required=True, help="seconds of a step that waits for nobody")
    add("--bandwidth", type=float, required=True, help="Gbit/s that one replica can send")
    add("--num-replicas", type=int, default=2)
    add("--sync-every", type=int, default=100)
    add("--num-fragments", type=int, help="3 blocks each if it is not given")
    add("--overlap-steps", type=int, default=1)
    add("--wire-dtype", choices=WIRE_DTYPES, default="fp4")
    add("--gradient-dtype", choices=GRADIENT_DTYPES, default="fp32", help="of DDP's gradients")
    add("--target", type=float, default=0.95, help="share of the time that shall be computed in")
    return parser


def _count(text: str) -> int:
    number = float(text)
    if number != int(number):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number")
    return int(number)


def _planned(options: argparse.Namespace) -> tuple[Training, Advice]:
    parameters, blocks, outside = options.parameters, options.blocks, options.outside
    if blocks < 1 or not 0 <= outside <= parameters - blocks:
        raise ValueError(
            f"{parameters:,} parameters cannot be {outside:,} outside of blocks and at least one in"
            f" each of {blocks} blocks. Give counts of the whole model."
        )

    in_blocks = parameters - outside
    sizes = [in_blocks * (i + 1) // blocks - in_blocks * i // blocks for i in range(blocks)]
    training = Training(
        Model(tuple(sizes), outside),
        options.step_time,
        num_replicas=options.num_replicas,
        sync_every=options.sync_every,
        num_fragments=options.num_fragments,
        overlap_steps=options.overlap_steps,
        wire_dtype=options.wire_dtype,
        gradient_dtype=options.gradient_dtype,
    )
    return training, advise(training, options.bandwidth, options.target)


def _lines(training: Training, gbit_per_s: float, advice: Advice, target: float) -> Iterator[str]:
    yield from _table(training, methods(training), gbit_per_s)
    yield ""

    verdict = "reaches" if advice.reaches_target else "does not reach"
    yield (
        f"Advice: sync_every={advice.sync_every} num_fragments={advice.num_fragments}"
        f" overlap_steps={advice.overlap_steps}: utilization {advice.utilization:.1%}, which"
        f" {verdict} {target:.0%}."
    )
    yield from (f"- {reason}" for reason in advice.reasons)


def _table(training: Training, compared: Sequence[Method], gbit_per_s: float) -> Iterator[str]:
    head = ["method", "setting", f"at {gbit_per_s:g} Gbit/s", "seconds/step", "MB/step"]
    rows = [[*head, *(f"Gbit/s for {target:.0%}" for target in TARGETS)]]
    for name, setting, exchange in compared:
        reached = training.utilization(exchange, gbit_per_s)
        needed = (training.needed_gbit_per_s(exchange, target) for target in TARGETS)
        rows.append(
            [
                *(name, setting, f"{reached:.1%}", f"{training.step_seconds / reached:.4g}"),
                f"{exchange.bytes_per_step / 1e6:.4g}",
                *(f"{gbit:.3g}" for gbit in needed),
            ]
        )

    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        names, figures = row[:2], row[2:]
        left = [text.ljust(width) for text, width in zip(names, widths, strict=False)]
        right = [text.rjust(width) for text, width in zip(figures, widths[2:], strict=True)]
        yield "  ".join([*left, *right])


if __name__ == "__main__":
    main()
