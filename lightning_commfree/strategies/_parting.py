"""The data or the will of one rank ends, and those of the others do not: what is said and done."""

from __future__ import annotations

import warnings
from collections import defaultdict
from typing import NamedTuple

import lightning.pytorch as pl
import torch

from lightning_commfree.comm.channel import Channel
from lightning_commfree.strategies._common_end import (
    DATA,
    GOES_ON,
    MAX_STEPS,
    TAG,
    WHY,
    WILL,
    named_ranks,
)
from lightning_commfree.strategies._meeting import Stage


def why_it_ends(trainer: pl.Trainer) -> int:
    """Return by what a fit that ends does so."""
    if trainer.fit_loop.epoch_loop._num_ready_batches_reached():
        return DATA
    return WILL if trainer.should_stop else MAX_STEPS


APART = 1 + max(WHY)
_WHY = {**WHY, APART: "{ranks} waited at the end of an epoch, a validation or a checkpoint"}


class Part(NamedTuple):
    """How this rank's training has ended."""

    why: int  # a number of `_common_end`, or `APART`; `GOES_ON`: it had not
    step: int  # after which
    stage: Stage  # of its last step


def part(trainer: pl.Trainer, channel: Channel, mine: Part, common: int) -> Stage:
    """End the fit on all ranks after the step that runs, and say on each of them why.

    Collective over the world, after the last exchange.

    Args:
        trainer: in its fit.
        channel: over the world.
        mine: of this rank.
        common: the step after which all end.

    Returns:
        The first stage to which all ranks come from where they are.

    Raises:
        RuntimeError: `min_epochs` or `min_steps` forbids to end here; on all ranks alike.
    """
    loop = trainer.fit_loop
    refused = mine.why in (GOES_ON, APART) and not loop._can_stop_early
    row = torch.tensor([*mine, refused], device=channel.device)
    told = channel.all_gather(row, TAG).wait().tolist()
    ranks = defaultdict(list)
    for rank, (reason, after, *_) in enumerate(told):
        ranks[reason, after if reason != GOES_ON else -1].append(rank)
    others = ranks.pop((GOES_ON, -1), [])
    said = "; ".join(
        f"{_WHY[reason].format(ranks=named_ranks(some))} after step {after}"
        for (reason, after), some in sorted(ranks.items(), key=lambda entry: entry[0][1])
    )
    if others:
        said += f", and {named_ranks(others)} would have gone on"
    if any(refuses for *_, refuses in told):
        raise RuntimeError(
            f"{said}. The fit cannot end here, for `min_epochs={loop.min_epochs}` and"
            f" `min_steps={loop.min_steps}`. Give all ranks equally many batches, as with"
            " `limit_train_batches`, or leave these out."
        )
    warnings.warn(
        f"{said}. All ranks end the fit when they learn of it, after step {common}, with the mean"
        " of all replicas' weights. For a fit that goes on, give all ranks equally many batches,"
        " as with `limit_train_batches`, and let all of them decide alike when to stop.",
        stacklevel=2,
    )
    trainer.should_stop = True
    return Stage(max(stage for _, _, stage, _ in told))
