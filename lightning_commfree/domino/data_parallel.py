"""Replicas that the mean of their gradients keeps equal in every step: data parallelism.

Weights and optimizer state of ranks that share a model are put together in a checkpoint, whole.
What is left to each rank is small: its random numbers, the place of its data, and in the middle of
an accumulation its parts of the gradients. Rank 0's lies in the checkpoint, the others' in files
beside it.

=========================  ==========================  ============================================
resumed on                 place in the data           random numbers
=========================  ==========================  ============================================
the same ranks             as it was                   as they were: every later weight is equal
other tensor groups, as    as it was                   those that a group shares as they were; a
many of them                                           rank's own, of attention's dropout, are new
more or fewer groups       the epoch's first batches   new
=========================  ==========================  ============================================

Of each group the file of its first rank is needed for the second line; gradients of a
half-accumulated step come back in the first only.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from lightning_commfree.comm.job import ReplicaChannels
from lightning_commfree.comm.ledger import all_gather_bytes
from lightning_commfree.domino.forecast import bytes_per_step
from lightning_commfree.domino.gradients import GradientAverage
from lightning_commfree.domino.settings import DominoSettings
from lightning_commfree.domino.sharded_module import ShardedModule
from lightning_commfree.resume.rank_state import PLACE, Adopted, Saved

FLAGS_TAG, FLAGS_BYTES = "flags", 24  # of the three numbers that ranks exchange before a step


class GradientMean:
    """All-reduce of gradients over the data axis, while backward goes on.

    Args:
        sharded: the divided model.
        channels: between and within replicas.
        settings: decide in which order random numbers are drawn.

    Attributes:
        average: of the gradients.
        models: the divided ones.
    """

    name = "Domino"
    replicas = False  # a rank holds a part of a model, which checkpoints put together
    free_at_resume: frozenset[str] = frozenset()

    def __init__(
        self,
        sharded: ShardedModule,
        channels: ReplicaChannels,
        settings: DominoSettings,
    ) -> None:
        self._channels, self._settings = channels, settings
        self.models = sharded.models
        self.average = GradientAverage(channels.between)
        for model in sharded.models:
            model.done = self.average.sublayer_is_done

    def land(self, module: nn.Module) -> None:
        """Put the mean gradients into place."""
        self.average.land(module.parameters())

    def stepping(self) -> AbstractContextManager[None]:
        """In the body an optimizer step is taken."""
        return nullcontext()

    def after_step(self, stop: bool) -> bool:
        """Exchange nothing: the ranks have said before the step whether they stop."""
        del stop
        return False

    def figures(self) -> dict[str, float]:
        """Return none but the ledger's."""
        return {}

    def cycle(self) -> tuple[Mapping[str, float], int]:
        """Return the steps of a cycle; what is sent in it depends on the tokens."""
        return {}, 1

    def bytes_per_step(
        self, module: nn.Module, tokens: int, mixed: torch.dtype | None, clips: bool
    ) -> dict[str, float]:
        """Return what a rank sends in a step by tag.

        Args:
            module: divided.
            tokens: of a tensor group's batches.
            mixed: dtype of autocast.
            clips: whether gradients are clipped by their norm.
        """
        replicas, world = self._channels.between.size, self._channels.world.size
        sent = bytes_per_step(self.models, module.parameters(), tokens, replicas, mixed, clips)
        sent[FLAGS_TAG] = all_gather_bytes(FLAGS_BYTES, world)
        return {tag: float(num_bytes) for tag, num_bytes in sent.items() if num_bytes}

    def fingerprint(self) -> dict[str, str]:
        """Return what decides which numbers a rank draws, and for what."""
        chosen, size = self._settings.fingerprint(), self._channels.within.size
        split = {name: chosen[name] for name in ("split", "num_micro_batches")}
        return {"tensor_parallel_size": str(size), **split}

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: what each rank keeps for itself is the divided model's."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what `state_dict` returned."""
        del state

    def adopt(self, saved: Saved) -> Adopted | None:
        """Go on in the data, with all random numbers or with those that a tensor group shares."""
        size = int(saved.entry["fingerprint"]["tensor_parallel_size"])
        world, within = self._channels.world, self._channels.within
        if saved.entry["ranks"] // size != world.size // within.size:
            return None

        parts = saved.load_all([world.rank]) if size == within.size else []
        if parts:
            said = "with its optimizer state and all random numbers, now drawn in another order"
            return Adopted(parts[0], said)

        parts = saved.load_all([world.rank // within.size * size])
        if not parts:
            return None
        return Adopted(
            {name: parts[0][name] for name in PLACE},
            "with its optimizer state, at the same place in the data. Random numbers that differ"
            " from rank to rank and gradients of a half-accumulated step begin anew, and sums are"
            " rounded in another way where a tensor group has another size",
        )

    def close(self) -> None:
        """The model is divided no more."""
