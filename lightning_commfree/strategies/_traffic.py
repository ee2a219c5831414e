"""What a fit sends: the forecast, and the ledger's figures for the Trainer's loggers."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import lightning.pytorch as pl

from lightning_commfree.comm.ledger import Ledger


@dataclass(frozen=True)
class Traffic:
    """What one rank will send; a forecast by the ledger's formulas."""

    bytes_per_step: float  # mean over a cycle
    bytes_per_cycle: int
    cycle_steps: int
    ddp_bytes_per_step: float  # what fp32 DDP would send for the same model on the same ranks


def log_figures(module: pl.LightningModule, figures: Mapping[str, float]) -> None:
    """Log a step's figures through the Trainer's loggers, in the row of the module's own metrics.

    Lightning writes them when a row is due.
    """
    if not module.trainer.barebones:
        for name, value in figures.items():
            module.log(name, value, on_step=True, on_epoch=False)


class FitLog:
    """The ledger's figures of one fit, as means over the last `window_steps` steps.

    Attributes:
        ddp_bytes_per_step: what fp32 DDP would send for the same model on the same ranks.
    """

    def __init__(self, ledger: Ledger, ddp_bytes_per_step: float, window_steps: int) -> None:
        self._ledger = ledger
        self.ddp_bytes_per_step = ddp_bytes_per_step
        self._start = ledger.totals()
        self._window = deque([self._start], maxlen=max(window_steps, 1) + 1)
        self._steps = 0

    def after_step(self) -> dict[str, float]:
        """Count a step and return the figures by name."""
        self._steps += 1
        self._window.append(self._ledger.totals())
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
