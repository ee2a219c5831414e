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

    Args:
        ledger: where the training thread's waits are counted.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._executor: ThreadPoolExecutor | None = None

    def submit(self, job: Callable[[], T], tag: str) -> Pending[T]:
        """Queue `job`; the result's wait is counted under `tag`.

        The thread starts with the first job, in the process that trains: after every fork.
        """
        if self._executor is None:
            self._executor = ThreadPoolExecutor(
                1, "exchange", initializer=self._ledger.ignore_waits_of_this_thread
            )
        future = self._executor.submit(job)

        def resolve() -> T:
            with self._ledger.count_wait(tag):
                return future.result()

        return Pending(resolve)

    def close(self) -> None:
        """Let the thread end after its present job; what is still queued is given up."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._executor = None
