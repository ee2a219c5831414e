"""A thread beside the training: exchanges of several phases, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from lightning_commfree.comm.channel import Pending
from lightning_commfree.comm.ledger import Ledger

T = TypeVar("T")


class Background:
    """Runs jobs in the order in which they were given, so that ranks stay in step.

    An exchange whose second phase computes on the result of the first would need the training
    thread in the middle of its flight. Here one thread plays both phases. It takes one job at a
    time: the collectives of two fragments in flight never change places on any rank. What the
    thread waits for, nobody waits for: the ledger counts the training thread's waits only.

    After a job that failed none is run any more, and the later ones fail as it did: the peers took
    part in exchanges that this rank left out, and its next one would meet another one of theirs.

    Args:
        ledger: where the training thread's waits are counted.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._executor: ThreadPoolExecutor | None = None
        self._error: Exception | None = None  # of the first job that failed

    def submit(
        self, job: Callable[[], T], tag: str, staged: Callable[[], object] | None = None
    ) -> Pending[T]:
        """Queue `job`; the result's wait is counted under `tag`.

        The thread starts with the first job, in the process that trains: after every fork.

        Args:
            job: what the thread does.
            tag: of the ledger.
            staged: returns when this rank's device has made what the job sends. Whoever waits for
                the result waits for that first, uncounted: it is the rank's own work, which the
                host may be far ahead of.
        """
        if self._executor is None:
            self._executor = ThreadPoolExecutor(
                1, "exchange", initializer=self._ledger.ignore_waits_of_this_thread
            )
        future = self._executor.submit(self._run, job, self._ledger.phase)

        def resolve() -> T:
            if staged is not None:
                staged()
            with self._ledger.count_wait(tag):
                return future.result()

        return Pending(resolve)

    def close(self) -> None:
        """Let the thread end after its present job; what is still queued is given up."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._executor = None

    def _run(self, job: Callable[[], T], phase: str) -> T:
        if self._error is not None:
            raise self._error
        try:
            with self._ledger.of_this_thread(phase):
                return job()
        except Exception as error:
            self._error = error
            raise
