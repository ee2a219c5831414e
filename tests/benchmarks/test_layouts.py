"""The bench of replicas of several ranks: true runs at toy size, and the arithmetic of its page."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.bandwidth.measure import Results
from benchmarks.bandwidth.window import Window
from benchmarks.lab import NetLab, why_unavailable
from benchmarks.layouts import __main__ as layouts
from benchmarks.layouts import held, large, link, memory, ranks, trained
from tests.world import run_ranks

TOY_MODEL = {"layers": 2, "width": 32}


def play(rank: int, size: int, folder: Path) -> Any:
    """Two ranks as `memory` would start them, then four as `large` would, in one process each."""
    plan = {"ranks": size, "rows": ["ddp", "fsdp", "fsdp meta"], **TOY_MODEL}
    return held.every_row(plan, folder)


def play_large(rank: int, size: int, folder: Path) -> Any:
    plan = {**large.TOY, "layers": 2, "ranks": size, "row": "one", "precision": large.BF16}
    return [trained.one_fit({**plan, "way": way}, folder) for way in (trained.PLAIN, trained.LION)]


def test_two_ranks_hold_half_of_what_one_holds(tmp_path: Path) -> None:
    (alone,) = run_ranks(one_rank, 1, tmp_path, tmp_path)
    two = run_ranks(play, 2, tmp_path, tmp_path)
    results = Results(tmp_path / "memory.json", {})
    results.add(memory.COUNTS, 1, alone)
    for row in range(2):
        results.add(memory.COUNTS, 2, [rank[row] for rank in two])
    found = memory.found(results.raw["records"], memory.COUNTS)
    ratios = memory.shares(found)
    assert ratios[2, "fsdp"] == pytest.approx(1, abs=memory.WITHIN)
    assert ratios[2, "ddp"] > 1.6, "only the outer state is shared there"

    (model, *_) = {rank[2]["model"] for rank in two}
    assert found[1, "ddp"][0]["parameters"] == model == found[1, "ddp"][0]["gradients"]
    for rank in two:
        assert {"fill", "save"} <= rank[2].keys()
        assert rank[2]["largest_unit"] < model


def one_rank(rank: int, size: int, folder: Path) -> Any:
    return held.every_row({"ranks": size, "rows": ["ddp"], **TOY_MODEL}, folder)


def test_a_storage_counts_once_and_whole() -> None:
    values = torch.zeros(100)
    assert held.held_bytes([values, values[:10], torch.zeros(5)]) == 420


def test_a_peak_is_seen_after_it_has_gone() -> None:
    peak = held.Peak()
    peak.begin()
    torch.ones(2**24).sum()  # 64 MiB: the heap has no such hole
    assert 0.9 * 2**26 < peak.growth() < 2**27
    peak.begin()
    assert peak.growth() < 2**24


def test_units_are_the_blocks_and_the_rest() -> None:
    module = nn.ModuleDict({"h": nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])})
    module["top"] = nn.Linear(3, 1, bias=False)
    assert list(held.unit_bytes(module)) == [48, 48, 12]


def test_a_large_llama_takes_its_steps_and_is_as_large_as_foretold(tmp_path: Path) -> None:
    parameters = large.shape(large.TOY, 2).parameters
    for rank in run_ranks(play_large, 4, tmp_path, tmp_path):
        for fit in rank:
            assert fit["parameters"] == parameters
            assert len(fit["step_s"]) == trained.STEPS
            assert fit["bytes_sent"] > parameters / 16


def test_what_does_not_fit_is_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def run(name: str, plan: dict[str, Any], *_: Any) -> list[Any]:
        tried.append(plan["row"])
        if plan["layers"] == 14:
            raise ranks.RanksFailed("ended: too much")
        seen = {"row": plan["row"], "error": None, "peak_bytes": 2**30, "fill_s": 1.0}
        return [{**seen, "step_s": [1.0, 2.0, 3.0]}] * large.RANKS

    monkeypatch.setattr(large, "run_here", run)
    monkeypatch.setattr(large, "free_bytes", lambda: 21 * 2**30)
    monkeypatch.setattr(large, "WAYS", [(trained.DILOCO, large.BF16)])
    settings = {**large.SETTINGS, "layers": [16, 14, 2]}
    monkeypatch.setattr(large, "needed_bytes", lambda shape, *_: 1.5 * shape.layers * 2**30)
    results = Results(tmp_path / "large.json", settings)
    for _ in range(2):  # the second time it knows the answer
        large.measure(results, settings, 1.0)
        settings["layers"] = [2]
    assert tried == ["DiLoCo, 2"], "21 GiB would be held of 20"
    page = "\n".join(large.page_lines(results.raw["records"], settings | large.SETTINGS))
    assert "not tried: 24.0 GiB would be held, and 20.0 GiB are free" in page
    assert "not tried: 21.0 GiB" in page
    assert "| 4.0 | 1 | 1.0, 2.0, 3.0 | done |" in page


def test_a_llama_of_sixteen_blocks_has_a_billion_parameters() -> None:
    model = large.shape(large.SETTINGS, 16)
    assert 1.0e9 < model.parameters < 1.1e9
    plain, diloco, lion = (
        large.needed_bytes(model, way, large.BF16)
        for way in (trained.PLAIN, trained.DILOCO, trained.LION)
    )
    assert 2 * 8 * model.parameters < plain < diloco == lion


def window(row: str, ms: list[float], ledger: int, wire: int) -> dict[str, Any]:
    steps = [one / 1e3 for one in ms]
    made = Window(row, len(ms), sum(steps), wire, ledger, None, 0.1, 1000, steps, steps, 0.1)
    return vars(made)


def test_a_node_is_as_slow_as_its_slowest_rank_and_sends_what_both_send() -> None:
    windows = [window("ddp", ms, 50, 105) for ms in ([1, 9], [4, 2], [3, 3], [5, 1])]
    first, second = link.by_node(windows, 2)
    assert first["step_s"] == [0.004, 0.009]
    assert second["step_s"] == [0.005, 0.003]
    assert (first["ledger_bytes"], first["wire_bytes"]) == (100, 105)
    assert first["seconds"] == pytest.approx(0.013)


def test_targets_are_met_or_missed_by_the_medians(tmp_path: Path) -> None:
    results = Results(tmp_path / "link.json", link.SETTINGS)
    for round_ in range(3):
        rows = {"ddp_alone": 100, "ddp": 104, "fsdp_alone": 100, "fsdp": 108}
        rows |= {"domino_alone": 100, "domino": 101}
        for row, ms in rows.items():
            sent = 60 if row == "domino" else 50
            windows = [window(row, [ms, ms], sent, 102 if row == "ddp" else 110)] * 4
            results.add(link.RATE, round_, link.by_node(windows, 2))
    page = "\n".join(link.page_lines(results.raw["records"], link.SETTINGS))
    assert "| ddp: step time / no syncs, at most 1.05 | 1.04 | met |" in page
    assert "| fsdp: step time / no syncs, at most 1.05 | 1.08 | missed |" in page
    assert "| ddp: interface / ledger, within 3 % | 1.02 | met |" in page
    assert "| fsdp: interface / ledger, within 3 % | 1.1 | missed |" in page
    assert "| fsdp's bytes / ddp's, ledger, within 1 % | 1 | met |" in page
    assert "| domino's bytes / ddp's, ledger, within 1 % | 1.2 | missed |" in page


@pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
def test_two_nodes_of_two_ranks_sync_over_the_link_and_within_it_do_not() -> None:
    plan = {**link.TOY, "rows": ["fsdp_alone", "fsdp"]}
    with NetLab(2, link.RATE) as lab:
        found = ranks.run_in_lab(lab, "linked", plan, 120, {})
    assert len(found) == 4
    for first in (0, 2):
        alone, synced = ([rank[row] for rank in found[first : first + 2]] for row in plan["rows"])
        sent = sum(w["ledger_bytes"] for w in synced)
        assert sent > 0 == sum(w["ledger_bytes"] for w in alone)
        # far from the parameters, which FSDP gathers within a node; headers weigh much here
        assert 0 < alone[0]["wire_bytes"] < sent / 4
        assert sent < synced[0]["wire_bytes"] < 1.5 * sent


@pytest.mark.parametrize(
    ("script", "limits", "text"),
    [
        ("echo first; echo last >&2; exit 3", {}, "exit code 3, last"),
        ("sleep 60", {"timeout_s": 0.2}, "not done after 0 s"),
        ("sleep 60", {"least_free_bytes": 2**60}, "of memory were left"),
    ],
)
def test_ranks_that_fail_or_take_too_much_are_ended(
    script: str, limits: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "_command", lambda *_: ["sh", "-c", script])
    begun = time.monotonic()
    with pytest.raises(ranks.RanksFailed, match=text):
        ranks.run_here("held", {"ranks": 1}, **{"timeout_s": 30, **limits})
    assert time.monotonic() - begun < 20


def test_what_ranks_wrote_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def command(name: str, plan: Any, folder: Path) -> list[str]:
        script = f"echo [$GROUP_RANK] > {folder}/0.json; echo {json.dumps(name)} > {folder}/1.json"
        return ["sh", "-c", script.replace('"', '\\"')]

    monkeypatch.setattr(ranks, "_command", command)
    assert ranks.run_here("held", {"ranks": 2}, 30) == [[0], "held"]


def test_parts_that_were_not_measured_are_named_on_the_page(tmp_path: Path) -> None:
    options = layouts.parse(["link", "--toy", "--page", str(tmp_path / "result.md")])
    layouts.write(options)
    page = options.page.read_text()
    assert "- **link:** not measured yet (`python -m benchmarks.layouts link`)" in page
    assert page.count("Not measured yet:") == 3


def test_figures_of_toys_do_not_go_onto_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["memory", "--toy"], ["link", "--rounds", "0"], ["domino"]):
        with pytest.raises(SystemExit):
            layouts.parse(words)
    said = capsys.readouterr().err
    assert "--toy needs a --page outside of benchmarks/" in said
    assert "--rounds must be 1 or more, not 0" in said
    assert "invalid choice: 'domino'" in said
