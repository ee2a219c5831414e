"""Compare the demo with DDP on the same number of tokens: `python -m benchmarks.demo`.

Runs `recipes.pretrain` twice, once as the demo does and once with `strategy=ddp` and everything
else the same, and writes the figures of both `summary.json` to the result page. Further words are
overrides for both runs, such as `trainer.max_steps=100`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.page import provenance, result_page, write_page
from benchmarks.common.pretraining import summary_of
from lightning_commfree.comm.text import human_bytes

PAGE = Path(__file__).with_name("result.md")
TITLE = "Which loss does the demo reach, compared with DDP on the same tokens?"
HOW_TO_READ = """\
Validation loss in nats per token over the whole validation split, of the model after the fit; one
run each, with seed 1."""
RUNS = {
    "ddp": ["strategy=ddp"],  # the demo changes only the strategy and its settings
    "streaming_diloco": ["experiment=demo"],
}


def opening(summaries: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the question and the finding, for the top of the page."""
    ddp, ours = summaries["ddp"], summaries["streaming_diloco"]
    percent = 100 * (ours["validation_loss"] / ddp["validation_loss"] - 1)
    return [
        f"`make demo` trains a small GPT-2 with Streaming DiLoCo on two processes for"
        f" {ours['tokens']:,} tokens. Which loss does DDP reach with the same tokens?",
        "",
        f"**Found:** the demo ends with a validation loss of {ours['validation_loss']:.4f}, DDP"
        f" with {ddp['validation_loss']:.4f} ({percent:+.2f} %). A rank sends"
        f" {human_bytes(ours['bytes_in_steps'])} in its steps, and"
        f" {human_bytes(ddp['bytes_in_steps'])} with DDP.",
    ]


def table(summaries: dict[str, dict[str, Any]]) -> list[str]:
    """Return the comparison as Markdown lines."""
    ddp_loss = summaries["ddp"]["validation_loss"]
    lines = [
        "| strategy | tokens | validation loss | against DDP | unigram model | sent in steps |",
        "|---|---|---|---|---|---|",
    ]
    for name, s in summaries.items():
        counted = "counted" if s["bytes_are_counted"] else "computed"
        lines.append(
            f"| {name} | {s['tokens']:,} | {s['validation_loss']:.4f}"
            f" | {100 * (s['validation_loss'] / ddp_loss - 1):+.2f} % | {s['unigram_loss']:.4f}"
            f" | {human_bytes(s['bytes_in_steps'])} ({counted}) |"
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Run both and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("outputs/bench/demo"))
    parser.add_argument("--page", type=Path, default=PAGE)
    options, more = parser.parse_known_args(arguments)
    block = provenance("demo", more, options.page)
    summaries = {
        name: summary_of([*overrides, *more], options.work / name)
        for name, overrides in RUNS.items()
    }
    body = ["## Both runs", "", *table(summaries), "", *HOW_TO_READ.splitlines()]
    write_page(options.page, result_page(TITLE, opening(summaries), [block], body))


if __name__ == "__main__":
    main()
