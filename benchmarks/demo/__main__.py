"""The demo against DDP with the same number of tokens: `python -m benchmarks.demo`.

Runs `recipes.pretrain` twice, each in processes of its own, once as the demo does and once with
`strategy=ddp` and everything else alike, and writes the figures of both `summary.json` to a result
page. Further words go to both runs as overrides: `trainer.max_steps=100`.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.page import provenance, write_page
from benchmarks.common.pretraining import run
from recipes.training.traffic import human_bytes

PAGE = Path(__file__).with_name("result.md")
RUNS = {
    "ddp": ["strategy=ddp"],  # what the demo changes besides the strategy are the strategy's knobs
    "streaming_diloco": ["experiment=demo"],
}


def table(summaries: dict[str, dict[str, Any]]) -> list[str]:
    """Return the comparison as lines of Markdown."""
    ddp_loss = summaries["ddp"]["validation_loss"]
    lines = [
        "| strategy | tokens | validation loss | against DDP | unigram model | sent in steps |"
        " seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, s in summaries.items():
        counted = "counted" if s["bytes_are_counted"] else "computed"
        lines.append(
            f"| {name} | {s['tokens']:,} | {s['validation_loss']:.4f}"
            f" | {100 * (s['validation_loss'] / ddp_loss - 1):+.2f} % | {s['unigram_loss']:.4f}"
            f" | {human_bytes(s['bytes_in_steps'])} ({counted}) | {s['seconds']:.0f} |"
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Run both jobs and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("outputs/bench/demo"))
    parser.add_argument("--page", type=Path, default=PAGE)
    options, more = parser.parse_known_args(arguments)
    summaries = {
        name: run([*overrides, *more], options.work / name) for name, overrides in RUNS.items()
    }
    lines = [
        "# The demo and DDP, same tokens",
        "",
        *provenance(shlex.join(["python", "-m", "benchmarks.demo", *more])),
        "",
        *table(summaries),
        "",
        "Validation loss in nats per token over the whole validation split, of the model after the"
        " fit. The seconds are of one run each, on loopback, and say nothing about slow links.",
    ]
    write_page(options.page, lines)


if __name__ == "__main__":
    main()
