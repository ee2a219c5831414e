"""The quality benchmark: its grid with artificial losses, and one true run at toy size."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.pretraining import summary_of
from benchmarks.quality import __main__ as quality
from benchmarks.quality.grid import Size, ddp

TOY = [
    "data=synthetic",
    "data.corpus.train_characters=20000",
    "data.corpus.validation_characters=4000",
    "optimizer.warmup_steps=2",
]
Loss = Callable[[dict[str, str]], float]


def call(folder: Path, *more: str) -> str:
    quality.main(["--work", str(folder / "runs"), "--results", str(folder / "q.json"), *more])
    return (folder / "q.md").read_text()


@pytest.fixture
def simulate(monkeypatch: pytest.MonkeyPatch) -> Callable[[Loss], list[dict[str, str]]]:
    """Take losses from a function of the overrides; return the overrides of all runs.

    Nothing is drawn, because drawing after each of many runs takes half a minute.
    """

    def with_losses(loss: Loss) -> list[dict[str, str]]:
        calls: list[dict[str, str]] = []

        def one(overrides: Sequence[str], folder: Path) -> dict[str, Any]:
            words = dict(word.split("=", 1) for word in overrides)
            calls.append(words)
            return {"validation_loss": loss(words)}

        monkeypatch.setattr(quality, "summary_of", one)
        monkeypatch.setattr(quality, "draw_page", lambda losses, seeds, path: None)
        return calls

    return with_losses


def loss_of(words: dict[str, str]) -> float:
    """DDP is best at 0.016, DiLoCo at 0.0113; M=2 is +0.5 %, M=4 +1 %, or +3 % with mix 0.5."""
    lr = float(words["optimizer.lr"])
    if words["strategy"] == "ddp":
        return 4.0 + abs(lr - 0.016)
    loss = 4.0 + abs(lr - 0.0113)
    if words["trainer.devices"] == "2":
        return loss * 1.005
    loss *= 1.03 if words["strategy.mix"] == "0.5" else 1.01
    return loss / (1.004 if words["strategy.wire_dtype"] == "fp32" else 1)


def test_the_grid_tunes_rates_and_judges_the_means(
    tmp_path: Path, simulate: Callable[[Loss], list[dict[str, str]]]
) -> None:
    calls = simulate(loss_of)
    page = call(tmp_path, "--jobs", "3")
    # 2 models x 3 rates of DDP, and 2 x 2 x 3 of DiLoCo; 2 more seeds of DDP; 3 x 16 tuned, 4 of
    # which are known; 3 x 16 defaults; 2 x 7 settings, 2 of them tuned and 2 defaults
    assert len(calls) == 18 + 4 + 44 + 48 + 10
    ours = [words for words in calls[18:] if words["strategy"] == "streaming_diloco"]
    assert {words["optimizer.lr"] for words in ours} == {"0.0113"}
    for words in calls:
        assert int(words["trainer.devices"]) * int(words["data.batch_size"]) == 128
    # with M = 4, the defaults miss all 4 targets against DDP and against fp32, tuned runs those
    # against fp32
    assert "| the defaults | 8 of 8 | 0 of 8 |" in page
    assert "| tuned | 8 of 8 | 4 of 8 |" in page
    assert "missing |" not in page


def test_a_second_call_continues_and_another_setting_is_refused(
    tmp_path: Path, simulate: Callable[[Loss], list[dict[str, str]]]
) -> None:
    def interrupted(words: dict[str, str]) -> float:
        if words.get("strategy.sync_every") == "30":
            raise KeyboardInterrupt
        return loss_of(words)

    first = simulate(interrupted)
    with pytest.raises(KeyboardInterrupt):
        call(tmp_path, "--seeds", "1")
    assert "missing |" in (tmp_path / "q.md").read_text()
    second = simulate(loss_of)
    assert "missing |" in call(tmp_path, "--seeds", "1", "--seconds", "0")
    assert second == []
    assert "missing |" not in call(tmp_path, "--seeds", "1")
    assert second[0] == first.pop()
    assert all(words not in first for words in second)
    with pytest.raises(ValueError, match=r"contains results of the setting .*2500.* `--results`"):
        call(tmp_path, "--steps", "9")


def test_a_true_run_and_ddp_on_two_ranks_equals_four(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, more = ddp("gpt2_tiny", 1, 16e-3), [*TOY, f"cache_dir={tmp_path}/cache"]
    size = ["--width", "16", "--blocks-per-step", "64", "--steps", "6"]
    monkeypatch.setattr(quality, "planned", lambda losses, seeds: [job])
    page = call(tmp_path, *size, *more)
    assert (tmp_path / "q.png").stat().st_size > 0
    summary = json.loads((tmp_path / "runs" / job.name / "summary.json").read_text())
    assert f"| gpt2_tiny | DDP | 0.0113: missing, 0.016: {summary['validation_loss']:.4f}, " in page
    assert summary["tokens"] == 6 * 64 * 32
    four = summary_of(
        [*replace(job, replicas=4).overrides(Size(16, 64, 6)), *more], tmp_path / "four"
    )
    assert four["tokens"] == summary["tokens"]
    # a different order of float32 sums; 6 steps change the loss by over a thousand times as much
    assert four["validation_loss"] == pytest.approx(summary["validation_loss"], abs=1e-4)
    assert abs(summary["validation_loss"] - summary["unigram_loss"]) > 0.1
