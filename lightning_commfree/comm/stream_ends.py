"""Check that the streams of all ranks end after the same step.

Ranks that train apart exchange nothing at most steps. A rank whose stream of unknown length ends
early would wait at the end of its epoch for ranks that wait for its next exchange. So every rank
publishes its position in the job's key-value store, in a background thread:

1. Rank 1's stream ends after step 5. It publishes that, and reads where the others are.
2. It finds rank 0 at step 6, stores an error that names both, and raises it.
3. The other ranks' threads find the error; these ranks raise the same one after their next step, or
   where an exchange with rank 1 fails.

Streams that end after the same step cost two store operations a rank and epoch.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

PERIOD_S = 0.5  # from one look into the store to the next
_ERROR = "error"


class StreamEndsError(RuntimeError):
    """The streams end after different steps; the same sentence on all ranks."""


class StreamEnds:
    """One rank's position, and its view of the others'.

    It starts a daemon thread: make it in the process that trains, and `close` it there.

    Args:
        rank: of this process.
        size: ranks of the job.
        fit: names this fit among all fits of the job; the same on all ranks.
        timeout: how long `end` waits for the slowest rank.
    """

    def __init__(self, rank: int, size: int, fit: str, timeout: timedelta) -> None:
        self._rank, self._size, self._seconds = rank, size, timeout.total_seconds()
        self._store = dist.PrefixStore(  # type: ignore[attr-defined]
            f"commfree/streams/{fit}", dist.distributed_c10d._get_default_store()
        )
        self._error = ""
        self._position = (0, 0, False)  # epoch, steps, whether the epoch has ended with them
        self._published: Any = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stream ends", daemon=True)
        self._thread.start()

    def advance(self, epoch: int, step: int) -> None:
        """Note a step of this rank; the thread publishes it.

        Raises:
            StreamEndsError: some rank's stream has ended before.
        """
        self._position = (epoch, step, False)
        if self._error:
            raise StreamEndsError(self._error)

    def end(self, epoch: int, step: int) -> None:
        """Return when all ranks have ended this epoch after this step.

        Raises:
            StreamEndsError: some rank has ended it after another step.
            RuntimeError: some rank has not ended it within the timeout.
        """
        self._position = (epoch, step, True)
        self._publish()
        give_up = time.monotonic() + self._seconds
        while waited_for := self._ranks_before_the_end(epoch, step):
            if time.monotonic() > give_up:
                raise RuntimeError(
                    f"The data of rank {self._rank} ended after step {step} of the fit, and ranks"
                    f" {waited_for} have not come to the end of theirs within"
                    f" {self._seconds:.0f} s. They are slow or hang; if they were only slow, make"
                    " `timeout` longer."
                )
            time.sleep(PERIOD_S / 10)

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Raise the common error in place of one that follows from it.

        The rank that finds that streams are uneven leaves, and exchanges with it fail.
        """
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, StreamEndsError):
                raise
            self._look()
            if self._error:
                raise StreamEndsError(self._error) from error
            raise

    def close(self) -> None:
        """End the thread; a rank that waits for this one learns that it has left."""
        if self._error:
            # this rank may host the store: first let the threads of all others read the error
            time.sleep(2 * PERIOD_S)
        self._closing.set()
        self._thread.join()
        self._position = (2**62, 0, True)
        try:
            self._publish()
        except RuntimeError:  # the store went down with its rank
            return

    def _ranks_before_the_end(self, epoch: int, step: int) -> list[int]:
        """Return the ranks that may still train in this epoch.

        Raises:
            StreamEndsError: some rank trains past the step after which another one's data ended.
        """
        self._look()
        if self._error:
            raise StreamEndsError(self._error)
        waited_for = []
        for rank in range(self._size):
            if not self._store.check([str(rank)]):  # it has not published anything yet
                waited_for.append(rank)
                continue
            there, at, ended = json.loads(self._store.get(str(rank)))
            if there == epoch and at > step:
                self._blame(rank, at, step)
            elif there < epoch or (there == epoch and not (ended and at == step)):
                waited_for.append(rank)
        return waited_for

    def _blame(self, other: int, at: int, step: int) -> None:
        text = (
            f"The data of rank {self._rank} ended after step {step}, and rank {other} has trained"
            f" on to step {at}. Ranks that train apart need streams of equal length, because they"
            " cannot tell each other in time. Limit all of them to the batches that every rank"
            " has, with `limit_train_batches`."
        )
        # several ranks may find something at the same time: the first one's sentence is raised
        self._error = self._store.compare_set(_ERROR, "", text).decode()
        raise StreamEndsError(self._error)

    def _run(self) -> None:
        while not self._closing.wait(PERIOD_S):
            try:
                self._publish()
                self._look()
            except RuntimeError:  # the store went down with its rank: failure detection names it
                return

    def _publish(self) -> None:
        position = self._position
        if position != self._published:
            self._store.set(str(self._rank), json.dumps(position))
            self._published = position

    def _look(self) -> None:
        if not self._error and self._store.check([_ERROR]):
            self._error = self._store.get(_ERROR).decode()
