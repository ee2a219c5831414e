"""The bench of first words, at the command that starts fastest; and what it says of silence."""

from __future__ import annotations

import pytest

from benchmarks.start import __main__ as start
from benchmarks.start.__main__ import Start, row, started


def test_the_table_has_a_line_for_every_command(capsys) -> None:
    command = "-m commfree_planner.command --help"
    start.main(["--rounds", "1", f"--commands={command}"])
    head, columns, line = capsys.readouterr().out.splitlines()
    assert head.startswith("1 rounds, ")
    assert columns.split() == ["first", "word", "CPU", "s", "2", "s", "command"]
    assert line.endswith(f"python {command}")
    first_s, cpu_s = map(float, line.split()[:2])
    assert 0 < first_s < 60
    assert 0 < cpu_s < 2, "the planner loads no library, however busy the machine is"


def test_a_command_that_runs_on_is_ended_after_its_first_word() -> None:
    code = "import time; print('here', flush=True); time.sleep(60)"
    found = started(["-c", code], to_the_end=False)
    assert found.first_s < 30
    assert found.cpu_s is None


def test_silence_and_failure_are_no_figures() -> None:
    with pytest.raises(RuntimeError, match="ended with 0 and said: b''"):
        started(["-c", "pass"], to_the_end=True)
    with pytest.raises(RuntimeError, match="ended with 3 and said: b'no"):
        started(["-c", "print('no'); raise SystemExit(3)"], to_the_end=True)


def test_the_median_is_held_against_two_seconds() -> None:
    soon, late = Start(1.5, 0.5), Start(2.5, None)
    assert row("-c x", [soon, soon, late]).split() == ["1.50", "0.50", "met", "python", "-c", "x"]
    assert row("-c x", [late]).split() == ["2.50", "-", "missed", "python", "-c", "x"]
