"""The part of a fit that the bandwidth tables time: after some steps of warm-up, whole cycles."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from typing_extensions import override

from lightning_commfree import DistributedLionStrategy, StreamingDiLoCoStrategy
from lightning_commfree.comm.ledger import LedgerTotals
from lightning_commfree.strategies import ReplicatedStrategy
from recipes.bench._nodes import interface_counters

WARM_UP = 3  # steps; DDP rebuilds its buckets after the first, PowerSGD begins with the third


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
    """

    def __init__(self, row: str, steps: int, sync_every: int) -> None:
        self._row, self._steps, self._sync_every = row, steps, sync_every
        self._start = (0, LedgerTotals(0, 0.0, 0), 0.0)  # interface, ledger, CPU beside
        self._ends: list[float] = []  # of the last warm-up step and those of the window
        self._own: list[float] = []  # of every step since the fit began
        self.window: Window | None = None

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if isinstance(trainer.strategy, StreamingDiLoCoStrategy):
            running = trainer.strategy._diloco
            assert running is not None, "a fit has begun"
            running.finish()  # the replicas are equal: nothing moves
            running.step = self._sync_every - 1 - WARM_UP
            running.after_inner_step = self._timed(running.after_inner_step)  # type: ignore[method-assign]

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        ledger = (
            trainer.strategy.ledger if isinstance(trainer.strategy, ReplicatedStrategy) else None
        )
        counted = ledger.totals() if ledger else LedgerTotals(0, 0.0, 0)
        if trainer.global_step == WARM_UP:
            dist.barrier()  # both begin with empty sockets and at one moment
            self._start = (interface_counters().sent_bytes, counted, _cpu_s_beside())
        if WARM_UP <= trainer.global_step <= WARM_UP + self._steps:
            self._ends.append(time.perf_counter())
        if trainer.global_step == WARM_UP + self._steps:
            wire, before, beside_s = self._start
            beside_s = _cpu_s_beside() - beside_s
            dist.barrier()  # what the peer waits for has left our interface
            self.window = Window(
                row=self._row,
                steps=self._steps,
                seconds=self._ends[-1] - self._ends[0],
                step_s=[end - start for start, end in pairwise(self._ends)],
                own_s=self._own[-self._steps :],
                beside_s=beside_s,
                wire_bytes=interface_counters().sent_bytes - wire,
                ledger_bytes=counted.bytes_sent - before.bytes_sent if ledger else None,
                waited_s=counted.seconds_waited - before.seconds_waited if ledger else None,
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
        voting = trainer.strategy._voting
        assert voting is not None, "a fit runs"
        return self._steps * voting.bytes_per_step


def _cpu_s_beside() -> float:
    """Return the CPU seconds of all threads of the process but the one that calls."""
    return time.process_time() - time.thread_time()
