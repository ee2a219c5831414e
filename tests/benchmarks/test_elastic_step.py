"""The benchmark of an elastic step: toy fits of both kinds, and the verdict."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.elastic_step import job
from benchmarks.elastic_step.__main__ import FIXED, FOLDER, TCP, fits, page_of
from lightning_commfree import ElasticDiLoCoStrategy, StreamingDiLoCoStrategy
from tests.world import run_ranks

SIZES = {"VOCABULARY": 16, "LENGTH": 8, "LAYERS": 3, "WIDTH": 8}


def small(monkeypatch: pytest.MonkeyPatch, **others: int) -> None:
    for name, value in {**SIZES, **others}.items():
        monkeypatch.setattr(job, name, value)


def play(rank: int, size: int, folder: Path) -> bool:
    assert isinstance(job.make_strategy(), StreamingDiLoCoStrategy)
    job.main(12, folder / "fixed.json")
    return (folder / "fixed.json").exists()


def test_a_fixed_fit_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch)
    monkeypatch.delenv("COMMFREE_STORE", raising=False)
    run_ranks(play, job.REPLICAS, tmp_path, tmp_path)
    assert json.loads((tmp_path / "fixed.json").read_text()) > 0


def test_an_elastic_fit_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, REPLICAS=1)
    monkeypatch.setenv("COMMFREE_STORE", f"file://{tmp_path}")
    assert isinstance(job.make_strategy(), ElasticDiLoCoStrategy)
    job.main(12, tmp_path / "elastic.json")
    assert json.loads((tmp_path / "elastic.json").read_text()) > 0
    assert (tmp_path / "commit").is_dir()


@pytest.mark.parametrize(("slow", "verdict"), [(0.101, "met"), (0.103, "missed")])
def test_the_verdict_follows_the_criterion(slow: float, verdict: str) -> None:
    seconds = {FIXED: [0.1, 0.1, 0.5], FOLDER: [0.1] * 3, TCP: [slow] * 3}
    assert seconds.keys() == fits().keys()
    page = "\n".join(page_of(seconds, 96, ["- command: `c`"]))
    assert f"{slow / 0.1:.3f} times with a TCPStore (bound: 1.02): {verdict}." in page
    assert f"| {FIXED} | 100.0 | 1.000 | 100.0 | 100.0 | 500.0 |" in page
