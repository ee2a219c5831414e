"""Exact resume where ranks share one model: what only one rank knows, in the checkpoint itself.

Weights and optimizer state of tensor-parallel ranks are put together in a checkpoint, whole. What
is left to each rank is small: its random numbers and the place of its data. That is gathered on
rank 0, some 40 kB a rank, so that a checkpoint stays one file, to be copied and loaded anywhere:

=========================  ==========================  ============================================
resumed on                 place in the data           random numbers
=========================  ==========================  ============================================
the same ranks             as it was                   as they were: every later weight is equal
other tensor groups, as    as it was                   those that a group shares as they were; a
many of them                                           rank's own, of attention's dropout, are new
more or fewer groups       the epoch's first batches   new
=========================  ==========================  ============================================

Gradients of a half-accumulated step are not kept.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_commfree.comm.channel import Channel
from lightning_commfree.domino import ParallelModel
from lightning_commfree.resume.epoch_start import EpochStart
from lightning_commfree.resume.loops import restore_loops
from lightning_commfree.resume.position import Data, loadable, loop_state, restore_place
from lightning_commfree.resume.random_state import random_state

KEY = "lightning_commfree_domino"  # of a checkpoint's entry
TAG = "rank_states"


@dataclass(frozen=True)
class Layout:
    """The ranks of a job in groups of consecutive ones, and where this rank is among them."""

    ranks: int
    group_size: int
    rank: int

    @property
    def groups(self) -> int:
        """Number of groups."""
        return self.ranks // self.group_size


@dataclass(frozen=True)
class Found:
    """What a rank goes on with.

    Attributes:
        state: what `rank_state` returned at the save; None for a fresh start.
        exact: it was this rank's own, with the same settings.
        said: why the fit does not go on exactly, and with what; empty if it does.
    """

    state: dict[str, Any] | None
    said: str = ""

    @property
    def exact(self) -> bool:
        """Whether all random numbers are this rank's own."""
        return self.state is not None and "own" in self.state


def rank_state(
    models: Sequence[ParallelModel],
    checkpoint: Mapping[str, Any],
    device: torch.device,
    epoch_start: EpochStart,
) -> dict[str, Any]:
    """Return what only this rank knows.

    Args:
        models: the divided ones.
        checkpoint: as Lightning dumps it on this rank, with the states of this rank's loaders.
        device: where the models are.
        epoch_start: of the Trainer.
    """
    loaders = loop_state(checkpoint).get("combined_loader")
    return {
        "random": random_state(device),
        "epoch_start": epoch_start.state_dict(),
        "own": [model.group.own_state() for model in models],
        "loaders": loadable(loaders, "a training data loader"),
    }


def add_entry(
    checkpoint: dict[str, Any],
    channel: Channel,
    layout: Layout,
    settings: Mapping[str, str],
    state: dict[str, Any],
) -> None:
    """Put the states of all ranks into a checkpoint; collective over the world.

    Raises:
        pickle.UnpicklingError: what a rank sent is more than tensors and plain values.
    """
    checkpoint[KEY] = {
        "ranks": layout.ranks,
        "group_size": layout.group_size,
        "settings": dict(settings),
        "states": _gather(channel, state, keep=layout.rank == 0),
    }


def find_state(checkpoint: Mapping[str, Any], layout: Layout, settings: Mapping[str, str]) -> Found:
    """Return what this rank goes on with, from a checkpoint that `add_entry` was asked to fill."""
    entry = checkpoint.get(KEY)
    if entry is None:
        return Found(
            None,
            "it holds no states of single ranks, as another strategy saves it or as it is saved"
            " outside of a fit: the epoch's data begin again, with new random numbers",
        )
    was = Layout(entry["ranks"], entry["group_size"], 0)
    if was.groups != layout.groups:
        return Found(
            None,
            f"it was saved by {was.groups} tensor groups of {was.group_size} ranks, these are"
            f" {layout.groups} of {layout.group_size}: the epoch's data begin again, with new"
            " random numbers",
        )
    if was.group_size != layout.group_size:
        first = entry["states"][layout.rank // layout.group_size * was.group_size]
        return Found(
            {key: value for key, value in first.items() if key != "own"},
            f"a tensor group had {was.group_size} ranks and has {layout.group_size}: sums are"
            " rounded in another way, and random numbers that differ from rank to rank are new",
        )
    changed = [
        f"{name} was {entry['settings'].get(name, 'absent')} and is {value}"
        for name, value in settings.items()
        if entry["settings"].get(name) != value
    ]
    also = ": random numbers go on, but are drawn in another order" if changed else ""
    return Found(entry["states"][layout.rank], "; ".join(changed) + also)


def place_loaders(checkpoint: dict[str, Any], found: Found) -> None:
    """Let Lightning restore this rank's own loaders: it knows those of rank 0 only."""
    if found.state is not None and found.state["loaders"] is not None:
        loop_state(checkpoint)["combined_loader"] = found.state["loaders"]


def restore(
    found: Found, trainer: pl.Trainer, models: Sequence[ParallelModel], epoch_start: EpochStart
) -> None:
    """Bring data and random numbers to where they were; in `Strategy.on_train_start`."""
    if found.state is None:
        restore_loops(trainer)
        return
    data = Data(epoch_start=found.state.get("epoch_start"))
    restore_place(trainer, found.state["random"], epoch_start, data)
    if found.exact:
        for model, state in zip(models, found.state["own"], strict=True):
            model.group.load_own_state(state)


def _gather(channel: Channel, state: dict[str, Any], keep: bool) -> list[dict[str, Any]]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    mine = torch.frombuffer(bytearray(buffer.getbuffer()), dtype=torch.uint8)
    lengths = channel.all_gather(torch.tensor([len(mine)]), TAG).wait().flatten().tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(mine)] = mine
    rows = channel.all_gather(padded, TAG).wait()
    return [
        torch.load(io.BytesIO(row[:length].numpy().tobytes()), weights_only=True)
        for row, length in zip(rows.cpu(), lengths, strict=True)
        if keep
    ]
