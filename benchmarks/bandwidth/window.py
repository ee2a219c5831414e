"""The part of a fit that the bandwidth tables time: after some steps of warm-up, whole cycles.

It comes in legs of a few steps. Between two of them the fits of the other rows have theirs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.strategies import Strategy
from typing_extensions import override

from benchmarks.lab import interface_counters
from lightning_commfree import DistributedLionStrategy, StreamingDiLoCoStrategy
from lightning_commfree.comm.ledger import LedgerTotals
from lightning_commfree.strategies import ReplicaStrategy

WARM_UP = 3  # steps; DDP rebuilds its buckets after the first, PowerSGD begins with the third
LEG_STEPS = 3  # about a second: what slows the machine for longer meets all rows


@dataclass(frozen=True)
class Window:
    """What one node measured for one row of one round.

    Attributes:
        row: its name.
        steps: in the window.
        seconds: they took.
        wire_bytes: this node's interface sent, with headers.
        ledger_bytes: the strategy's ledger counted; None where there is no ledger.
        formula_bytes: the strategy foretold for the window; None where it was not asked.
        waited_s: seconds of the window in which this node stood still for others, as the
            strategy's ledger has them; None where there is no ledger.
        parameters: of the model.
        step_s: seconds of each step of the window, in order; their sum is `seconds`.
        own_s: of these, what Streaming DiLoCo itself took at the end of each step, waiting
            included; empty for other rows.
        beside_s: CPU seconds of the window in all threads but the training's, such as gloo's; None
            where nobody measured it.
        error: why there is no measurement; None if there is one.
    """

    row: str
    steps: int
    seconds: float = 0.0
    wire_bytes: int = 0
    ledger_bytes: int | None = None
    formula_bytes: int | None = None
    waited_s: float | None = None
    parameters: int = 0
    step_s: Sequence[float] = ()
    own_s: Sequence[float] = ()
    beside_s: float | None = None
    error: str | None = None


class Stopwatch(pl.Callback):
    """Measures the window of a fit.

    Args:
        row: name of the row.
        steps: in the window.
        sync_every: of DiLoCo. A fit of DiLoCo is silent for its first `sync_every` steps; here it
            begins so late in that time that the window's first step is the one after which the
            first fragment leaves: the window holds whole cycles. Before, every fragment is
            exchanged once, as DDP's all-reduces are in the warm-up: what a first exchange takes
            once in a fit lies outside.
        pass_on: called after the warm-up and after every leg but the last, returns when the next
            may begin. A leg has `LEG_STEPS` steps, and more while a fragment is in flight: what
            overlaps, overlaps with steps of its own fit.

    Attributes:
        began: whether the fit has come to its first step.
        window: what was measured; None before the window's end.
    """

    def __init__(self, row: str, steps: int, sync_every: int, pass_on: Callable[[], None]) -> None:
        self._steps, self._sync_every, self._pass_on = steps, sync_every, pass_on
        self._row = row
        self._before = LedgerTotals(0, 0.0, 0)  # where the window begins
        self._wire_bytes, self._beside_s = 0, 0.0  # of the window's legs so far
        self._start = (0, 0.0)  # of the leg: interface, CPU beside
        self._end = 0.0  # of the last step
        self._step_s: list[float] = []
        self._leg = 0  # steps of this leg
        self._own: list[float] = []  # of every step since the fit began
        self.began = False
        self.window: Window | None = None

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.began = True
        if isinstance(trainer.strategy, StreamingDiLoCoStrategy):
            running = trainer.strategy.algorithm
            running.finish()  # the replicas are equal: nothing moves
            running.step = self._sync_every - 1 - WARM_UP
            running.after_step = self._timed(running.after_step)

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if trainer.global_step == WARM_UP:
            self._pass_on()
            self._before = _ledger(trainer.strategy) or self._before
            self._begin_leg()
        elif WARM_UP < trainer.global_step <= WARM_UP + self._steps:
            now = time.perf_counter()
            self._step_s.append(now - self._end)
            self._end = now
            self._leg += 1
            if len(self._step_s) == self._steps:
                self._end_leg()
                self.window = self._measured(trainer, pl_module)
            elif self._leg >= LEG_STEPS and not _in_flight(trainer.strategy):
                self._end_leg()
                self._pass_on()
                self._begin_leg()

    def _begin_leg(self) -> None:
        dist.barrier()  # all nodes begin with empty sockets and at one moment
        self._start = (interface_counters().sent_bytes, _cpu_s_beside())
        self._leg = 0
        self._end = time.perf_counter()

    def _end_leg(self) -> None:
        wire, beside_s = self._start
        self._beside_s += _cpu_s_beside() - beside_s
        dist.barrier()  # what the peer waits for has left our interface
        self._wire_bytes += interface_counters().sent_bytes - wire

    def _measured(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> Window:
        counted = _ledger(trainer.strategy)
        before = self._before
        return Window(
            row=self._row,
            steps=self._steps,
            seconds=sum(self._step_s),
            step_s=self._step_s,
            own_s=self._own[-self._steps :],
            beside_s=self._beside_s,
            wire_bytes=self._wire_bytes,
            ledger_bytes=counted.bytes_sent - before.bytes_sent if counted else None,
            waited_s=counted.seconds_waited - before.seconds_waited if counted else None,
            formula_bytes=self._formula_bytes(trainer),
            parameters=sum(p.numel() for p in pl_module.parameters()),
        )

    def _timed(self, work: Callable[..., bool]) -> Callable[..., bool]:
        def timed(stop: bool = False) -> bool:
            start = time.perf_counter()
            try:
                return work(stop)
            finally:
                self._own.append(time.perf_counter() - start)

        return timed

    def _formula_bytes(self, trainer: pl.Trainer) -> int | None:
        if not isinstance(trainer.strategy, DistributedLionStrategy):
            return None
        return self._steps * int(trainer.strategy.algorithm.voting.bytes_per_step)


def _ledger(strategy: Strategy) -> LedgerTotals | None:
    return strategy.ledger.totals() if isinstance(strategy, ReplicaStrategy) else None


def _in_flight(strategy: Strategy) -> bool:
    if not isinstance(strategy, StreamingDiLoCoStrategy):
        return False
    return bool(strategy.algorithm.in_flight)


def _cpu_s_beside() -> float:
    """Return the CPU seconds of all threads of the process but the one that calls."""
    return time.process_time() - time.thread_time()
