"""What a fit sends: the forecast, and the ledger's figures for the Trainer's loggers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl

from lightning_commfree.comm.ledger import END, STEPS, Ledger, ring_all_reduce_bytes
from lightning_commfree.lightning_internals import add_to_rows
from lightning_commfree.patches import Patches


@dataclass(frozen=True)
class Traffic:
    """What one rank will send in training steps; a forecast by the ledger's formulas."""

    bytes_by_tag: Mapping[str, float]  # in a cycle, by the ledger's tags
    cycle_steps: int
    ddp_bytes_per_step: float  # what fp32 DDP would send for the same model on the same ranks

    @classmethod
    def of(
        cls,
        numel: int,
        world_size: int,
        bytes_by_tag: Mapping[str, float],
        cycle_steps: int,
    ) -> Traffic:
        """Return the forecast for so many trainable numbers."""
        ddp_bytes = ring_all_reduce_bytes(4 * numel, world_size)
        return cls(bytes_by_tag, cycle_steps, float(ddp_bytes))

    @property
    def bytes_per_cycle(self) -> int:
        """Bytes of all tags in a cycle."""
        return round(sum(self.bytes_by_tag.values()))

    @property
    def bytes_per_step(self) -> float:
        """Mean over a cycle."""
        return self.bytes_per_cycle / self.cycle_steps


class FitLog:
    """The figures of one fit, in the rows that the Trainer's loggers get of the module's metrics.

    They stand in those rows alone: `callback_metrics`, `logged_metrics` and what `validate` returns
    are the user's, and a logger is called when it would be called without them. A row that follows
    another one without a step between them has none. Those of the ledger are of training steps
    alone, without the start, validations, checkpoints and the last exchange, and means over the
    last whole cycles: as many as hold `log_every_n_steps`.

    Args:
        trainer: in its fit; patched until `close`.
        ledger: of this rank.
        traffic: the forecast: after how many steps the same is sent again, and what DDP would send.
        more: the algorithm's own figures; asked for after a step, where they are wanted.

    Attributes:
        traffic: as given.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        ledger: Ledger,
        traffic: Traffic,
        more: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self._trainer, self._ledger, self._more = trainer, ledger, more
        self.traffic, cycle_steps = traffic, traffic.cycle_steps
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        cycles = -(-max(every, 1) // cycle_steps)
        self._window = deque([self._sums()], maxlen=cycles * cycle_steps + 1)
        self._steps = self._steps_in_rows = 0
        self._latest: dict[str, float] = {}
        self._runs = True
        self._patches = Patches()
        add_to_rows(trainer, self._patches, self._more_for)

    def after_step(self) -> None:
        """Count a step; from within `Strategy.optimizer_step`."""
        self._ledger.phase = END  # until the next step begins
        self._steps += 1
        self._window.append(self._sums())

    def figures(self) -> dict[str, float]:
        """Return the figures as of now, by name; when the fit is over those that came last."""
        if self._runs and self._steps:
            self._latest = {**self._means(), **self._more()}
        return dict(self._latest)

    def close(self) -> None:
        """End it, with the fit; the figures stay."""
        self.figures()
        self._runs, self._more = False, dict
        self._patches.remove()

    def _more_for(self, row: Mapping[str, Any]) -> dict[str, float]:
        """Return the figures for a row of the loggers, of whatever is trained or validated."""
        logs = self._trainer.loggers and self._trainer.training
        if not logs or self._steps == self._steps_in_rows:
            return {}
        self._steps_in_rows = self._steps
        return {name: figure for name, figure in self.figures().items() if name not in row}

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
            figures["comm/compression"] = self.traffic.ddp_bytes_per_step / sent
        return figures
