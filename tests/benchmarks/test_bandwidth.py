"""The bandwidth bench: its jobs, what it keeps of them, and one round at toy size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.bandwidth import __main__ as bandwidth
from benchmarks.bandwidth import job, measure
from benchmarks.bandwidth.figures import LABELS
from benchmarks.bandwidth.window import Window
from benchmarks.lab import JobResult, why_unavailable
from tests.benchmarks.records import SETTINGS, record


def test_who_begins_changes_and_some_rows_have_jobs_of_their_own() -> None:
    rows = ["none", "ddp", "ddp_powersgd", "overlap", "torchft"]
    options = bandwidth.parse(["--rows", *rows, "--steps", "12"])
    (_, first), (_, powersgd), (module, torchft) = measure.jobs("100mbit", rows, 0, options)
    (_, second), _ = measure.jobs("100mbit", rows, 1, options)
    assert powersgd == [("ddp_powersgd", 8)]
    assert first == [("none", 100), ("ddp", 8), ("overlap", 100)]
    assert [row for row, _ in second] == ["ddp", "overlap", "none"]
    assert module.endswith(".torchft_job")
    assert torchft == [("torchft", 100)]


class Fit:
    """A Trainer that ends with an error, before its first step or after."""

    begins = False

    def __init__(self, strategy: Any, nodes: int, max_steps: int, callbacks: list[Any]) -> None:
        (self._stopwatch,) = callbacks

    def fit(self, *_: Any) -> None:
        self._stopwatch._pass_on()
        self._stopwatch.began = self.begins
        raise RuntimeError("no\nhook")


@pytest.mark.parametrize("begins", [False, True])
def test_a_refusal_is_the_rows_and_a_later_error_ends_the_job(
    begins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "quiet_trainer", type("Fit", (Fit,), {"begins": begins}))
    monkeypatch.setattr(job, "dist", SimpleNamespace(barrier=lambda: None))
    passed: list[str] = []
    with pytest.raises(RuntimeError) if begins else nullcontext():
        made = job.measure("none", 5, 10, lambda: passed.append("on"))
        assert made == Window("none", 5, error="no")
    assert passed == ["on"], "the fit passes the baton on"


def test_results_resume_try_failures_again_and_refuse_other_settings(tmp_path: Path) -> None:
    path = tmp_path / "raw.json"
    results = measure.Results(path, SETTINGS, ["- the first call"])
    results.add("100mbit", 0, record("ddp", 1, 1)["nodes"])
    results.add("100mbit", 0, measure._failed("torchft", 1, "no"))
    again = measure.Results(path, SETTINGS, ["- the second call"])
    assert again.made_by == [["- the first call"]]
    assert again.has("100mbit", "ddp", 0)
    assert not again.has("100mbit", "ddp", 1)
    assert not again.has("100mbit", "torchft", 0)
    again.add("100mbit", 0, record("torchft", 1, 1)["nodes"])
    assert again.has("100mbit", "torchft", 0)
    assert len(again.raw["records"]) == 2
    assert again.made_by == [["- the first call"], ["- the second call"]]
    assert [r["call"] for r in again.raw["records"]] == [0, 1]
    repeated = measure.Results(path, SETTINGS, ["- the second call"])
    repeated.add("100mbit", 1, record("ddp", 1, 1)["nodes"])
    assert repeated.made_by == [*again.made_by, ["- the second call"]]
    assert repeated.raw["records"][-1]["call"] == 2, "it ran at another time"
    with pytest.raises(ValueError, match="was measured with .*'steps': 40.*or another `--raw`"):
        measure.Results(path, {**SETTINGS, "steps": 5})


def test_a_call_that_only_failed_is_not_named(tmp_path: Path) -> None:
    path = tmp_path / "raw.json"
    measure.Results(path, SETTINGS, ["- measured"]).add("100mbit", 0, record("ddp", 1, 1)["nodes"])
    again = measure.Results(path, SETTINGS, ["- failed"])
    again.add("100mbit", 0, measure._failed("ddp_bf16", 8, "no"))
    assert again.made_by == [["- measured"]]


class Broken:
    """A laboratory whose jobs write `rows` and then fail."""

    names = ("node0", "node1")

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def run(self, commands: list[list[str]], timeout_s: float, env: Any) -> list[JobResult]:
        self.env = env
        for *_, file in commands:
            lines = [json.dumps({"row": row, "error": None}) for row in ("none", "ddp")]
            Path(file).write_text("\n".join(lines[: self._rows]))
        return [JobResult(0, "", 0), JobResult(-6, "aborted at its end", 0)]


@pytest.mark.parametrize(
    ("rows", "errors"),
    [
        (2, [None, None]),
        (1, [None, "exit code -6, ab"]),
        (0, ["exit code -6, ab", "exit code -6, ab"]),
    ],
)
def test_what_was_measured_before_a_job_failed_is_kept(
    rows: int, errors: list[str | None], tmp_path: Path
) -> None:
    options = bandwidth.parse(["--raw", str(tmp_path / "raw.json")])
    measured = measure.run_job(Broken(rows), "job", [("none", 5), ("ddp", 5)], options)
    for (node, _), error in zip(measured, errors, strict=True):
        assert node["error"] == error or node["error"].startswith(error)


def test_freed_memory_stays_in_one_heap(tmp_path: Path) -> None:
    lab = Broken(1)
    options = bandwidth.parse(["--raw", str(tmp_path / "raw.json")])
    measure.run_job(lab, "job", [("none", 5)], options)
    script = """
import resource
from concurrent.futures import ThreadPoolExecutor
import torch
torch.set_num_threads(1)
def faults(numel):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(numel)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
    print(one.submit(faults, 6_000_000).result(), other.submit(faults, 3_000_000).result())
"""
    command = [sys.executable, "-c", script]
    env = {**os.environ, **lab.env}
    out = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    first, second = map(int, out.split())
    assert second < first / 8, "24 MB are 5860 pages, and what one thread freed serves the other"


def test_a_row_that_only_one_node_has_measured_has_failed(tmp_path: Path) -> None:
    class Short(Broken):
        def run(self, commands: list[list[str]], timeout_s: float, env: Any) -> list[JobResult]:
            super().run(commands[:1], timeout_s, env)
            return [JobResult(0, "", 0)] * 2

    options = bandwidth.parse(["--raw", str(tmp_path / "raw.json")])
    (nodes,) = measure.run_job(Short(2), "job", [("none", 5)], options)
    assert [node["error"] for node in nodes] == [
        "the job ended well, but not every node has measured it"
    ] * 2


def test_results_of_an_older_version_go_on(tmp_path: Path) -> None:
    path = tmp_path / "raw.json"
    path.write_text(json.dumps({"settings": SETTINGS, "records": [record("ddp", 1, 1)]}))
    results = measure.Results(path, SETTINGS, ["- this call"])
    assert results.has("100mbit", "ddp", 0)
    assert results.made_by == []
    results.add("100mbit", 1, record("ddp", 1, 1)["nodes"])
    assert results.made_by == [["- this call"]]


def test_a_missing_torchft_is_written_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "find_spec", lambda name: None)
    (nodes,) = measure.run_job(None, "benchmarks.bandwidth.torchft_job", [("torchft", 1)], None)
    assert "torchft is not installed: pip install" in nodes[0]["error"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--rounds", "0"], "--rounds must be 1 or more, not 0"),
        (["--sync-every", "15"], "--sync-every must be even and 10 or more, not 15"),
        (["--rows", "lion"], "invalid choice: 'lion'"),
    ],
)
def test_options_outside_their_range_are_refused(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bandwidth.parse(words)
    assert text in capsys.readouterr().err


def test_the_rows_are_those_of_the_page() -> None:
    assert [*job.strategies(100), *measure.TORCHFT_ROWS] == list(LABELS)
    assert 5.7e6 < sum(p.numel() for p in job.tiny_gpt2().parameters()) < 6e6


def test_without_a_laboratory_it_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.lab.netlab.why_unavailable", lambda: "It needs root.")
    assert bandwidth.main(["--raw", str(tmp_path / "raw"), "--page", str(tmp_path / "page")]) == 2
    assert capsys.readouterr().err == "It needs root.\n"
    assert not (tmp_path / "page").exists()


@pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
def test_a_round_measures_whole_cycles_and_the_interface_agrees_with_the_ledger(
    tmp_path: Path,
) -> None:
    raw, page = tmp_path / "raw.json", tmp_path / "page.md"
    where = ["--raw", str(raw), "--page", str(page), "--timeout", "100"]
    few = ["--rates", "1gbit", "--rows", "none", "overlap_fp4", "--rounds", "1"]
    assert bandwidth.main([*few, *where, "--sync-every", "10", "--steps", "2"]) == 0
    none, ours = (r["nodes"] for r in json.loads(raw.read_text())["records"])
    assert [node["error"] for node in (*none, *ours)] == [None] * 4
    for node in ours:
        # two replicas: every one sends the codes of all parameters once a cycle, and the scales
        assert node["parameters"] / 2 < node["ledger_bytes"] < 0.55 * node["parameters"]
        # the page has 0.3 % of headers; on a busy machine TCP also resends what was not lost
        assert node["ledger_bytes"] < node["wire_bytes"] < 1.3 * node["ledger_bytes"]
        # it acts where a fragment leaves or lands, which is in 6 of 10 steps at most
        assert len(node["own_s"]) == 10
        # two of the four others: one may be interrupted
        assert sorted(node["own_s"])[1] < 0.001 < max(node["own_s"]) < node["seconds"]
        assert 0 < node["beside_s"] < node["seconds"], "gloo's threads send"
    for node in none:
        assert node["wire_bytes"] < 4 * 2000, "a barrier of 500 bytes after each of its legs"
    assert "| + fp4 |" in page.read_text()
    assert page.read_text().count("- command: `python -m benchmarks.bandwidth") == 1
