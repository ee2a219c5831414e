"""What a DiLoCo fit says at its start: how often its fragments will be exchanged."""

from __future__ import annotations

import math

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_commfree.diloco import StreamingDiLoCo, cuts_whole
from lightning_commfree.diloco.forecast import ALONE, ONE_FRAGMENT, forecast_exchanges


def foretell(trainer: pl.Trainer, diloco: StreamingDiLoCo) -> None:
    """Say how often a fragment leaves in this fit, and where that is rare what to change.

    Args:
        trainer: in `Strategy.on_train_start`; its loaders are there.
        diloco: as it begins, or goes on.
    """
    if diloco.num_replicas == 1:
        rank_zero_info(ALONE)
        return

    assert trainer.lightning_module is not None, "a fit has one"
    if cuts_whole(trainer.lightning_module, diloco.settings):
        rank_zero_info(ONE_FRAGMENT)

    steps = _steps_to_come(trainer)
    if steps is not None:
        last_step = diloco.step + steps
        text, warns = forecast_exchanges(diloco.settings, diloco.schedule, last_step)
        rank_zero_warn(text) if warns else rank_zero_info(text)


def _steps_to_come(trainer: pl.Trainer) -> int | None:
    """Return how many optimizer steps this fit takes; None where nobody knows."""
    total = trainer.estimated_stepping_batches
    if not math.isfinite(total) or total < 0:
        return None
    return max(int(total) - trainer.global_step, 0)
