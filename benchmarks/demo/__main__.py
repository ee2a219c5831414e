"""The demo against DDP with the same number of tokens: `python -m benchmarks.demo`.

Runs `recipes.pretrain` once as the demo does, once with `strategy=ddp` and everything else alike,
and some more that send other amounts, each in processes of its own; writes the figures of every
`summary.json` to a result page. Further words go to all runs as overrides:
`trainer.max_steps=100`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.common.page import provenance, result_page, write_page
from benchmarks.common.pretraining import summary_of
from recipes.training.traffic import human_bytes

PAGE = Path(__file__).with_name("result.md")
TITLE = "What does the demo reach, beside DDP with the same tokens?"
HOW_TO_READ = """\
Validation loss in nats per token over the whole validation split, of the model after the fit. Bytes
are those of one rank's training steps; DDP's are computed, the others counted. One seed. Data,
model, steps and batch are alike, and so is AdamW's learning rate, which nobody has tuned; Lion has
the recipe's own, a quarter of it."""
# what the demo changes besides the strategy are the strategy's knobs
RUNS = {
    "ddp": ["strategy=ddp"],
    "demo": ["experiment=demo"],
    "fp32": ["experiment=demo", "strategy.wire_dtype=fp32"],
    "every_50": ["experiment=demo", "strategy.sync_every=50"],
    "every_100": ["experiment=demo", "strategy.sync_every=100"],
    "lion": ["experiment=lion"],
}
NAMES = {
    "ddp": "DDP",
    "demo": "Streaming DiLoCo, H=20 (the demo)",
    "fp32": "the same, fp32 on the wire",
    "every_50": "Streaming DiLoCo, H=50",
    "every_100": "Streaming DiLoCo, H=100",
    "lion": "Distributed Lion",
}
Summaries = Mapping[str, Mapping[str, Any]]


def opening(summaries: Summaries, picture: str) -> list[str]:
    """Return what was asked and what was found, for the top of the page."""
    ddp, ours = summaries["ddp"], summaries["demo"]
    percent = 100 * (ours["validation_loss"] / ddp["validation_loss"] - 1)
    return [
        f"`make demo` trains a small GPT-2 with Streaming DiLoCo on two processes for"
        f" {ours['tokens']:,} tokens. What would DDP have made of the same tokens?",
        "",
        f"**Found:** the demo ends with a validation loss of {ours['validation_loss']:.4f}, DDP"
        f" with {ddp['validation_loss']:.4f} ({percent:+.2f} %). In its steps a rank sends"
        f" {human_bytes(ours['bytes_in_steps'])}, DDP's {human_bytes(ddp['bytes_in_steps'])}.",
        "",
        f"![validation loss over bytes]({picture})",
    ]


def table(summaries: Summaries) -> list[str]:
    """Return the comparison as lines of Markdown."""
    ddp = summaries["ddp"]
    lines = [
        "| run | tokens | validation loss | against DDP | unigram model | sent in steps |"
        " of DDP's |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, s in summaries.items():
        counted = "counted" if s["bytes_are_counted"] else "computed"
        lines.append(
            f"| {NAMES[name]} | {s['tokens']:,} | {s['validation_loss']:.4f}"
            f" | {100 * (s['validation_loss'] / ddp['validation_loss'] - 1):+.2f} %"
            f" | {s['unigram_loss']:.4f} | {human_bytes(s['bytes_in_steps'])} ({counted})"
            f" | 1/{ddp['bytes_in_steps'] / max(s['bytes_in_steps'], 1):.0f} |"
        )
    return lines


def draw(path: Path, summaries: Summaries) -> None:
    """Write a PNG: a point for each run, its loss over the bytes that it has sent."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    FigureCanvasAgg(figure)  # not pyplot, which keeps global state and may look for a display
    axes = figure.subplots()
    for name, s in summaries.items():
        axes.scatter(s["bytes_in_steps"] / 1e6, s["validation_loss"], label=NAMES[name], s=60)
    axes.set(
        xscale="log",
        xlabel="MB that a rank sends in its training steps",
        ylabel="validation loss, nats per token",
        title="The same tokens, with fewer bytes",
    )
    axes.grid(alpha=0.3)
    figure.legend(fontsize=8, loc="outside right upper")
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the jobs and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("outputs/bench/demo"))
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    options, more = parser.parse_known_args(arguments)
    if not {"ddp", "demo"} <= set(options.runs):
        parser.error("`--runs` needs ddp and demo, which the page compares")
    block = provenance("demo", more, options.page)
    summaries = {
        name: summary_of([*RUNS[name], *more], options.work / name) for name in options.runs
    }
    picture = options.page.with_suffix(".png")
    first = opening(summaries, picture.name)
    body = ["## All runs", "", *table(summaries), "", *HOW_TO_READ.splitlines()]
    write_page(options.page, result_page(TITLE, first, [block], body))
    draw(picture, summaries)


if __name__ == "__main__":
    main()
