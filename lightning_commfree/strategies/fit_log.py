"""The figures of a fit for the Trainer's loggers: the ledger's, and the algorithm's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl

from lightning_commfree.comm.ledger import END, Ledger, StepMeans, Traffic
from lightning_commfree.lightning_internals import Patches, add_to_rows


class FitLog:
    """The figures of one fit, in the rows that the Trainer's loggers get of the module's metrics.

    They stand in those rows alone: `callback_metrics`, `logged_metrics` and what `validate` returns
    are the user's, and a logger is called when it would be called without them. A row that follows
    another one without a step between them has none. Those of the ledger are of training steps
    alone, without the start, validations, checkpoints and the last exchange, and means over the
    last whole cycles: as many as hold `log_every_n_steps`.

    Args:
        trainer: in its fit.
        ledger: of this rank.
        traffic: the forecast: after how many steps the same is sent again, and what DDP would send.
        more: the algorithm's own figures; asked for after a step, where they are wanted.
        patches: gets what stands before Lightning's method.

    Attributes:
        traffic: as given.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        ledger: Ledger,
        traffic: Traffic,
        more: Callable[[], Mapping[str, float]],
        patches: Patches,
    ) -> None:
        self._trainer, self._ledger, self._more = trainer, ledger, more
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        self.traffic, self._means = traffic, StepMeans(ledger, traffic, max(every, 1))
        self._steps_in_rows = 0
        self._last: dict[str, float] | None = None
        add_to_rows(trainer, patches, self._more_for)

    def after_step(self) -> None:
        """Count a step; from within `Strategy.optimizer_step`."""
        self._ledger.phase = END  # until the next step begins
        self._means.after_step()

    def figures(self) -> dict[str, float]:
        """Return the figures as of now, by name; when the fit is over those that came last."""
        if self._last is not None:
            return dict(self._last)
        return {**self._means.figures(), **self._more()} if self._means.steps else {}

    def close(self) -> None:
        """End it, with the fit; the figures stay."""
        self._last, self._more = self.figures(), dict

    def _more_for(self, row: Mapping[str, Any]) -> dict[str, float]:
        """Return the figures for a row of the loggers, of whatever is trained or validated."""
        logs = self._trainer.loggers and self._trainer.training
        if not logs or self._means.steps == self._steps_in_rows:
            return {}
        self._steps_in_rows = self._means.steps
        return {name: figure for name, figure in self.figures().items() if name not in row}
