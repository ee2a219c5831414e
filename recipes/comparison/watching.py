"""Show the progress of a running job, whose output goes into a file."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.text import Text

_POLL_S = 0.5
_PROGRESS = "step "  # how `StepProgressBar` begins its lines in a file
_TAIL_BYTES = 2_000


@contextmanager
def watched(log: Path, place: str, console: Console) -> Iterator[None]:
    """Show a job's latest progress line during the body; if output is a file, every line.

    Args:
        log: the job's output, which may not exist yet.
        place: of the job, such as "[1/4] ddp".
        console: where to print.
    """
    is_over = threading.Event()
    thread = threading.Thread(target=_watch, args=(log, place, console, is_over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _watch(log: Path, place: str, console: Console, is_over: threading.Event) -> None:
    shown = ""
    with console.status(Text(f"{place}: starts")) as status:
        while not is_over.wait(_POLL_S):
            line = newest_progress(log)
            if line in ("", shown):
                continue
            shown = line
            status.update(Text(f"{place}: {line}", no_wrap=True, overflow="ellipsis"))
            if not console.is_terminal:
                console.print(Text(f"{place}: {line}"), soft_wrap=True)


def newest_progress(log: Path) -> str:
    """Return the last progress line of a job's output; empty if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(log.stat().st_size - _TAIL_BYTES, 0))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    lines = text.splitlines()
    return next((line for line in reversed(lines) if line.startswith(_PROGRESS)), "")
