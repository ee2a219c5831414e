"""The overlap benchmark: all methods over gloo, traces, and the command at toy size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lab import why_unavailable
from benchmarks.overlap import __main__ as overlap
from benchmarks.overlap import job
from benchmarks.overlap.medians import merged
from benchmarks.overlap.methods import LABELS, SILENT, Model
from benchmarks.overlap.trace import flights, read_trace
from tests.world import run_ranks

TOY = Model(hidden=64, layers=2, heads=4, vocabulary=96, positions=32)
BATCH, TOKENS = 4, 32
HIDDEN_BYTES = BATCH * TOKENS * TOY.hidden * 4
ALL_REDUCES = 4 * TOY.layers  # of attention and MLP, forward and backward


def measure_on_a_rank(rank: int, size: int, folder: Path) -> list[dict[str, Any]]:
    own = folder / f"node{rank}"
    own.mkdir()
    plan = {
        "model": vars(TOY),
        "shapes": [{"shape": [BATCH, TOKENS], "rows": list(LABELS), "rounds": 2}],
    }
    return job.run(plan, own)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("overlap")
    nodes = run_ranks(measure_on_a_rank, 2, folder, folder)
    assert set(nodes[0][0]["missing"]) <= {"transformers"}  # older versions have no plan
    return merged([node[0] for node in nodes]), folder / "node0"


def test_every_method_trains_the_same_model(measured: tuple[dict[str, Any], Path]) -> None:
    rows, _ = measured
    assert set(LABELS) - set(rows) <= {"transformers"}
    losses = {name: row["first_loss"] for name, row in rows.items()}
    for name in set(rows) - set(SILENT):
        assert losses[name] == pytest.approx(losses["sync"], abs=1e-5), name
    # without communication half of every sum is missing, which the comparison above would notice
    assert abs(losses["none"] - losses["sync"]) > 0.01


def test_the_trace_shows_the_overlap(
    measured: tuple[dict[str, Any], Path],
) -> None:
    """A flight is hidden if it contains the whole body of another sublayer."""
    _, folder = measured

    def hiding(name: str) -> int:
        spans = read_trace(folder / f"{name}.json")
        bodies = [s for s in spans if s.kind == "body"]
        return sum(
            any(f.start_ms <= b.start_ms and b.end_ms <= f.end_ms for b in bodies)
            for f in flights(spans)
        )

    assert hiding("sync") == 0
    # all but the last all-reduce of each direction and the embedding's first
    assert hiding("batch") == 2 * ALL_REDUCES - 2 + 1


@pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
@pytest.mark.usefixtures("forked_lab")
def test_a_toy_run_of_everything_writes_page_and_picture(tmp_path: Path) -> None:
    raw, written = tmp_path / "raw.json", tmp_path / "overlap.md"
    few = ["--rates", "1gbit", "--rounds", "2", "--hidden", "64", "--layers", "2"]
    few += ["--mechanism-layers", "2", "--vocabulary", "96", "--shape", "4x64", "--small", "2x8"]
    few += ["--rows", "none", "none_split", "sync", "unsplit", "batch", "batch_late", "torch"]
    few += ["--latency-us", "1"]
    where = ["--raw", str(raw), "--page", str(written), "--traces", str(tmp_path / "traces")]
    assert overlap.main([*few, *where, "--timeout", "100"]) == 0
    nodes = json.loads(raw.read_text())["laboratory"]["1gbit"]
    rows = merged([node[0] for node in nodes])
    for name in ("sync", "batch"):
        # headers, and packets that a busy machine resends
        payload = rows[name]["payload_bytes"]
        assert payload < min(rows[name]["wire_bytes"]) < 1.3 * payload
    assert min(rows["none"]["wire_bytes"]) < 0.05 * min(rows["sync"]["wire_bytes"])
    text = written.read_text()
    assert "![One step, node 0 at 1gbit](overlap.png)" in text
    assert "| 1gbit | 2 x 8 | " in text
    assert text.count('| 1gbit | `"none"` | ') == text.count('| 1gbit | `"batch"` | ') == 1
    assert written.with_suffix(".png").exists()
    measured = raw.read_text()
    assert overlap.main([*few, *where]) == 0  # nothing is missing, so nothing is measured again
    assert raw.read_text() == measured
