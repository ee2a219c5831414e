"""When a strategy's figures reach the Trainer: where a row is due, and after the last step."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_commfree.comm.ledger import STEPS, Ledger
from lightning_commfree.strategies._traffic import FitLog
from tests.strategies.models import Tiny, loader

BYTES = 30.0  # that DDP would send in a step; ours sends 10


class Rows(DummyLogger):
    """Keeps what is written, by step."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int | None, dict[str, float]] = {}

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:  # type: ignore[override]
        self.rows[step] = {name: value for name, value in metrics.items() if "/" in name}


class Logging(Tiny):
    """Calls the log as a strategy does, before the Trainer counts the step."""

    def __init__(self, cycle_steps: int) -> None:
        super().__init__()
        self.steps, self.cycle_steps = 0, cycle_steps
        self.asked: list[int] = []  # after which steps the algorithm's figures were wanted

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.ledger.count_sent("besides", 10_000)  # a validation's, say: not a step's
        self.ledger.phase = STEPS

    def on_fit_start(self) -> None:
        self.ledger = Ledger()
        self.fit_log = FitLog(self, self.ledger, BYTES, self.cycle_steps)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.steps += 1
        self.ledger.count_sent("test", 10 * self.steps)
        self.fit_log.after_step(self.more)

    def more(self) -> dict[str, float]:
        self.asked.append(self.steps)
        return {"own/step": float(self.steps)}


def fit(every: int, cycle_steps: int = 1, **arguments: Any) -> tuple[Logging, Rows, pl.Trainer]:
    torch.manual_seed(0)
    module, rows = Logging(cycle_steps), Rows()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        logger=rows,
        log_every_n_steps=every,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **arguments,
    )
    trainer.fit(module, loader(20))
    return module, rows, trainer


def test_figures_come_with_the_rows_and_after_the_last_step() -> None:
    module, rows, trainer = fit(5, max_steps=12)
    assert module.asked == [5, 10, 12]
    # Lightning counts rows from 0; a mean is over the last 5 steps, and step s sends 10 s
    assert rows.rows[4]["own/step"] == 5
    assert rows.rows[4]["comm/bytes_per_step"] == 10 * (1 + 2 + 3 + 4 + 5) / 5
    assert rows.rows[9]["comm/bytes_per_step"] == 10 * (6 + 7 + 8 + 9 + 10) / 5
    assert rows.rows[9]["comm/compression"] == pytest.approx(BYTES * 5 / (6 + 7 + 8 + 9 + 10) / 10)
    assert trainer.callback_metrics["own/step"] == 12
    assert trainer.callback_metrics["comm/exposed_ms"] == 0


@pytest.mark.parametrize(("cycle_steps", "window"), [(2, 6), (4, 8), (7, 7)])
def test_means_are_over_whole_cycles(cycle_steps: int, window: int) -> None:
    """As many cycles as hold the 5 steps between two rows: in no step something else is sent."""
    _, rows, _ = fit(5, cycle_steps, max_steps=10)
    sent = sum(range(10 - window + 1, 11))
    assert rows.rows[9]["comm/bytes_per_step"] == pytest.approx(10 * sent / window)


def test_a_fit_shorter_than_a_row_still_ends_with_its_figures() -> None:
    module, rows, trainer = fit(50, max_epochs=1)
    assert module.asked == [10]
    assert not any(rows.rows.values())
    assert trainer.callback_metrics["own/step"] == 10


def test_without_rows_nobody_asks() -> None:
    module, _, trainer = fit(0, max_steps=12)
    assert (module.asked, "own/step" in trainer.callback_metrics) == ([], False)
