"""The bandwidth benchmarks: jobs, stored results, and one round of each at toy size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.bandwidth import __main__ as bandwidth
from benchmarks.bandwidth.job import WORKLOADS
from benchmarks.bandwidth.torchft_job import Loop, fragments
from benchmarks.common import fits
from benchmarks.lab import why_unavailable
from benchmarks.lion_bandwidth import __main__ as lion_bandwidth

needs_lab = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))


@pytest.fixture
def short_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sequence a step instead of four: what travels depends on the parameters alone."""
    loader = fits.loader
    monkeypatch.setattr(fits, "loader", lambda tokens, _: loader(tokens, 1))


@needs_lab
@pytest.mark.usefixtures("forked_lab", "short_batches")
def test_a_round_measures_whole_cycles_and_interface_and_ledger_agree(tmp_path: Path) -> None:
    raw, page = tmp_path / "raw.json", tmp_path / "page.md"
    where = ["--raw", str(raw), "--page", str(page), "--timeout", "100"]
    few = ["--rates", "1gbit", "--rows", "none", "overlap_fp4", "--rounds", "1"]
    assert bandwidth.main([*few, *where, "--sync-every", "10", "--steps", "2"]) == 0
    none, ours = (r["nodes"] for r in json.loads(raw.read_text())["records"])
    assert [node["error"] for node in (*none, *ours)] == [None] * 4
    for node in ours:
        # with two replicas each sends the codes of all parameters once per cycle, and the scales
        assert node["parameters"] / 2 < node["ledger_bytes"] < 0.55 * node["parameters"]
        # headers are 0.3 %; on a busy machine TCP also resends packets that were not lost
        assert node["ledger_bytes"] < node["wire_bytes"] < 1.3 * node["ledger_bytes"]
        # a fragment leaves or lands in at most 6 of 10 steps
        assert len(node["own_s"]) == 10
        # two of the four other steps, as one may be interrupted
        assert sorted(node["own_s"])[1] < 0.001 < max(node["own_s"]) < node["seconds"]
        assert 0 < node["beside_s"] < node["seconds"], "gloo's threads send"
    for node in none:
        assert node["wire_bytes"] < 4 * 2000, "a barrier of 500 bytes after each leg"
    assert "| + fp4 |" in page.read_text()
    assert page.read_text().count("- command: `python -m benchmarks.bandwidth") == 1


def test_torchft_trains_the_small_model_in_two_fragments() -> None:
    options = bandwidth.parse(["--size", "0.19M", "--rows", "torchft_delay", "torchft_often"])
    loop = Loop(WORKLOADS[options.size])
    loop.step()
    assert len(loop.step_s) == 1
    first, second = ({*part.parameters()} for part in fragments(loop.model))
    assert first.isdisjoint(second)
    assert first | second == {*loop.model.parameters()}


@needs_lab
@pytest.mark.usefixtures("forked_lab", "short_batches")
def test_a_round_of_votes_sends_the_bytes_of_the_formula(tmp_path: Path) -> None:
    raw, page = tmp_path / "raw.json", tmp_path / "page.md"
    few = ["--nodes", "2", "--rates", "1gbit", "--rounds", "1", "--steps", "2"]
    where = ["--raw", str(raw), "--page", str(page), "--timeout", "100"]
    assert lion_bandwidth.main([*few, "--rows", "lion_none", "lion", "lion_zeros", *where]) == 0
    none, lion, zeros = (r["nodes"] for r in json.loads(raw.read_text())["records"])
    assert [node["error"] for node in (*none, *lion, *zeros)] == [None] * 6
    for node in lion:
        # headers are 1 to 2 %; on a busy machine TCP also resends packets that were not lost
        assert node["ledger_bytes"] < node["wire_bytes"] < 1.3 * node["ledger_bytes"]
        # not equal, as one of millions of random gradients may be exactly zero, which is sent
        assert node["formula_bytes"] <= node["ledger_bytes"] < 1.05 * node["formula_bytes"]
    assert none[0]["ledger_bytes"] is None
    # the positions of exact zeros are sent, but are not part of the formula
    assert 1 < zeros[0]["ledger_bytes"] / zeros[0]["formula_bytes"] < 1.05
    # per step one bit up and one down, of half of the parameters
    assert lion[0]["formula_bytes"] / 2 == pytest.approx(none[0]["parameters"] / 8, rel=0.02)
    assert "| 2 | majority | " in page.read_text()
