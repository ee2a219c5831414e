"""What a result page says about where it comes from, and what it refuses."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.common import page
from benchmarks.common.page import one_block, provenance, result_page
from recipes.training import provenance as source

BLOCK = ["- command: `python -m benchmarks.wire`", "- commit: `abc`", "- hardware: one core"]


def test_calls_come_together_in_one_block() -> None:
    longer = ["- command: `python -m benchmarks.wire --rounds 9`", *BLOCK[1:]]
    later = [BLOCK[0], "- commit: `def`", BLOCK[2]]
    assert one_block([BLOCK, BLOCK, longer, later]) == [
        "- command: `python -m benchmarks.wire`; `python -m benchmarks.wire --rounds 9`",
        "- commit: `abc`; `def`",
        "- hardware: one core",
    ]


def test_a_commit_with_changes_is_none_and_is_told() -> None:
    dirty = [BLOCK[0], "- commit: `def-dirty`", BLOCK[2]]
    lines = one_block([BLOCK, dirty])
    assert lines[1:3] == ["- commit: `abc`", f"- {page.UNCOMMITTED}: `def`"]
    assert not any(label in line for line in one_block([dirty]) for label in ("dirty", "- commit"))


def test_a_command_of_another_time_is_written_as_it_is_typed_today() -> None:
    (line,) = one_block([["- command: `python -m recipes.bench.quality --seeds=3`"]])
    assert line == (
        "- command: `python -m benchmarks.quality --seeds=3`; called `recipes.bench.quality` then"
    )


def test_the_finding_comes_first() -> None:
    lines = result_page("What?", ["**Found:** that."], [BLOCK], ["## Tables"])
    places = [lines.index(line) for line in ("# What?", "**Found:** that.", BLOCK[1], "## Tables")]
    assert places == sorted(places)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one commit, in place of this one."""

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


def test_a_page_of_the_repository_needs_a_commit(tree: Path) -> None:
    folder = tree / "benchmarks" / "wire"
    assert "dirty" not in "".join(provenance("wire", [], folder / "result.md"))
    (folder / "code.py").write_text("new")
    with pytest.raises(SystemExit, match=r"(?s)result.md shall name the commit.*Commit them, or"):
        provenance("wire", [], folder / "result.md")
    assert "-dirty`" in provenance("wire", [], tree / "elsewhere.md")[1], "a try-out"


def test_what_a_benchmark_writes_run_by_run_is_no_change(tree: Path) -> None:
    folder = tree / "benchmarks" / "wire"
    for name in ("result.md", "result.json"):
        (folder / name).write_text("new")
    command, commit, *_ = provenance("wire", ["--rounds", "3"], folder / "result.md")
    assert command == "- command: `python -m benchmarks.wire --rounds 3`"
    assert "dirty" not in commit
