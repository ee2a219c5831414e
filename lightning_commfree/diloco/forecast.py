"""What a fit says of exchanges: how many will come, and which weights none has moved yet."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from lightning_commfree.diloco.schedule import Schedule
from lightning_commfree.diloco.settings import DiLoCoSettings, cuts_whole

if TYPE_CHECKING:
    from lightning_commfree.diloco.streaming import StreamingDiLoCo

_ONE_FRAGMENT = (
    "No list of equal modules (transformer blocks) was found, so the whole model is one"
    " fragment, which leaves at once every `sync_every` steps."
    " `fragment_pattern='balanced'` cuts it into several of equal bytes, which leave one"
    " after the other."
)
_ALONE = (
    "There is one replica, so nothing is exchanged: the outer optimizer makes of the inner one a"
    " look-ahead optimizer. If more replicas were meant, ask the Trainer for more ranks"
    " (`devices=`, `num_nodes=`) than `replica_size` has."
)
_ENOUGH = 5  # exchanges of a fragment


class Forecast(NamedTuple):
    """What to say, and whether it is a warning: the exchanges are too few."""

    text: str
    warns: bool


def forecast_exchanges(settings: DiLoCoSettings, schedule: Schedule, last_step: int) -> Forecast:
    """Return how often a fragment leaves in a fit, and where that is rare what to change.

    Args:
        settings: of the fit.
        schedule: of its fragments.
        last_step: the inner step after which the fit ends, counted from its first start.
    """
    counts = [schedule.launches_until(p, last_step) for p in range(schedule.num_fragments)]
    often = f"{min(counts)}" + (f" to {max(counts)}" if max(counts) > min(counts) else "")
    said = (
        f"Within {last_step} optimizer steps each of the {len(counts)} fragments is exchanged"
        f" {often} times (`sync_every={settings.sync_every}`), and all of them once more when the"
        " fit ends"
    )
    if min(counts) >= _ENOUGH:
        return Forecast(f"{said}.", warns=False)

    advised = last_step // (_ENOUGH + 1)
    advice = (
        f"Take `sync_every={advised}`."
        if advised > (0 if settings.eager else int(settings.overlap_steps))
        else "The fit is too short for more."
    )
    text = (
        f"{said}: the replicas train apart for most of the fit, and until its first landing a"
        f" validation sees a fragment as it was at the start, unless `evaluate='mean'`. {advice}"
    )
    return Forecast(text, warns=True)


def foretold(diloco: StreamingDiLoCo, module: nn.Module, steps: int | None) -> list[Forecast]:
    """Return what to say at the start of a fit.

    Args:
        diloco: as it begins, or goes on.
        module: that is trained.
        steps: inner steps to come; None: nobody knows.
    """
    if diloco.num_replicas == 1:
        return [Forecast(_ALONE, warns=False)]
    said = []
    if cuts_whole(module, diloco.settings):
        said.append(Forecast(_ONE_FRAGMENT, warns=False))
    if steps is not None:
        last_step = diloco.step + steps
        said.append(forecast_exchanges(diloco.settings, diloco.schedule, last_step))
    return said


def unready_weights(
    what: str, settings: DiLoCoSettings, schedule: Schedule, step: int, count: int
) -> str:
    """Return what to say of outer weights that nothing has moved yet.

    Args:
        what: uses them.
        settings: of the fit.
        schedule: of its fragments.
        step: inner steps done.
        count: how many fragments have not landed yet.
    """
    return (
        f"This {what} uses the outer weights, and after {step} inner steps those of"
        f" {count} of {schedule.total} fragments are still those with which the fit began."
        f" With `sync_every={settings.sync_every}` and"
        f" `overlap_steps={settings.overlap_steps}` every fragment has landed once after"
        f" step {schedule.complete_after}. `evaluate='mean'` takes the mean of the"
        " replicas' local weights."
    )
