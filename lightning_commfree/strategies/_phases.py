"""In which phase of a fit the ledger counts: a step's bytes are never mixed with a start's."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from lightning_commfree.comm.ledger import START, STEPS, VALIDATION, Ledger
from lightning_commfree.strategies._naming import NamingStrategy


class CountingStrategy(NamingStrategy):
    """A strategy with a ledger, which it tells when the start, a step or a validation begins.

    A step ends in `FitLog.after_step`. What then follows and is none of these is the ledger's
    `END`: checkpoints, and the last exchange.

    Attributes:
        ledger: bytes sent by this rank, seconds waited and collectives, by tag.
    """

    ledger: Ledger
    _before_validation = START

    @override
    def setup_environment(self) -> None:
        self.ledger.phase = START
        super().setup_environment()

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.ledger.phase = STEPS
        super().on_train_batch_start(batch, batch_idx)

    @override
    def on_validation_start(self) -> None:
        self._before_validation, self.ledger.phase = self.ledger.phase, VALIDATION
        super().on_validation_start()

    @override
    def on_validation_end(self) -> None:
        super().on_validation_end()
        self.ledger.phase = self._before_validation
