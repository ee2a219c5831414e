"""A job's progress, read from its output while it runs."""

from __future__ import annotations

import io
import time
from pathlib import Path

import pytest
from rich.console import Console

from recipes.comparison import watching
from recipes.comparison.watching import watched


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "_POLL_S", 0.02)


@pytest.mark.parametrize("terminal", [False, True])
def test_it_is_shown_while_the_job_runs(terminal, tmp_path: Path) -> None:
    """`make compare` said nothing between the beginning of a job and its end."""
    log, console = tmp_path / "output.log", Console(file=io.StringIO(), force_terminal=terminal)
    with watched(log, "[1/2] ddp", console):
        for step in (3, 4):
            log.write_text(f"step {step}/9, loss {step}.5\n")
            time.sleep(0.3)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for step in (3, 4):
        assert f"[1/2] ddp: step {step}/9, loss {step}.5" in shown
