"""What is said while something takes long: on a terminal, in a file, and by whom."""

from __future__ import annotations

import re
import threading
import time

import pytest
from rich.console import Console

from recipes import stages
from recipes.stages import is_first_rank, stage


@pytest.fixture(autouse=True)
def _quick(monkeypatch) -> None:
    monkeypatch.setattr(stages, "_PATIENCE_S", 0.1)
    monkeypatch.setattr(stages, "_LOG_FILE_S", 0.1)
    monkeypatch.setattr(stages, "_TERMINAL_S", 0.02)
    for name in stages._RANKS:
        monkeypatch.delenv(name, raising=False)


def test_a_short_stage_is_not_reported(capsys) -> None:
    with stage("reading"):
        pass
    assert capsys.readouterr().out == ""


def test_in_a_file_lines_say_how_far_it_is(capsys) -> None:
    with stage("reading the text", total=10) as advance:
        advance(3)
        time.sleep(0.25)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 2
    assert set(lines) == {"reading the text, 30%"} or lines[0] == "reading the text"
    assert lines[-1].startswith("reading the text, 30%") or lines[-1] == "reading the text"


def test_on_a_terminal_a_bar_that_goes_when_it_is_over(capsys, monkeypatch) -> None:
    terminal = lambda: Console(force_terminal=True, width=80)  # noqa: E731
    monkeypatch.setattr(stages, "Console", terminal)
    with stage("tokenizing the train split", total=4) as advance:
        advance(2)
        time.sleep(0.25)
    shown = capsys.readouterr().out
    plain = re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", shown)
    assert "tokenizing the train split" in plain
    assert "50%" in plain
    assert shown.endswith("\x1b[2K"), "the line is erased"


def test_at_once(capsys, monkeypatch) -> None:
    monkeypatch.setattr(stages, "_PATIENCE_S", 60.0)
    with stage("loading", at_once=True):
        time.sleep(0.05)
    assert capsys.readouterr().out == "loading\n"


@pytest.mark.parametrize("rank", stages._RANKS)
def test_other_ranks_are_silent(rank, capsys, monkeypatch) -> None:
    monkeypatch.setenv(rank, "1")
    assert not is_first_rank()
    with stage("loading", at_once=True):
        time.sleep(0.05)
    monkeypatch.setenv(rank, "0")
    assert is_first_rank()
    with stage("loading", at_once=True, shown=False):
        time.sleep(0.05)
    assert capsys.readouterr().out == ""


def test_nothing_is_left_that_a_fork_could_copy(capsys) -> None:
    """An error in the body, too, ends the thread."""
    before = threading.active_count()
    with pytest.raises(ValueError, match="wrong"), stage("reading", at_once=True):
        raise ValueError("wrong")
    assert threading.active_count() == before
