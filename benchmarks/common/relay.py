"""Fits in one process that take turns: one runs at a time, the others are paused.

Other load on a machine changes within seconds. Of fits that run one after the other, one may find
the machine slower than the other; fits that alternate every few steps see the same conditions.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

R = TypeVar("R")
# gets a function that ends the run's leg and returns when its next leg begins
Run = Callable[[Callable[[], None]], R]


class Relay(Generic[R]):
    """Runs in separate threads, of which only the one with the baton runs.

    Args:
        runs: by name, in the order of their legs. Each is called with a function that passes the
            baton on and returns when it comes back.

    Example::

        relay = Relay({"a": lambda pass_on: train(pass_on), "b": ...})
        for name, result in relay.results():
            ...
    """

    def __init__(self, runs: Mapping[str, Run[R]]) -> None:
        self._runs = runs
        self._order = deque(runs)  # the first one has the baton
        self._passed = threading.Condition()
        self._ended: queue.SimpleQueue[tuple[str, R | BaseException]] = queue.SimpleQueue()

    def results(self) -> Iterator[tuple[str, R]]:
        """Run all; yield the name and result of each as it ends.

        Raises:
            BaseException: the exception of a run. The other runs stay paused for good, so the
                process should end.
        """
        for name in self._runs:
            # daemons, because paused runs must not keep the process alive
            threading.Thread(target=self._execute, args=(name,), name=name, daemon=True).start()
        for _ in self._runs:
            name, result = self._ended.get()
            if isinstance(result, BaseException):
                raise result
            yield name, result
            self._leave()

    def _execute(self, name: str) -> None:
        self._wait_for_baton(name)
        try:
            result: R | BaseException = self._runs[name](lambda: self._pass_on(name))
        except BaseException as error:  # noqa: BLE001 - raised again in the calling thread
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
