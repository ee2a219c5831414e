"""`make gpu-check` on a machine without a GPU: what a CPU can play, and the page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.gpu_check import __main__ as gpu_check
from benchmarks.gpu_check import stages
from benchmarks.gpu_check.stages import Check, Machine, at_most
from tests.forks import forking


def test_a_cpu_plays_what_it_can(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank of a fit kills itself; times are measured and not judged."""
    monkeypatch.setattr(stages, "subprocess", forking)
    page = tmp_path / "gpu.md"
    names = ["tests", "kernels", "lion", "streams", "deaths", "nccl"]
    words = ["--device", "cpu", "--kinds", "diloco", "--page", str(page), "--stages", *names]
    assert gpu_check.main(words) == 0
    printed, text = capsys.readouterr().out, page.read_text()
    assert printed.startswith(gpu_check.NO_GPU)
    assert gpu_check.NO_GPU in text
    assert "**Found:** 3 of 3 bounds hold" in text
    assert "| nccl | needs a CUDA device | - | not judged |" in text
    assert "| staged payloads that were spoiled, of 50 | 0 | at most 0 | holds |" in text
    assert "| diloco: the error names rank 1 | yes | yes | holds |" in text
    assert text.count("times the floor of memory") == 9
    for name in names:
        assert f"\n## {name}\n" in text


def test_a_missed_bound_and_a_broken_stage_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: Machine) -> Iterator[Check]:
        yield at_most("before", 1.0, 2.0)
        raise ValueError("no such kernel")

    def slow(_: Machine) -> Iterator[Check]:
        yield at_most("step", 3.0, 2.0, note="5 ms")

    monkeypatch.setitem(stages.STAGES, "kernels", broken)
    monkeypatch.setitem(stages.STAGES, "lion", slow)
    page = tmp_path / "gpu.md"
    words = ["--device", "cpu", "--page", str(page), "--stages", "kernels", "lion"]
    assert gpu_check.main(words) == 1
    text = page.read_text()
    assert "**Found:** 1 of 3 bounds hold" in text
    assert "| kernels | ValueError: no such kernel | runs to its end | **MISSED** |" in text
    assert "| step | 3 (5 ms) | at most 2 | **MISSED** |" in text


@pytest.mark.gpu
def test_payloads_are_staged_intact() -> None:
    assert all(check.holds for check in stages.streams(Machine("cuda")))
