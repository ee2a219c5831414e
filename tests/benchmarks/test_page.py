"""Provenance of result pages."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.common import page
from benchmarks.common.page import one_block, provenance
from recipes.training import provenance as source

BLOCK = ["- command: `python -m benchmarks.wire`", "- commit: `abc`", "- hardware: one core"]


def test_several_calls_share_one_block() -> None:
    later = [BLOCK[0], "- commit: `def`", BLOCK[2]]
    assert one_block([BLOCK, later]) == [BLOCK[0], "- commit: `abc`; `def`", BLOCK[2]]


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace this repository by one with a single commit."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=b", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    (tmp_path / "benchmarks" / "wire").mkdir(parents=True)
    for name in ("code.py", "result.md", "result.json"):
        (tmp_path / "benchmarks" / "wire" / name).write_text("old")
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    monkeypatch.setattr(source, "_git", git)
    monkeypatch.setattr(page, "BENCHMARKS", tmp_path / "benchmarks")
    return tmp_path


def test_a_committed_page_needs_a_clean_tree(tree: Path) -> None:
    folder = tree / "benchmarks" / "wire"
    assert "dirty" not in "".join(provenance("wire", [], folder / "result.md"))
    (folder / "code.py").write_text("new")
    with pytest.raises(SystemExit, match=r"(?s)result.md must name the commit.*Commit them, or"):
        provenance("wire", [], folder / "result.md")
    assert "-dirty`" in provenance("wire", [], tree / "elsewhere.md")[1], "a trial page"


def test_the_benchmark_s_own_output_is_no_change(tree: Path) -> None:
    folder = tree / "benchmarks" / "wire"
    for name in ("result.md", "result.json"):
        (folder / name).write_text("new")
    command, commit, *_ = provenance("wire", ["--rounds", "3"], folder / "result.md")
    assert command == "- command: `python -m benchmarks.wire --rounds 3`"
    assert "dirty" not in commit
