"""The comparison of the demo with DDP: the page of a toy run shows both summaries."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.common import pretraining
from benchmarks.demo import __main__ as demo
from tests.forks import forking

TOY = [
    "data=synthetic",
    "data.corpus.train_characters=20000",
    "data.corpus.validation_characters=4000",
    "tokenizer=bytes",
    "trainer.max_steps=12",
    "optimizer.warmup_steps=2",
    "report.sample_tokens=1",
]


def test_the_page_shows_the_figures_of_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretraining, "subprocess", forking)
    page, work = tmp_path / "demo.md", tmp_path / "runs"
    demo.main(["--page", str(page), "--work", str(work), f"cache_dir={tmp_path}/cache", *TOY])
    text = page.read_text()
    assert "- command: `python -m benchmarks.demo" in text
    ddp, diloco = (json.loads((work / name / "summary.json").read_text()) for name in demo.RUNS)
    assert ddp["tokens"] == diloco["tokens"]
    assert f"| {ddp['validation_loss']:.4f} | +0.00 %" in text
    ratio = 100 * (diloco["validation_loss"] / ddp["validation_loss"] - 1)
    assert f"| {diloco['validation_loss']:.4f} | {ratio:+.2f} %" in text
    assert diloco["bytes_are_counted"]
    assert not ddp["bytes_are_counted"]
