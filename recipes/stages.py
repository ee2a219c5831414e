"""Progress of slow operations: a bar on a terminal, lines in a file."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

_PATIENCE_S = 2.0  # shorter operations show nothing
_TERMINAL_S = 0.2
_LOG_FILE_S = 10.0
# in the order in which Lightning reads them
_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")

Advance = Callable[[float], None]


@contextmanager
def stage(
    doing: str, total: float | None = None, at_once: bool = False, shown: bool = True
) -> Iterator[Advance]:
    """Show the progress of the body once it takes longer than two seconds.

    A thread prints it, because most slow operations cannot be interrupted. The thread ends with the
    body: the body must not fork, but later code may.

    Args:
        doing: such as "tokenizing the training text".
        total: amount of work; None if unknown.
        at_once: print without waiting two seconds.
        shown: whether this rank prints; a rank that Lightning has launched must be told.

    Yields:
        A function to call with the amount of work that has been done since the last call.
    """
    if not (shown and is_first_rank()):
        yield _nothing
        return
    announcement = _Announcement(doing, total, at_once)
    announcement.start()
    try:
        yield announcement.advance
    finally:
        announcement.end()


def is_first_rank() -> bool:
    """Return whether this is rank 0, according to the launcher's environment variables."""
    return next((os.environ[name] == "0" for name in _RANKS if name in os.environ), True)


class _Announcement:
    def __init__(self, doing: str, total: float | None, at_once: bool) -> None:
        self._doing, self._total, self._done = doing, total, 0.0
        self._patience_s = 0.0 if at_once else _PATIENCE_S
        self._console = Console()
        self._start = time.monotonic()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def advance(self, more: float) -> None:
        self._done += more

    def end(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        if self._patience_s and self._is_over.wait(self._patience_s):
            return
        if self._console.is_terminal:
            self._show_bar()
        else:
            self._print_lines()

    def _show_bar(self) -> None:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            TaskProgressColumn(show_speed=False),
            TimeElapsedColumn(),
        )
        # refreshed here instead of by another thread
        bar = Progress(*columns, console=self._console, transient=True, auto_refresh=False)
        with bar:
            task = bar.add_task(self._doing, total=self._total)
            while not self._is_over.wait(_TERMINAL_S):
                bar.update(task, completed=self._done)
                bar.refresh()

    def _print_lines(self) -> None:
        print(self._line(), flush=True)
        while not self._is_over.wait(_LOG_FILE_S):
            print(self._line(), flush=True)

    def _line(self) -> str:
        seconds = round(time.monotonic() - self._start)
        share = f", {self._done / self._total:.0%}" if self._total and self._done else ""
        return f"{self._doing}{share}, {timedelta(seconds=seconds)}" if seconds else self._doing


def _nothing(_: float) -> None:
    pass
