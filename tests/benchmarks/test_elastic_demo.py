"""The elastic demo on a toy corpus: its replicas are killed, drained and started again."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.elastic_demo import __main__ as demo
from benchmarks.elastic_demo import job
from benchmarks.elastic_demo.job import Outcome
from benchmarks.elastic_demo.replica import Row

TOY = [
    "data=synthetic",
    "data.corpus.train_characters=40000",
    "data.corpus.validation_characters=4000",
    "data.block_size=16",
    "model.n_embd=16",
    "model.n_layer=1",
    "model.n_head=2",
    "tokenizer=bytes",
    "trainer.max_steps=200",
    *["--step-seconds=0.02", "--sync-every=6"],
]


def test_survivors_lose_no_step_and_all_end_with_equal_weights(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fork = multiprocessing.get_context("fork")  # replicas import nothing
    monkeypatch.setattr(job, "multiprocessing", SimpleNamespace(get_context=lambda _: fork))
    page, work = tmp_path / "demo.md", tmp_path / "runs"
    code = demo.main(["--page", str(page), "--work", str(work), f"cache_dir={tmp_path}", *TOY])
    printed = capfd.readouterr()
    assert code == 0, printed
    assert "processes that failed: 0; bound 0: met" in printed.out
    assert "(SHA-256), undisturbed and disturbed: 1 and 1; bound 1 and 1: met" in printed.out
    assert "survivors' steps lost: 0; bound 0: met" in printed.out
    for event in (
        "SIGKILL to b",
        "b exits with code -9",
        "c exits with code 143",
        "b2 has joined",
        "c2 has joined",
    ):
        assert event in printed.out
    assert "| survivors' steps lost | 0 | 0 | met |" in page.read_text()
    assert page.with_suffix(".png").exists()


def rows(*steps: int) -> list[Row]:
    return [Row(0.1 * place, step, 1.0, 2) for place, step in enumerate(steps)]


def test_what_is_wrong_is_reported() -> None:
    calm = Outcome(
        0.0,
        [],
        {name: rows(1, 2, 3, 4) for name in "abc"},
        dict.fromkeys("abc", 0),
        {name: {"step": 4, "hash": "same"} for name in "abc"},
    )
    rough = Outcome(
        0.0,
        [],
        {"a": rows(1, 3, 3), "b": rows(1, 9), "b2": [*rows(3), Row(9.0, 4, 1.0, 2)]},
        {"a": 0, "b": -9, "b2": 1, "c": 143, "c2": None},
        {"a": {"step": 3, "hash": "one"}, "b2": {"step": 4, "hash": "other"}},
    )
    runs, losses = {"undisturbed": calm, "disturbed": rough}, {"undisturbed": 2.0, "disturbed": 2.1}
    found = {check.name: check for check in demo.checks_of(runs, losses, 4, 5.0, 10.0)}
    assert found["processes that failed"].value == "b2, c2"
    assert found["survivors' steps lost"].value == "3", "2 left out, 3 taken twice, 4 not reached"
    weights = found["different final weights (SHA-256), undisturbed and disturbed"]
    assert weights.value == "1 and 2"
    assert found["longest stall"].value == "9.00 s"
    assert found["validation loss against the undisturbed run"].value == "+5.00 %"
    slowest = demo.slowest_times(rough.logs.values())
    assert slowest == pytest.approx({3: 0.1, 4: 9.0, 9: 0.1}), "of the slowest replica"
    missed = [check for check in found.values() if not check.met]
    assert len(missed) == 5, "all but the time of everything"
