"""The timed window of a fit: whole cycles after a warm-up, in legs of a few steps.

Between two legs the fits of the other rows have theirs.
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

WARM_UP = 3  # steps: DDP rebuilds its buckets after the first, PowerSGD starts with the third
LEG_STEPS = 3  # about a second, so that longer slowdowns of the machine affect all rows


@dataclass(frozen=True)
class Window:
    """Measurements of one node for one row of one round.

    Attributes:
        row: name of the row.
        steps: number of steps in the window.
        seconds: duration of the window.
        wire_bytes: sent by this node's interface, including headers.
        ledger_bytes: counted by the strategy's ledger; None without a ledger.
        formula_bytes: predicted by Distributed Lion for the window; None for other strategies.
        waited_s: seconds in which this node waited for others, from the strategy's ledger; None
            without a ledger.
        parameters: number of parameters of the model.
        step_s: seconds of each step, in order; their sum is `seconds`.
        own_s: seconds of each step in which Streaming DiLoCo blocked training, including waiting;
            empty for other rows.
        beside_s: CPU seconds of all threads except the training thread; None if not measured.
        sync_every: H of Streaming DiLoCo at the end of the window; None for other rows.
        error: why the measurement failed; None if it succeeded.
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
    sync_every: int | None = None
    error: str | None = None


class Stopwatch(pl.Callback):
    """Measure the window of a fit.

    A fit of DiLoCo sends nothing in its first `sync_every` steps; here its step counter is set so
    that the first fragment leaves after the window's first step, which makes the window whole
    cycles. Before the window every fragment is exchanged once, like DDP's gradients in the warm-up,
    to exclude the one-time costs of a first exchange.

    Args:
        row: name of the row.
        steps: number of steps in the window.
        pass_on: called after the warm-up and after every leg but the last; returns when the next
            leg may begin. A leg has `LEG_STEPS` steps, and more while a fragment is in flight,
            because an exchange must overlap with steps of its own fit. With `sync_every="auto"`, a
            fragment nearly always is; there it has more steps for `LEG_STEPS` after a launch.

    Attributes:
        began: whether the fit has reached its first step.
        window: the measurement; None before the end of the window.
    """

    def __init__(self, row: str, steps: int, pass_on: Callable[[], None]) -> None:
        self._steps, self._pass_on = steps, pass_on
        self._row = row
        self._before = LedgerTotals(0, 0.0, 0)  # at the start of the window
        self._wire_bytes, self._beside_s = 0, 0.0  # of the finished legs
        self._start = (0, 0.0)  # at the start of the leg: interface, CPU of other threads
        self._end = 0.0  # of the last step
        self._step_s: list[float] = []
        self._leg = 0  # steps of this leg
        self._own: list[float] = []  # of every step of the fit
        self._taken = 0  # steps; a batch counts as one with gradient accumulation, too
        self.began = False
        self.window: Window | None = None

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.began = True
        if isinstance(trainer.strategy, StreamingDiLoCoStrategy):
            running = trainer.strategy.algorithm
            running.finish()  # all replicas are equal, so no weight changes
            running.step = trainer.strategy.settings.first_sync_every - 1 - WARM_UP
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
        self._taken += 1
        if self._taken == WARM_UP:
            self._pass_on()
            self._before = _ledger(trainer.strategy) or self._before
            self._begin_leg()
        elif WARM_UP < self._taken <= WARM_UP + self._steps:
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
        dist.barrier()  # all nodes start together and with empty sockets
        self._start = (interface_counters().sent_bytes, _cpu_s_of_other_threads())
        self._leg = 0
        self._end = time.perf_counter()

    def _end_leg(self) -> None:
        wire, beside_s = self._start
        self._beside_s += _cpu_s_of_other_threads() - beside_s
        dist.barrier()  # all data for the peer has left this interface
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
            sync_every=_sync_every(trainer.strategy),
            parameters=sum(p.numel() for p in pl_module.parameters()),
        )

    def _timed(self, work: Callable[[], None]) -> Callable[[], None]:
        def timed() -> None:
            start = time.perf_counter()
            try:
                work()
            finally:
                self._own.append(time.perf_counter() - start)

        return timed

    def _formula_bytes(self, trainer: pl.Trainer) -> int | None:
        if not isinstance(trainer.strategy, DistributedLionStrategy):
            return None
        return self._steps * trainer.strategy.algorithm.voting.bytes_per_step.total()


def _ledger(strategy: Strategy) -> LedgerTotals | None:
    return strategy.ledger.totals() if isinstance(strategy, ReplicaStrategy) else None


def _sync_every(strategy: Strategy) -> int | None:
    if not isinstance(strategy, StreamingDiLoCoStrategy):
        return None
    return strategy.algorithm.schedule.paces[-1].sync_every


def _in_flight(strategy: Strategy) -> bool:
    if not isinstance(strategy, StreamingDiLoCoStrategy):
        return False
    diloco = strategy.algorithm
    if not strategy.settings.is_auto:
        return bool(diloco.in_flight)
    # steps, not seconds: both nodes must decide alike
    return any(diloco.schedule.launched_at(diloco.step - ago) for ago in range(LEG_STEPS))


def _cpu_s_of_other_threads() -> float:
    """Return the CPU seconds of all threads of the process except the calling one."""
    return time.process_time() - time.thread_time()
