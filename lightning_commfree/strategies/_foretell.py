"""What a DiLoCo fit says at its start: how often its fragments will be exchanged."""

from __future__ import annotations

import math

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_commfree.diloco import StreamingDiLoCo, cuts_whole

_ENOUGH = 5  # exchanges of a fragment


def foretell(trainer: pl.Trainer, diloco: StreamingDiLoCo) -> None:
    """Say how often a fragment leaves in this fit, and where that is rare what to change.

    Args:
        trainer: in `Strategy.on_train_start`; its loaders are there.
        diloco: as it begins, or goes on.
    """
    assert trainer.lightning_module is not None, "a fit has one"
    settings, schedule = diloco.settings, diloco.schedule
    if cuts_whole(trainer.lightning_module, settings):
        rank_zero_info(
            "No list of equal modules (transformer blocks) was found, so the whole model is one"
            " fragment, which leaves at once every `sync_every` steps."
            " `fragment_pattern='balanced'` cuts it into several of equal bytes, which leave one"
            " after the other."
        )
    steps = _steps_to_come(trainer)
    if steps is None:
        return
    last = diloco.step + steps
    counts = [schedule.launches_until(p, last) for p in range(schedule.num_fragments)]
    often = f"{min(counts)}" + (f" to {max(counts)}" if max(counts) > min(counts) else "")
    said = (
        f"Within {last} optimizer steps each of the {len(counts)} fragments is exchanged {often}"
        f" times (`sync_every={settings.sync_every}`), and all of them once more when the fit ends"
    )
    if min(counts) >= _ENOUGH or diloco.num_replicas == 1:
        rank_zero_info(f"{said}.")
        return
    advised = last // (_ENOUGH + 1)
    advice = (
        f"Take `sync_every={advised}`."
        if advised > (0 if settings.eager else int(settings.overlap_steps))
        else "The fit is too short for more."
    )
    rank_zero_warn(
        f"{said}: the replicas train apart for most of the fit, and until its first landing a"
        f" validation sees a fragment as it was at the start, unless `evaluate='mean'`. {advice}"
    )


def _steps_to_come(trainer: pl.Trainer) -> int | None:
    """Return how many optimizer steps this fit takes; None where nobody knows."""
    total = trainer.estimated_stepping_batches
    if not math.isfinite(total) or total < 0:
        return None
    return max(int(total) - trainer.global_step, 0)
