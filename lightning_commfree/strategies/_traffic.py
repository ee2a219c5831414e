"""What a fit sends: the forecast, and the ledger's figures for the Trainer's loggers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import lightning.pytorch as pl

from lightning_commfree.comm.ledger import Ledger
from lightning_commfree.strategies._end_of_fit import fit_is_ending


@dataclass(frozen=True)
class Traffic:
    """What one rank will send; a forecast by the ledger's formulas."""

    bytes_per_step: float  # mean over a cycle
    bytes_per_cycle: int
    cycle_steps: int
    ddp_bytes_per_step: float  # what fp32 DDP would send for the same model on the same ranks


class FitLog:
    """The figures of one fit for the Trainer's loggers, in the rows of the module's own metrics.

    Those of the ledger are means over the last `log_every_n_steps` steps. Figures are made and
    passed on where a row is due, and after the last step, for `callback_metrics`: in between each
    would cost 0.3 ms of the host's time, and nobody would read it.

    Args:
        module: that is trained, with its Trainer.
        ledger: of this rank.
        ddp_bytes_per_step: what fp32 DDP would send for the same model on the same ranks.

    Attributes:
        ddp_bytes_per_step: as given.
    """

    def __init__(
        self, module: pl.LightningModule, ledger: Ledger, ddp_bytes_per_step: float
    ) -> None:
        self._module, self._ledger = module, ledger
        self.ddp_bytes_per_step = ddp_bytes_per_step
        self._every: int = module.trainer.log_every_n_steps  # type: ignore[attr-defined]
        self._start = ledger.totals()
        self._window = deque([self._start], maxlen=max(self._every, 1) + 1)
        self._steps = 0

    def after_step(self, more: Callable[[], Mapping[str, float]] = dict) -> None:
        """Count a step and log its figures and `more`; from within `Strategy.optimizer_step`."""
        self._steps += 1
        self._window.append(self._ledger.totals())
        if self._is_due(self._module.trainer):
            for name, value in {**self._means(), **more()}.items():
                self._module.log(name, value, on_step=True, on_epoch=False)

    def _is_due(self, trainer: pl.Trainer) -> bool:
        if trainer.barebones or not self._every:
            return False
        # the Trainer has not counted this step yet
        due = (trainer.global_step + 1) % self._every == 0
        return due or fit_is_ending(trainer, in_optimizer_step=True)

    def _means(self) -> dict[str, float]:
        first, last = self._window[0], self._window[-1]
        steps = len(self._window) - 1
        figures = {
            "comm/bytes_per_step": (last.bytes_sent - first.bytes_sent) / steps,
            "comm/exposed_ms": 1e3 * (last.seconds_waited - first.seconds_waited) / steps,
        }
        sent = last.bytes_sent - self._start.bytes_sent
        if sent:  # a ratio to nothing says nothing
            figures["comm/compression"] = self.ddp_bytes_per_step * self._steps / sent
        return figures
