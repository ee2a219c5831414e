"""What a fit sends: the forecast, and the ledger's figures for the Trainer's loggers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import lightning.pytorch as pl

from lightning_commfree.comm.ledger import END, STEPS, Ledger
from lightning_commfree.strategies._end_of_fit import fit_is_ending


@dataclass(frozen=True)
class Traffic:
    """What one rank will send in training steps; a forecast by the ledger's formulas."""

    bytes_by_tag: Mapping[str, float]  # in a cycle, by the ledger's tags
    cycle_steps: int
    ddp_bytes_per_step: float  # what fp32 DDP would send for the same model on the same ranks

    @property
    def bytes_per_cycle(self) -> int:
        """Bytes of all tags in a cycle."""
        return round(sum(self.bytes_by_tag.values()))

    @property
    def bytes_per_step(self) -> float:
        """Mean over a cycle."""
        return self.bytes_per_cycle / self.cycle_steps


class FitLog:
    """The figures of one fit for the Trainer's loggers, in the rows of the module's own metrics.

    Those of the ledger are of training steps alone, without the start, validations, checkpoints and
    the last exchange, and means over the last whole cycles: as many as hold `log_every_n_steps`.
    Figures are made and passed on where a row is due, and after the last step, for
    `callback_metrics`: in between each would cost 0.3 ms of the host's time, and nobody would read
    it.

    Args:
        module: that is trained, with its Trainer.
        ledger: of this rank.
        ddp_bytes_per_step: what fp32 DDP would send for the same model on the same ranks.
        cycle_steps: after which the strategy sends the same again.

    Attributes:
        ddp_bytes_per_step: as given.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        ledger: Ledger,
        ddp_bytes_per_step: float,
        cycle_steps: int = 1,
    ) -> None:
        self._module, self._ledger = module, ledger
        self.ddp_bytes_per_step = ddp_bytes_per_step
        self._every: int = module.trainer.log_every_n_steps  # type: ignore[attr-defined]
        cycles = -(-max(self._every, 1) // cycle_steps)
        self._window = deque([self._sums()], maxlen=cycles * cycle_steps + 1)

    def after_step(self, more: Callable[[], Mapping[str, float]] = dict) -> None:
        """Count a step and log its figures and `more`; from within `Strategy.optimizer_step`."""
        self._ledger.phase = END  # until the next step begins
        self._window.append(self._sums())
        if self._is_due(self._module.trainer):
            for name, value in {**self._means(), **more()}.items():
                self._module.log(name, value, on_step=True, on_epoch=False)

    def _is_due(self, trainer: pl.Trainer) -> bool:
        if trainer.barebones or not self._every:
            return False
        # the Trainer has not counted this step yet
        due = (trainer.global_step + 1) % self._every == 0
        return due or fit_is_ending(trainer, in_optimizer_step=True)

    def _sums(self) -> tuple[int, float]:
        return self._ledger.bytes_in(STEPS), self._ledger.seconds_by_phase[STEPS]

    def _means(self) -> dict[str, float]:
        (bytes_before, seconds_before), (bytes_now, seconds_now) = self._window[0], self._window[-1]
        steps = len(self._window) - 1
        sent = (bytes_now - bytes_before) / steps
        figures = {
            "comm/bytes_per_step": sent,
            "comm/exposed_ms": 1e3 * (seconds_now - seconds_before) / steps,
        }
        if sent:  # a ratio to nothing says nothing
            figures["comm/compression"] = self.ddp_bytes_per_step / sent
        return figures
