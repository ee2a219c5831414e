"""`make gpu-check` on a machine without a GPU: what a CPU can play, the page, and a second call."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from benchmarks.gpu_check import __main__ as gpu_check
from benchmarks.gpu_check import stages
from benchmarks.gpu_check.stages import Check, Machine, at_most
from tests.forks import forking

ROOT = Path(gpu_check.__file__).parents[2]
# a GPU image has torch, numpy, Lightning, transformers and pytest
MISSING = (
    "datasets",
    "hydra",
    "matplotlib",
    "numba",
    "omegaconf",
    "peft",
    "pydantic",
    "torchft",
    "triton",
    "wandb",
)


def test_a_cpu_plays_what_it_can(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank of a fit kills itself; times are measured and not judged."""
    monkeypatch.setattr(stages, "subprocess", forking)
    page = tmp_path / "gpu.md"
    names = ["kernels", "streams", "lion", "deaths", "tests", "nccl"]
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
    places = [text.index(f"\n## {name}") for name in names]
    assert places == sorted(places)


def test_the_most_telling_stages_come_first() -> None:
    parts = [part.name for part in gpu_check.parts_of([*stages.STAGES], Machine("cuda"))]
    assert parts[:5] == ["triton", "kernels", "streams", "lion", "overhead: diloco"]
    assert parts[-2:] == ["memcheck", "nccl"], "the longest, and what needs several GPUs"
    assert len(set(parts)) == len(parts)


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


def test_a_second_call_continues_where_the_first_was_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a stage: the kinds that are done have their part of the page."""
    ran, stops = [], {"lion"}

    def kernels(_: Machine) -> Iterator[Check]:
        ran.append("kernels")
        yield at_most("copy", 0.5, 2.0)

    def fits(machine: Machine) -> Iterator[Check]:
        (kind,) = machine.kinds
        ran.append(kind)
        yield at_most(f"{kind}: half", 0.5, 2.0)
        if kind in stops:
            raise KeyboardInterrupt
        yield at_most(f"{kind}: whole", 0.5, 2.0)

    monkeypatch.setitem(stages.STAGES, "kernels", kernels)
    monkeypatch.setitem(stages.STAGES, "fits", fits)
    page, kinds = tmp_path / "gpu.md", ["diloco", "lion", "domino"]
    words = ["--device", "cpu", "--page", str(page), "--stages", "fits", "kernels"]
    words += ["--kinds", *kinds]
    with pytest.raises(KeyboardInterrupt):
        gpu_check.main(words)
    text = page.read_text()
    assert ran == ["kernels", "diloco", "lion"]
    assert "**Found:** 3 of 3 bounds hold" in text
    assert "**Not run yet:** fits: lion; fits: domino. The same command continues." in text
    assert "lion: half" not in text

    stops.clear()
    assert gpu_check.main(words) == 0
    text = page.read_text()
    assert ran == ["kernels", "diloco", "lion", "lion", "domino"]
    assert "**Found:** 7 of 7 bounds hold" in text
    assert "Not run yet" not in text
    assert "-- fits: diloco: from an earlier call" in capsys.readouterr().out

    assert gpu_check.main([*words, "--again", "--stages", "kernels"]) == 0
    assert ran[5:] == ["kernels"]
    found = page.with_suffix(".json")
    found.write_text(found.read_text().replace("device: cpu", "device: another"))
    assert gpu_check.main(words) == 0
    assert ran[6:] == ["kernels", *kinds], "what another machine has found is no help"


SITE = f"""
import importlib.metadata, sys

class Without:
    def __init__(self, finder):
        self._finder = finder

    def find_spec(self, name, *more):
        missing = name.partition(".")[0] in {MISSING}
        return None if missing else self._finder.find_spec(name, *more)

    def __getattr__(self, name):
        return getattr(self._finder, name)

def distribution(name, found=importlib.metadata.distribution):
    if name in {MISSING}:
        raise importlib.metadata.PackageNotFoundError(name)
    return found(name)

sys.meta_path[:] = map(Without, sys.meta_path)
importlib.metadata.distribution = distribution
"""


def run_without_the_missing(words: Sequence[str], folder: Path) -> str:
    """Run a new Python in which what a GPU image lacks is not there; return what it prints."""
    (folder / "sitecustomize.py").write_text(SITE)
    plugins = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # pytest-timeout is one
    env = {**os.environ, **plugins, "PYTHONPATH": f"{folder}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


ALONE = """
import sys
from pathlib import Path
import pytest
from benchmarks.gpu_check import __main__ as gpu_check, job

page = Path(sys.argv[1])
assert pytest.main(sys.argv[2:]) == 0
words = ["--device", "cpu", "--page", str(page), "--stages", "kernels", "streams", "lion"]
assert gpu_check.main(words) == 0
job.run(job.Plan("diloco", "cpu", ranks=1), page.parent)
"""


def test_only_what_a_gpu_image_has_is_imported(tmp_path: Path) -> None:
    """By the stages, by a fit and by the GPU tests, which are collected."""
    page = tmp_path / "gpu.md"
    module, *options = stages.PYTEST[1:]
    assert module == "pytest"
    words = [*options, "--collect-only", "-m", "gpu", *stages.GPU_TESTS]
    printed = run_without_the_missing(["-c", ALONE, str(page), *words], tmp_path)
    assert "**Found:** 1 of 1 bounds hold" in page.read_text()
    assert (tmp_path / "0.pt").exists()
    for name in stages.GPU_TESTS:
        assert f"{name}::" in printed, f"{name} has a GPU test"
    marked = {p for p in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in p.read_text()}
    benches = (ROOT / "tests" / "benchmarks").glob("*.py")  # they import the recipes
    assert marked - {*benches} == {ROOT / name for name in stages.GPU_TESTS}


@pytest.mark.gpu
def test_payloads_are_staged_intact() -> None:
    assert all(check.holds for check in stages.streams(Machine("cuda")))
