"""The demo against DDP with the same number of tokens: `python -m recipes.bench.demo`.

Runs `recipes.pretrain` twice, each in processes of its own, once as the demo does and once with
`strategy=ddp` and everything else alike, and writes the figures of both `summary.json` to a result
page. Further words go to both runs as overrides: `trainer.max_steps=100`.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipes.bench.page import provenance, write_page
from recipes.training.report import SUMMARY_FILE
from recipes.training.traffic import human_bytes

RESULTS = Path(__file__).parent / "results"
RUNS = {
    "ddp": ["strategy=ddp"],  # what the demo changes besides the strategy are the strategy's knobs
    "streaming_diloco": ["experiment=demo"],
}


def run(overrides: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run one job of `recipes.pretrain` and return its summary.

    Raises:
        subprocess.CalledProcessError: the job failed; it has printed why.
    """
    command = [sys.executable, "-m", "recipes.pretrain", *overrides, f"hydra.run.dir={folder}"]
    subprocess.run(command, check=True)
    summary: dict[str, Any] = json.loads((folder / SUMMARY_FILE).read_text())
    return summary


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
    parser.add_argument("--page", type=Path, default=RESULTS / "demo.md")
    options, more = parser.parse_known_args(arguments)
    summaries = {
        name: run([*overrides, *more], options.work / name) for name, overrides in RUNS.items()
    }
    lines = [
        "# The demo and DDP, same tokens",
        "",
        *provenance(shlex.join(["python", "-m", "recipes.bench.demo", *more])),
        "",
        *table(summaries),
        "",
        "Validation loss in nats per token over the whole validation split, of the model after the"
        " fit. The seconds are of one run each, on loopback, and say nothing about slow links.",
    ]
    write_page(options.page, lines)


if __name__ == "__main__":
    main()
