"""Where a strategy's figures go: into the rows that the loggers get anyway, and nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_commfree import DistributedLionStrategy, StreamingDiLoCoStrategy
from tests.strategies.models import Tiny, Voter, loader
from tests.world import run_ranks


class Rows(DummyLogger):
    """Keeps what is written, call by call and by step."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int | None, set[str]]] = []
        self.rows: dict[int | None, dict[str, float]] = {}

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:  # type: ignore[override]
        self.calls.append((step, {name for name in metrics if "/" not in name}))
        self.rows[step] = {name: value for name, value in metrics.items() if "/" in name}


def logging_trainer(rows: Rows, **arguments: Any) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        devices=arguments.pop("devices", 1),
        logger=rows,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **arguments,
    )


class Epochs(Tiny):
    """Logs per step and per epoch, in training and validation."""

    def training_step(self, batch: Any, index: int) -> Any:
        loss = super().training_step(batch, index)
        self.log("both", loss, on_step=True, on_epoch=True)
        return loss


class VotingEpochs(Epochs, Voter):
    pass


def rows_of(rank: int, size: int) -> Any:
    """Return what loggers get and what the Trainer holds, with our strategies and without."""
    outcomes = {}
    for name, strategy, module in (
        ("ddp", "ddp", Epochs()),
        ("diloco", StreamingDiLoCoStrategy(sync_every=4, num_fragments=2), Epochs()),
        ("lion", DistributedLionStrategy(), VotingEpochs()),
    ):
        rows = Rows()
        trainer = logging_trainer(
            rows, devices=size, strategy=strategy, log_every_n_steps=3, max_epochs=2
        )
        trainer.fit(module, loader(40), loader(8))
        held = {"callback": set(trainer.callback_metrics), "logged": set(trainer.logged_metrics)}
        figures = {} if name == "ddp" else strategy.figures()  # type: ignore[attr-defined]
        validated = trainer.validate(module, loader(8), verbose=False)
        outcomes[name] = (rows.calls, rows.rows, held, [set(row) for row in validated], figures)
    return outcomes


def test_loggers_get_the_same_calls_as_under_ddp_and_rows_have_our_figures(tmp_path: Path) -> None:
    torch.compile(torch.nn.Linear(1, 1))  # imports for seconds: here, and not on every rank
    outcomes, _ = run_ranks(rows_of, 2, tmp_path)
    calls, _, held, validated, _ = outcomes["ddp"]
    assert calls
    for name in ("diloco", "lion"):
        our_calls, rows, ours, ours_validated, figures = outcomes[name]
        assert our_calls == calls, "no call of the loggers is ours"
        assert ours == held
        assert ours_validated == validated
        assert figures["comm/bytes_per_step"] > 0
        filled = [step for step, row in rows.items() if "comm/bytes_per_step" in row]
        assert filled[:3] == [2, 5, 8]
