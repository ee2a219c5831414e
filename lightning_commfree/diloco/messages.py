"""Messages for the user about the exchange schedule."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from lightning_commfree.comm.text import counted
from lightning_commfree.diloco.schedule import Schedule
from lightning_commfree.diloco.settings import AUTO_BEGINS, DiLoCoSettings, is_single_fragment

_ONE_FRAGMENT = (
    "No list of equal modules (transformer blocks) was found, so the whole model is one fragment,"
    " which is sent in one piece every `sync_every` steps. `fragment_pattern='balanced'` splits it"
    " into several fragments of about equal size, which are sent one after the other."
)
_SINGLE_REPLICA = (
    "There is only one replica, so nothing is exchanged: the outer optimizer turns the inner one"
    " into a look-ahead optimizer. For more replicas, give the Trainer more ranks (`devices=`,"
    " `num_nodes=`) than `replica_size`."
)
_AUTO = (
    "`sync_every='auto'` exchanges each fragment every {} steps at first, and then as often as the"
    " link hides: each change is logged."
)
# Per fragment in a fit; warn if there are fewer. With two replicas, fits of 7 to 18 exchanges ended
# 3 to 10 % above data parallelism's loss (`benchmarks/size_ladder/result.md`).
_MIN_EXCHANGES = 20


class Message(NamedTuple):
    """A message for the user: a hint or a warning."""

    text: str
    warns: bool


def startup_messages(
    module: nn.Module,
    settings: DiLoCoSettings,
    schedule: Schedule,
    num_replicas: int,
    last_step: int | None,  # of the fit, counting earlier runs; None if unknown
) -> list[Message]:
    """Return the messages to show when a fit begins."""
    if num_replicas == 1:
        return [Message(_SINGLE_REPLICA, warns=False)]
    messages = []
    if is_single_fragment(module, settings):
        messages.append(Message(_ONE_FRAGMENT, warns=False))
    if settings.is_auto:
        messages.append(Message(_AUTO.format(schedule.sync_every), warns=False))
    if last_step is not None:
        count = _exchange_count_message(settings, schedule, last_step)
        if count.warns or not settings.is_auto:  # "auto" may exchange less often later
            messages.append(count)
    return messages


def _exchange_count_message(
    settings: DiLoCoSettings, schedule: Schedule, last_step: int
) -> Message:
    """Return a message with the number of exchanges in a fit; if it is low, a warning."""
    counts = [schedule.launches_until(p, last_step) for p in range(schedule.num_fragments)]
    least = f"{min(counts)} to " if max(counts) > min(counts) else ""
    whole = len(counts) == 1
    report = (
        f"Within {counted(last_step, 'step')}"
        f" {'the only fragment' if whole else f'each of the {len(counts)} fragments'} is exchanged"
        f" {least}{counted(max(counts), 'time')} (`sync_every={settings.sync_every!r}`), and"
        f" {'' if whole else 'all of them '}once more when the fit ends"
    )
    if min(counts) >= _MIN_EXCHANGES:
        return Message(f"{report}.", warns=False)

    cycles = _MIN_EXCHANGES + 1  # a fragment is first launched in the second cycle
    at_least = counted(cycles * schedule.sync_every, "step")
    # below AUTO_BEGINS, losses were not lower
    shorter = max(last_step // cycles, AUTO_BEGINS, schedule.overlap_steps + 1)
    change = f", or set `sync_every={shorter}`" if shorter < schedule.sync_every else ""
    until_then = (
        " Until a fragment first lands, validations use its initial weights."
        if settings.evaluate == "outer"
        else ""
    )
    text = (
        f"{report}. With fewer than {_MIN_EXCHANGES} exchanges, expect a loss well above that of"
        f" data parallelism. Train for at least {at_least}{change}.{until_then}"
    )
    return Message(text, warns=True)


def initial_weights_warning(
    what: str,  # the operation that uses the outer weights, "validation" or "checkpoint"
    schedule: Schedule,
    step: int,
    count: int,  # fragments that have not landed yet
) -> str:
    """Return a warning's text: the outer weights are still partly the initial weights."""
    return (
        f"This {what} uses the outer weights, but after {step} inner steps {count} of"
        f" {schedule.total} fragments still have the weights with which the fit began. With"
        f" `sync_every={schedule.sync_every}` and `overlap_steps={schedule.overlap_steps}` every"
        f" fragment has landed once after step {schedule.complete_after}."
    )
