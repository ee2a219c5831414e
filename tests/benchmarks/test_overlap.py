"""Overlap: all ways over gloo, traces, and the command at toy size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lab import why_unavailable
from benchmarks.overlap import __main__ as overlap
from benchmarks.overlap import job
from benchmarks.overlap.medians import merged
from benchmarks.overlap.trace import PHASES, draw_timeline, flights, read_trace, spans_of
from benchmarks.overlap.ways import LABELS, SILENT, Model
from tests.world import run_ranks

TOY = Model(hidden=64, layers=2, heads=4, vocabulary=96, positions=32)
BATCH, TOKENS = 4, 32
HIDDEN_BYTES = BATCH * TOKENS * TOY.hidden * 4
SUMS = 4 * TOY.layers  # of attention and MLP, forward and backward


# -- all ways at toy size, over gloo on this machine


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
    assert set(nodes[0][0]["missing"]) <= {"transformers"}  # an older one has no plan to apply
    return merged([node[0] for node in nodes]), folder / "node0"


def test_every_way_trains_the_same_model(measured: tuple[dict[str, Any], Path]) -> None:
    rows, _ = measured
    assert set(LABELS) - set(rows) <= {"transformers"}
    losses = {name: row["first_loss"] for name, row in rows.items()}
    for name in set(rows) - set(SILENT):
        assert losses[name] == pytest.approx(losses["sync"], abs=1e-5), name
    # half of every sum is missing there: a comparison that cannot fail would not see it
    assert abs(losses["none"] - losses["sync"]) > 0.01


def test_sums_are_counted(measured: tuple[dict[str, Any], Path]) -> None:
    """Besides the sublayers: embedding, head, and two exchanges of the loss."""
    rows, _ = measured
    assert rows["sync"]["collectives"] == SUMS + 3
    assert rows["batch"]["collectives"] == 2 * SUMS + 4  # the embedding's sum is divided too
    assert rows["none_split"]["collectives"] == 2 * SUMS + 4
    assert rows["torch"]["collectives"] == 0
    loss_bytes = 3 * 4 * BATCH * TOKENS  # a maximum and two sums a position
    for name in ("sync", "batch", "token", "weight", "none"):
        assert rows[name]["payload_bytes"] == (SUMS + 2) * HIDDEN_BYTES + loss_bytes


def test_a_trace_names_launches_landings_and_sublayers(
    measured: tuple[dict[str, Any], Path],
) -> None:
    _, folder = measured
    for name, parts in (("sync", 1), ("batch", 2)):
        spans = read_trace(folder / f"{name}.json")
        for kind in ("launch", "land"):
            for direction in ("forward", "backward"):
                found = [
                    (s.sublayer, s.part)
                    for s in spans
                    if (s.kind, s.direction) == (kind, direction)
                ]
                sums = 2 * TOY.layers + (direction == "forward")  # of the embedding
                assert len(found) == len(set(found)) == sums * parts
        bodies = [s for s in spans if s.kind == "body"]
        assert len(bodies) == 2 * 2 * TOY.layers * parts
        assert len(flights(spans)) == (SUMS + 1) * parts
        assert [s.direction for s in spans if s.kind == "phase"] == list(PHASES)
        assert sum(s.kind == "transfer" for s in spans) >= SUMS * parts


def test_in_the_trace_sums_fly_behind_the_other_part(measured: tuple[dict[str, Any], Path]) -> None:
    """A flight hides something if another sublayer's body lies in it, from begin to end."""
    _, folder = measured

    def hiding(name: str) -> int:
        spans = read_trace(folder / f"{name}.json")
        bodies = [s for s in spans if s.kind == "body"]
        return sum(
            any(f.start_ms <= b.start_ms and b.end_ms <= f.end_ms for b in bodies)
            for f in flights(spans)
        )

    assert hiding("sync") == 0
    # all but the last sum of each direction and the embedding's first
    assert hiding("batch") == 2 * SUMS - 2 + 1


def test_the_picture_is_drawn_from_traces(
    measured: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    _, folder = measured
    traces = {name: read_trace(folder / f"{name}.json") for name in ("sync", "batch")}
    draw_timeline(traces, "One step", tmp_path / "a.png")
    draw_timeline({"sync": traces["sync"], "batch": []}, "One step", tmp_path / "b.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "a.png").read_bytes() != (tmp_path / "b.png").read_bytes()


def test_a_trace_without_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match="holds no range `forward`"):
        spans_of({"traceEvents": [{"ph": "X", "name": "body layer 0 mlp #1", "ts": 1, "dur": 2}]})


# -- the command


def test_what_was_traced_is_drawn_and_nothing_else(
    measured: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    _, folder = measured
    options = overlap.parse(["--traces", str(tmp_path), "--page", str(tmp_path / "page.md")])
    picture = tmp_path / "page.png"
    (tmp_path / "mechanism").mkdir()
    for name in ("sync", "batch"):
        (tmp_path / "mechanism" / f"{name}.json").write_bytes(
            (folder / f"{name}.json").read_bytes()
        )
    # left by a run whose results this is not
    assert overlap.draw({"mechanism": None, "laboratory": {}}, options) is None
    # traced nothing: the row was not asked for
    assert overlap.draw({"mechanism": {}, "laboratory": {"1gbit": []}}, options) is None
    assert not picture.exists()
    caption = overlap.draw({"mechanism": {"rows": {}}, "laboratory": {}}, options)
    assert caption == "a link that only takes time, 30% of the synchronous step"
    assert picture.exists()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--rounds", "0"], "--rounds must be 1 or more, not 0"),
        (["--mechanism-layers", "0"], "--mechanism-layers must be 1 or more, not 0"),
        (["--shape", "8by128"], "'8by128' is no shape such as 8x128"),
        (["--shape", "1x128"], "'1x128': batch and tokens must be 2 or more"),
        (["--rows", "ddp"], "invalid choice: 'ddp'"),
    ],
)
def test_options_outside_their_range_are_refused(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        overlap.parse(words)
    assert text in capsys.readouterr().err


def test_results_of_other_settings_are_not_mixed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--raw", str(tmp_path / "raw.json"), "--page", str(tmp_path / "page.md")]
    where += ["--traces", str(tmp_path / "traces")]
    overlap.Raw(tmp_path / "raw.json", {"rounds": 7}).add("mechanism", {})
    assert overlap.main(["--page-only", *where]) == 2
    assert "was measured with {'rounds': 7}, not with" in capsys.readouterr().err
    assert not (tmp_path / "page.md").exists()


def test_who_has_measured_is_kept_with_the_results(tmp_path: Path) -> None:
    path = tmp_path / "raw.json"
    overlap.Raw(path, {}, ["- the first call"]).add("laboratory", [], "1gbit")
    overlap.Raw(path, {}, ["- that measures nothing"])
    later = overlap.Raw(path, {}, ["- the third call"])
    assert later.content["made_by"] == [["- the first call"]]
    later.add("laboratory", [], "2gbit")
    later.add("mechanism", {})
    assert later.content["made_by"] == [["- the first call"], ["- the third call"]]
    assert list(json.loads(path.read_text())["laboratory"]) == ["1gbit", "2gbit"]


def test_without_a_laboratory_it_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.lab.netlab.why_unavailable", lambda: "It needs root.")
    where = ["--raw", str(tmp_path / "raw"), "--page", str(tmp_path / "page")]
    where += ["--traces", str(tmp_path / "traces")]
    assert overlap.main(["--parts", "laboratory", *where]) == 2
    assert capsys.readouterr().err.startswith("It needs root. `--parts mechanism`")
    assert not (tmp_path / "page").exists()


@pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
def test_a_toy_run_of_everything_writes_page_and_picture(tmp_path: Path) -> None:
    raw, written = tmp_path / "raw.json", tmp_path / "overlap.md"
    few = ["--rates", "1gbit", "--rounds", "2", "--hidden", "64", "--layers", "2"]
    few += ["--mechanism-layers", "2", "--vocabulary", "96", "--shape", "4x64", "--small", "2x8"]
    few += ["--rows", "none", "none_split", "sync", "batch", "torch", "--latency-us", "1"]
    where = ["--raw", str(raw), "--page", str(written), "--traces", str(tmp_path / "traces")]
    assert overlap.main([*few, *where, "--timeout", "100"]) == 0
    nodes = json.loads(raw.read_text())["laboratory"]["1gbit"]
    rows = merged([node[0] for node in nodes])
    for name in ("sync", "batch"):
        # headers, and what a busy machine resends in some window
        payload = rows[name]["payload_bytes"]
        assert payload < min(rows[name]["wire_bytes"]) < 1.3 * payload
    assert min(rows["none"]["wire_bytes"]) < 0.05 * min(rows["sync"]["wire_bytes"])
    text = written.read_text()
    assert "![One step, node 0 at 1gbit](overlap.png)" in text
    assert "| 1gbit | 2 x 8 | " in text
    assert written.with_suffix(".png").exists()
    measured = raw.read_text()
    assert overlap.main([*few, *where]) == 0  # nothing is lacking: nothing is measured again
    assert raw.read_text() == measured
