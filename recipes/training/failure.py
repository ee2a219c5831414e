"""Failed fits: keep their results and explain the failure."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import lightning.pytorch as pl

from recipes.training.progress import History


def on_error(trainer: pl.Trainer, then: Callable[[Exception], None]) -> None:
    """Call `then` with an error that ends the fit, in the training process; then raise it again.

    Lightning calls `Callback.on_exception` only in the launching process if it has forked or
    spawned the ranks, but only the training process has the history and the ledger.

    Args:
        trainer: in the training process, before its fit loop runs.
        then: must not communicate, because other ranks may be dead.
    """
    run = trainer.fit_loop.run

    def run_and_report() -> None:
        try:
            run()
        except Exception as error:
            then(error)
            raise

    trainer.fit_loop.run = run_and_report  # type: ignore[method-assign]


def diverged(loss: float, history: History, run_dir: Path) -> str | None:
    """Describe a run whose final loss is not finite; return None if it is finite.

    Args:
        loss: of the validation after training.
        history: of the run.
        run_dir: its folder.
    """
    if math.isfinite(loss):
        return None
    recorded = zip(history.steps, history.train_loss, strict=True)
    first = next((step for step, value in recorded if not math.isfinite(value)), None)
    since = "" if first is None else f", and rank 0's training loss is not finite at step {first}"
    return (
        f"The run has diverged: the validation loss of its trained weights is {loss}{since}. No"
        " text was generated and no model exported. Lower optimizer.lr, lengthen"
        " optimizer.warmup_steps or clip gradients (trainer.gradient_clip_val=1.0); checkpoints and"
        f" figures are in {run_dir}."
    )
