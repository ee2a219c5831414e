"""What a command says while something takes long: a bar on a terminal, lines in a file."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

_PATIENCE_S = 2.0  # what is done sooner is not told
_TERMINAL_S = 0.2
_LOG_FILE_S = 10.0
_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")  # as Lightning reads them

Advance = Callable[[float], None]


@contextmanager
def stage(
    doing: str, total: float | None = None, at_once: bool = False, shown: bool = True
) -> Iterator[Advance]:
    """Say what the body does, and how far it is, from the third second on.

    A thread says it, for most of what takes long cannot be interrupted. It is gone when the body
    is left: the body must not fork, and what comes after may.

    Args:
        doing: such as "tokenizing the training text".
        total: of what the body advances by; None: nobody knows how long it takes.
        at_once: say it now.
        shown: whether this rank speaks, which one that Lightning has launched cannot tell here.

    Yields:
        A function that is told how much more has been done.
    """
    if not (shown and is_first_rank()):
        yield _nothing
        return
    told = _Told(doing, total, at_once)
    told.start()
    try:
        yield told.advance
    finally:
        told.end()


def is_first_rank() -> bool:
    """Return whether this process is the one that speaks, by what started the others says."""
    return next((os.environ[name] == "0" for name in _RANKS if name in os.environ), True)


class _Told:
    def __init__(self, doing: str, total: float | None, at_once: bool) -> None:
        self._doing, self._total, self._done = doing, total, 0.0
        self._patience_s = 0.0 if at_once else _PATIENCE_S
        self._console = Console()
        self._start = time.monotonic()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._tell, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def advance(self, more: float) -> None:
        self._done += more

    def end(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _tell(self) -> None:
        if self._patience_s and self._is_over.wait(self._patience_s):
            return
        if self._console.is_terminal:
            self._tell_terminal()
        else:
            self._tell_file()

    def _tell_terminal(self) -> None:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            TaskProgressColumn(show_speed=False),
            TimeElapsedColumn(),
        )
        # refreshed in here, not by one thread more
        bar = Progress(*columns, console=self._console, transient=True, auto_refresh=False)
        with bar:
            task = bar.add_task(self._doing, total=self._total)
            while not self._is_over.wait(_TERMINAL_S):
                bar.update(task, completed=self._done)
                bar.refresh()

    def _tell_file(self) -> None:
        print(self._line(), flush=True)
        while not self._is_over.wait(_LOG_FILE_S):
            print(self._line(), flush=True)

    def _line(self) -> str:
        seconds = round(time.monotonic() - self._start)
        share = f", {self._done / self._total:.0%}" if self._total and self._done else ""
        return f"{self._doing}{share}, {timedelta(seconds=seconds)}" if seconds else self._doing


def _nothing(_: float) -> None:
    pass
