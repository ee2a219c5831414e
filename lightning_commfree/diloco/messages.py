"""User messages about the exchange schedule: too few exchanges, one fragment, one replica."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from lightning_commfree.diloco.schedule import Schedule
from lightning_commfree.diloco.settings import DiLoCoSettings, cuts_whole

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
_ENOUGH = 5  # exchanges of a fragment in a fit


class Message(NamedTuple):
    """A message, and whether it is a warning."""

    text: str
    warns: bool


def startup_messages(
    module: nn.Module,
    settings: DiLoCoSettings,
    schedule: Schedule,
    num_replicas: int,
    last_step: int | None,
) -> list[Message]:
    """Return what to tell the user when a fit begins.

    Args:
        module: the model.
        settings: of the fit.
        schedule: of its fragments.
        num_replicas: M.
        last_step: inner step after which the fit ends, counted from its first start; None: unknown.
    """
    if num_replicas == 1:
        return [Message(_ALONE, warns=False)]
    messages = []
    if cuts_whole(module, settings):
        messages.append(Message(_ONE_FRAGMENT, warns=False))
    if last_step is not None:
        messages.append(_exchange_count(settings, schedule, last_step))
    return messages


def _exchange_count(settings: DiLoCoSettings, schedule: Schedule, last_step: int) -> Message:
    """Say how often a fragment is exchanged, and advise a smaller `sync_every` if that is rare."""
    counts = [schedule.launches_until(p, last_step) for p in range(schedule.num_fragments)]
    often = f"{min(counts)}" + (f" to {max(counts)}" if max(counts) > min(counts) else "")
    said = (
        f"Within {last_step} steps each of the {len(counts)} fragments is exchanged"
        f" {often} times (`sync_every={settings.sync_every}`), and all of them once more when the"
        " fit ends"
    )
    if min(counts) >= _ENOUGH:
        return Message(f"{said}.", warns=False)

    advised = last_step // (_ENOUGH + 1)
    advice = (
        f"Take `sync_every={advised}`."
        if advised > settings.overlap_steps
        else "The fit is too short for more."
    )
    text = (
        f"{said}: the replicas train apart for most of the fit, and until its first landing a"
        f" validation sees a fragment as it was at the start, unless `evaluate='mean'`. {advice}"
    )
    return Message(text, warns=True)


def initial_weights_warning(
    what: str, settings: DiLoCoSettings, schedule: Schedule, step: int, count: int
) -> str:
    """Return a warning that outer weights are still the initial ones.

    Args:
        what: uses them: a validation or a checkpoint.
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
