"""Threads that take turns on a clock of their own.

One of them runs at a time, until it waits for something. Then another one that can go on is chosen
at random, from a seed; and if none can, the clock jumps to the next time at which one may. So a
test does not depend on how fast and how busy a machine is, and another seed is another order of
events.
"""

from __future__ import annotations

import math
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from lightning_commfree.comm import ledger
from lightning_commfree.diloco import pace
from lightning_commfree.elastic import algorithm, log
from lightning_commfree.stores import retrying
from tests.elastic import log_twin, memory_store, scripted_store, thread_channel
from tests.stores import faulty_store

# those whose threads, clocks and pauses are replaced
_MODULES = (
    algorithm,
    faulty_store,
    ledger,
    log,
    log_twin,
    memory_store,
    pace,
    retrying,
    scripted_store,
    thread_channel,
)


class OverError(BaseException):
    """Ends a thread that still waits at the end of a test."""


class _Turn:
    """What a thread waits for; it may go on if `true()`, or from `until_s` on."""

    def __init__(self) -> None:
        self.true: Callable[[], bool] = lambda: True
        self.until_s = math.inf
        self.baton = threading.Semaphore(0)
        self.thread: threading.Thread | None = None


class Turns:
    """The threads of a test, of which the one that creates this is the first.

    `time`, `threading` and `queue` stand in for these modules, as far as the tests and what they
    test use them: within a `with`, in `_MODULES`.
    """

    def __init__(self, seed: int = 0) -> None:
        self.now_s = 0.0
        self._patch = pytest.MonkeyPatch()
        self._seed, self._random = seed, random.Random(seed)
        self._first = self._running = _Turn()
        self._turns = [self._first]
        self._is_over = self._is_stuck = False

        def clock() -> float:
            return self.now_s

        self.time = SimpleNamespace(monotonic=clock, perf_counter=clock, sleep=self.sleep)
        self.threading = SimpleNamespace(
            TIMEOUT_MAX=threading.TIMEOUT_MAX,
            get_ident=threading.get_ident,
            Thread=lambda **about: _Thread(self, **about),
            Timer=lambda within_s, act: _Thread(self, lambda: (self.sleep(within_s), act())),
            Event=lambda: _Event(self),
            Lock=lambda: _Lock(self),
            RLock=lambda: _Lock(self),
            Barrier=lambda parties, timeout=None: _Barrier(self, parties, timeout),
        )
        self.queue = SimpleNamespace(SimpleQueue=lambda: _Queue(self))

    def replace_in(self, module: ModuleType) -> None:
        for name in {"time", "threading", "queue"} & vars(module).keys():
            self._patch.setattr(module, name, getattr(self, name))

    def sleep(self, seconds: float) -> None:
        self.wait(lambda: False, seconds)

    def wait(self, true: Callable[[], bool], within_s: float | None = None) -> bool:
        """Let other threads run until `true()`, or for so many seconds; return which."""
        if self._is_over:
            raise OverError
        me = self._running
        me.true, me.until_s = true, math.inf if within_s is None else self.now_s + within_s
        if self._pass_on() is not me:
            me.baton.acquire()
        if self._is_over:
            raise OverError
        if me is self._first and self._is_stuck:
            raise AssertionError("every thread waits for another one")
        return true()

    def _pass_on(self) -> _Turn:
        """Let the thread run that is next."""
        before, chosen = self._running, self._next()
        self._running = chosen
        if chosen is not before:
            chosen.baton.release()  # from here on, it may pass its turn on
        return chosen

    def _next(self) -> _Turn:
        while True:
            ready = [one for one in self._turns if one.until_s <= self.now_s or one.true()]
            if ready:
                return self._random.choice(ready)
            self.now_s = min(one.until_s for one in self._turns)
            if self.now_s == math.inf:
                self._is_stuck = True
                return self._first

    def start(self, run: Callable[[], object]) -> _Turn:
        turn = _Turn()

        def take_turns() -> None:
            turn.baton.acquire()
            try:
                if not self._is_over:
                    run()
            except OverError:
                pass
            finally:
                self._turns.remove(turn)
                if not self._is_over:
                    self._pass_on()

        self._turns.append(turn)
        turn.thread = threading.Thread(target=take_turns, daemon=True)
        turn.thread.start()
        return turn

    def is_waiting(self, turn: _Turn) -> bool:
        return turn in self._turns

    def __enter__(self) -> Turns:
        random.seed(self._seed)  # of the pauses between tries of a request
        for module in _MODULES:
            self.replace_in(module)
        return self

    def __exit__(self, *_: object) -> None:
        """End all threads but the first one."""
        self._patch.undo()
        self._is_over = True
        for turn in self._turns[1:]:
            turn.baton.release()
            assert turn.thread is not None
            turn.thread.join()


class _Thread:
    def __init__(
        self,
        turns: Turns,
        target: Callable[..., object],
        args: Sequence[Any] = (),
        name: str = "",
        daemon: bool = False,
    ) -> None:
        self.ident: int | None = None
        self.name, self.daemon = name, daemon
        self._turns, self._run = turns, lambda: target(*args)

    def start(self) -> None:
        self._turn = self._turns.start(self._run)
        self.ident = id(self._turn)

    def is_alive(self) -> bool:
        return self.ident is not None and self._turns.is_waiting(self._turn)

    def join(self, timeout: float | None = None) -> None:
        self._turns.wait(lambda: not self.is_alive(), timeout)


class _Event:
    def __init__(self, turns: Turns) -> None:
        self._turns, self._is_set = turns, False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        return self._turns.wait(self.is_set, timeout)


class _Lock:
    """A lock that the thread that holds it can take again."""

    def __init__(self, turns: Turns) -> None:
        self._turns, self._times = turns, 0
        self._holder: int | None = None

    def __enter__(self) -> None:
        me = threading.get_ident()
        self._turns.wait(lambda: self._holder in (None, me))
        self._holder, self._times = me, self._times + 1

    def __exit__(self, *_: object) -> None:
        self._times -= 1
        self._holder = self._holder if self._times else None


class _Barrier:
    def __init__(self, turns: Turns, parties: int, timeout: float | None) -> None:
        self._turns, self._parties, self._timeout = turns, parties, timeout
        self._came = 0

    def wait(self, timeout: float | None = None) -> None:
        self._came += 1
        all_came = -(-self._came // self._parties) * self._parties
        within_s = self._timeout if timeout is None else timeout
        if not self._turns.wait(lambda: self._came >= all_came, within_s):
            raise threading.BrokenBarrierError


class _Queue:
    def __init__(self, turns: Turns) -> None:
        self._turns, self._items = turns, deque[Any]()

    def put(self, item: Any) -> None:
        self._items.append(item)

    def get(self) -> Any:
        self._turns.wait(lambda: bool(self._items))
        return self._items.popleft()
