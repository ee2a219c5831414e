"""Several runs in one process that take legs in turn: one runs at a time, the others stand still.

What a machine does beside a bench changes within seconds. Of runs that follow one another, one
finds the machine slower than the other; runs that change every few steps share its moods.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

R = TypeVar("R")
Run = Callable[[Callable[[], None]], R]  # gets what ends a leg and returns when the next begins


class Relay(Generic[R]):
    """Runs in threads of their own, of which only the one that holds the baton runs.

    Args:
        runs: by name, in the order of their legs. Each is called with a function that passes the
            baton on and returns when it has come round.

    Example::

        relay = Relay({"a": lambda pass_on: train(pass_on), "b": ...})
        for name, result in relay.results():
            ...
    """

    def __init__(self, runs: Mapping[str, Run[R]]) -> None:
        self._runs = runs
        self._order = deque(runs)  # the first one holds the baton
        self._passed = threading.Condition()
        self._ended: queue.SimpleQueue[tuple[str, R | BaseException]] = queue.SimpleQueue()

    def results(self) -> Iterator[tuple[str, R]]:
        """Run all; yield name and result of each when it has ended.

        Raises:
            BaseException: what a run raised. The others then stand still for good: the process
                should end.
        """
        for name in self._runs:
            # daemons: those that stand still must not keep the process
            threading.Thread(target=self._go, args=(name,), name=name, daemon=True).start()
        for _ in self._runs:
            name, result = self._ended.get()
            if isinstance(result, BaseException):
                raise result
            yield name, result
            self._leave()

    def _go(self, name: str) -> None:
        self._wait_for_baton(name)
        try:
            result: R | BaseException = self._runs[name](lambda: self._pass_on(name))
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that asked
            result = error
        self._ended.put((name, result))

    def _pass_on(self, name: str) -> None:
        with self._passed:
            self._order.rotate(-1)
            self._passed.notify_all()
        self._wait_for_baton(name)

    def _leave(self) -> None:
        with self._passed:
            self._order.popleft()
            self._passed.notify_all()

    def _wait_for_baton(self, name: str) -> None:
        with self._passed:
            self._passed.wait_for(lambda: self._order[0] == name)
