"""The quality bench: its grid with a played run, one true run at toy size, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.pretraining import summary_of
from benchmarks.quality import __main__ as quality
from benchmarks.quality.grid import Run, Size, ddp

TOY = [
    "data=synthetic",
    "data.corpus.train_characters=20000",
    "data.corpus.validation_characters=4000",
    "optimizer.warmup_steps=2",
]
Play = Callable[[dict[str, str]], float]


def call(folder: Path, *more: str) -> str:
    quality.main(["--work", str(folder / "runs"), "--results", str(folder / "q.json"), *more])
    return (folder / "q.md").read_text()


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Callable[[Play], list[dict[str, str]]]:
    """Play the runs: a loss comes from a function of the overrides, and each call is kept.

    Nothing is drawn, which after each of many runs takes half a minute.
    """

    def play(loss: Play) -> list[dict[str, str]]:
        calls: list[dict[str, str]] = []

        def one(overrides: Sequence[str], folder: Path) -> dict[str, Any]:
            words = dict(word.split("=", 1) for word in overrides)
            calls.append(words)
            return {"validation_loss": loss(words)}

        monkeypatch.setattr(quality, "summary_of", one)
        monkeypatch.setattr(quality, "draw_page", lambda losses, seeds, path: None)
        return calls

    return play


def loss_of(words: dict[str, str]) -> float:
    """DDP is best at 0.016, ours at 0.0113; M=2 is at +0.5 %, M=4 at +1 %, at +3 % with mix 0.5."""
    lr = float(words["optimizer.lr"])
    if words["strategy"] == "ddp":
        return 4.0 + abs(lr - 0.016)
    loss = 4.0 + abs(lr - 0.0113)
    if words["trainer.devices"] == "2":
        return loss * 1.005
    loss *= 1.03 if words["strategy.mix"] == "0.5" else 1.01
    return loss / (1.004 if words["strategy.wire_dtype"] == "fp32" else 1)


@pytest.mark.parametrize("jobs", ["1", "3"])
def test_the_grid_the_tuning_and_the_verdicts(
    jobs: str, tmp_path: Path, played: Callable[[Play], list[dict[str, str]]]
) -> None:
    calls = played(loss_of)
    page = call(tmp_path, "--jobs", jobs)
    command = "--width=32 --blocks-per-step=128 --steps=2500 --seeds=3"
    assert page.count(f"- command: `python -m benchmarks.quality {command}`") == 1
    # 2 models x 3 rates of DDP and 2 x 3 of ours; 2 more seeds of DDP; 3 x 16 tuned, of which 4
    # are known; 3 x 16 defaults; 2 x 7 settings, of which 2 are tuned and 2 defaults
    assert len(calls) == 18 + 4 + 44 + 48 + 10
    ours = [words for words in calls[18:] if words["strategy"] == "streaming_diloco"]
    assert {words["optimizer.lr"] for words in ours} == {"0.0113"}
    # M = 4 misses: with the defaults all 4 against DDP and against fp32, tuned the 4 against fp32
    assert "| the defaults | 8 of 8 | 0 of 8 |" in page
    assert "| tuned | 8 of 8 | 4 of 8 |" in page
    assert "missing |" not in page


def test_a_second_call_goes_on_where_the_first_stopped(
    tmp_path: Path, played: Callable[[Play], list[dict[str, str]]]
) -> None:
    def breaks(words: dict[str, str]) -> float:
        if words.get("strategy.sync_every") == "30":
            raise KeyboardInterrupt
        return loss_of(words)

    first = played(breaks)
    with pytest.raises(KeyboardInterrupt):
        call(tmp_path, "--seeds", "1")
    assert "missing |" in (tmp_path / "q.md").read_text()
    second = played(loss_of)
    assert "missing |" not in call(tmp_path, "--seeds", "1")
    assert second[0] == first.pop()
    assert all(words not in first for words in second)


def test_no_time_left_begins_no_run(
    tmp_path: Path, played: Callable[[Play], list[dict[str, str]]]
) -> None:
    calls = played(loss_of)
    assert "missing |" in call(tmp_path, "--seconds", "0")
    assert calls == []


def test_every_run_has_a_folder_of_its_own_and_the_same_global_batch(
    tmp_path: Path, played: Callable[[Play], list[dict[str, str]]]
) -> None:
    calls = played(loss_of)
    call(tmp_path)
    stored = json.loads((tmp_path / "q.json").read_text())
    names = {Run(**entry["run"]).name for entry in stored["runs"]}
    assert len(names) == len(stored["runs"]) == len(calls)
    for words in calls:
        assert int(words["trainer.devices"]) * int(words["data.batch_size"]) == 128


def test_results_of_another_setting_are_refused(
    tmp_path: Path, played: Callable[[Play], list[dict[str, str]]]
) -> None:
    played(loss_of)
    call(tmp_path, "--seeds", "1")
    with pytest.raises(ValueError, match=r"holds results of the setting .*'steps': 2500.* `--res"):
        call(tmp_path, "--steps", "9")


def test_a_true_run_and_that_ddp_on_two_ranks_stands_for_four(
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
    # float32 sums in another order; 6 steps move the loss by more than a thousand times as much
    assert four["validation_loss"] == pytest.approx(summary["validation_loss"], abs=1e-4)
    assert abs(summary["validation_loss"] - summary["unigram_loss"]) > 0.1
