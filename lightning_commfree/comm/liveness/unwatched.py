"""A channel whose rank asks nobody: the interface of a `PeerWatch`, and what it is without one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, Protocol


class Work(Protocol):
    """A collective in flight; `torch.distributed.Work` is one."""

    def is_completed(self) -> bool:
        """Return whether it has ended, well or not."""

    def wait(self, timeout: timedelta = ...) -> Any:
        """Block until it has ended, at most `timeout`.

        Raises:
            RuntimeError: it failed, or the time is over.
        """


class Unwatched:
    """A single rank, or liveness is switched off: errors of exchanges pass as they are.

    Args:
        size: ranks of the channel.
        seconds: the timeout of its exchanges.

    Attributes:
        seconds: as above.
    """

    def __init__(self, size: int = 1, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self._size = size

    @property
    def can_ask(self) -> bool:
        """Whether this rank finds out about the others; the same on all ranks."""
        return self._size == 1

    def launching(self, tag: str) -> AbstractContextManager[None]:
        """Count an exchange that the body launches; name the lost ranks if that fails."""
        return self.naming(tag)

    def naming(self, tag: str, computing: bool = False) -> AbstractContextManager[None]:
        """Name the lost ranks if the body fails, which lets these ranks exchange something."""
        del tag, computing
        return nullcontext()

    def wait(self, works: Sequence[Work], tag: str) -> None:
        """Block until all `works`, the parts of one exchange, are done.

        Raises:
            RuntimeError: one failed, or the timeout ran out.
        """
        del tag
        for work in works:
            work.wait()

    def find_gone(self) -> dict[int, str]:
        """Return the ranks that are gone, with reasons, and tell the others of them."""
        return {}

    def tell(self, words: Callable[[], Mapping[str, Any]]) -> None:
        """Add `words()`, plain values, to every answer from now on; it runs in another thread."""

    def told(self, tag: str) -> dict[int, dict[str, Any]] | None:
        """Ask every other rank what it tells about itself; None where ranks cannot be asked."""
        del tag
        return {} if self.can_ask else None

    def close(self) -> None:
        """Take leave of the peers and stop answering."""
