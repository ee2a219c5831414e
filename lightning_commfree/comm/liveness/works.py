"""Waiting for collectives in slices of time, so that who waits can look about."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol

_SLICE = timedelta(seconds=0.1)  # how soon a waiting rank notices what it was told


class Work(Protocol):
    """A collective in flight; `torch.distributed.Work` is one."""

    def is_completed(self) -> bool:
        """Return whether it has ended, well or not."""

    def wait(self, timeout: timedelta = ...) -> Any:
        """Block until it has ended, at most `timeout`.

        Raises:
            RuntimeError: it failed, or the time is over.
        """


def has_ended(work: Work) -> bool:
    """Wait for a slice of time; return whether `work` has ended, raise what it failed with."""
    try:
        work.wait(_SLICE)
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait(_SLICE)  # it may have ended well just after the slice
    return True
