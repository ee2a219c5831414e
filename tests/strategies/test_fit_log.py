"""Where a strategy's figures go: into the rows that the loggers get anyway, and nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_commfree import DistributedLion, DistributedLionStrategy, StreamingDiLoCoStrategy
from lightning_commfree.comm.ledger import STEPS, Ledger, Traffic
from lightning_commfree.lightning_internals import Patches
from lightning_commfree.strategies.fit_session import FitLog
from tests.strategies.models import Tiny, loader
from tests.world import run_ranks

BYTES = 30.0  # that DDP would send in a step; ours sends 10


class Rows(DummyLogger):
    """Keeps what is written, call by call and by step."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int | None, set[str]]] = []
        self.rows: dict[int | None, dict[str, float]] = {}

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:  # type: ignore[override]
        self.calls.append((step, {name for name in metrics if "/" not in name}))
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
        traffic = Traffic({}, self.cycle_steps, BYTES)
        self.fit_log = FitLog(self.trainer, self.ledger, traffic, self.more, Patches())

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.steps += 1
        self.ledger.count_sent("test", 10 * self.steps)
        self.fit_log.after_step()

    def more(self) -> dict[str, float]:
        self.asked.append(self.steps)
        return {"own/step": float(self.steps)}


def fit(every: int, cycle_steps: int = 1, **arguments: Any) -> tuple[Logging, Rows, pl.Trainer]:
    torch.manual_seed(0)
    module, rows = Logging(cycle_steps), Rows()
    trainer = logging_trainer(rows, log_every_n_steps=every, **arguments)
    trainer.fit(module, loader(20))
    return module, rows, trainer


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


def test_figures_come_with_the_rows_and_in_the_end() -> None:
    module, rows, _ = fit(5, max_steps=12)
    assert module.asked == [5, 10]
    # Lightning counts rows from 0; a mean is over the last 5 steps, and step s sends 10 s
    assert rows.rows[4]["own/step"] == 5
    assert rows.rows[4]["comm/bytes_per_step"] == 10 * (1 + 2 + 3 + 4 + 5) / 5
    assert rows.rows[9]["comm/bytes_per_step"] == 10 * (6 + 7 + 8 + 9 + 10) / 5
    assert rows.rows[9]["comm/compression"] == pytest.approx(BYTES * 5 / (6 + 7 + 8 + 9 + 10) / 10)
    assert module.fit_log.figures()["own/step"] == 12
    module.fit_log.close()
    module.steps = 99
    assert module.fit_log.figures()["own/step"] == 12, "a fit that is over has its last ones"


@pytest.mark.parametrize(("cycle_steps", "window"), [(2, 6), (4, 8), (7, 7)])
def test_means_are_over_whole_cycles(cycle_steps: int, window: int) -> None:
    """As many cycles as hold the 5 steps between two rows: in no step something else is sent."""
    _, rows, _ = fit(5, cycle_steps, max_steps=10)
    sent = sum(range(10 - window + 1, 11))
    assert rows.rows[9]["comm/bytes_per_step"] == pytest.approx(10 * sent / window)


def test_the_users_own_metrics_stay_the_users_own() -> None:
    _, rows, trainer = fit(5, max_steps=12)
    for metrics in (trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics):
        assert not [name for name in metrics if "/" in name]
    assert [step for step, _ in rows.calls] == [4, 9]


def test_a_fit_without_rows_has_figures_for_who_asks() -> None:
    for every, arguments in ((50, {"max_epochs": 1}), (0, {"max_steps": 10})):
        module, rows, _ = fit(every, **arguments)
        assert (rows.calls, module.asked) == ([], [])
        assert module.fit_log.figures()["own/step"] == 10


class Voter(Tiny):
    def configure_optimizers(self) -> Any:
        return DistributedLion(self.parameters(), lr=1e-3)


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


def test_loggers_are_called_as_without_us_and_rows_have_our_figures(tmp_path: Path) -> None:
    torch.compile(torch.nn.Linear(1, 1))  # imports for seconds: here, and not on every rank
    outcomes, _ = run_ranks(rows_of, 2, tmp_path)
    calls, _, held, validated, _ = outcomes["ddp"]
    assert calls
    for name in ("diloco", "lion"):
        our_calls, rows, ours, ours_validated, figures = outcomes[name]
        assert our_calls == calls
        assert ours == held
        assert ours_validated == validated
        assert figures["comm/bytes_per_step"] > 0
        filled = [step for step, row in rows.items() if "comm/bytes_per_step" in row]
        assert filled[:3] == [2, 5, 8]
