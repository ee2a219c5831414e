"""Where a strategy's figures go: into the rows that the loggers get anyway, and nowhere else."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_commfree import DistributedLionStrategy, StreamingDiLoCoStrategy
from lightning_commfree.comm.text import human_bytes
from tests.fit.models import Tiny, Voter, loader
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


def summaries(rank: int, size: int) -> Any:
    """Return what the end of a fit says, and what it should have counted, for several fits."""
    said: dict[str, list[str]] = {}
    sent: dict[str, tuple[int, float]] = {}
    with pytest.MonkeyPatch.context() as patch:
        for name, devices, level, more in (
            ("fit", size, logging.NOTSET, {}),
            ("replica of two", size, logging.NOTSET, {}),
            ("one step", size, logging.NOTSET, {"max_steps": 1}),
            ("quiet", size, logging.WARNING, {}),
            ("fast_dev_run", size, logging.NOTSET, {"fast_dev_run": 2}),
        ):
            patch.setattr(logging.getLogger("lightning_commfree"), "level", level)
            place = "lightning_commfree.fit.base.rank_zero_info"
            patch.setattr(place, said.setdefault(name, []).append)
            replica = 2 if name == "replica of two" else 1
            strategy = StreamingDiLoCoStrategy(sync_every=4, replica_size=replica, evaluate="outer")
            trainer = logging_trainer(
                Rows(), devices=devices, strategy=strategy, **{"max_steps": 20, **more}
            )
            module = Epochs()
            trainer.fit(module, loader(40), loader(8))
            phases = strategy.ledger.bytes_by_phase
            counted = sum(phases["steps"].values()) + sum(phases["end"].values())
            sent[name] = counted, strategy.traffic().ddp_bytes_per_step
            trainer.validate(module, loader(8), verbose=False)
    return said, sent


def test_a_fit_ends_with_a_line_that_a_logging_level_turns_off(tmp_path: Path) -> None:
    (said, sent), (_, _) = run_ranks(summaries, 2, tmp_path)
    counted, ddp = sent["fit"]
    (line,) = said["fit"]
    assert line.startswith(f"Trained 20 steps. Rank 0 sent {human_bytes(counted)} (fp32 DDP would")
    assert f"have sent {human_bytes(20 * ddp)}, {ddp * 20 / counted:.3g} times as much)" in line
    assert line.endswith(" s for communication.")
    assert said["one step"][0].startswith("Trained 1 step. Rank 0 sent ")
    assert "sent 0 B to other replicas (fp32 DDP would" in said["replica of two"][0]
    assert said["quiet"] == []
    assert said["fast_dev_run"] == []
