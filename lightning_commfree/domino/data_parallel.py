"""Data parallelism between tensor groups: average gradients in every step.

A checkpoint holds the full weights and optimizer state. Each rank's own state is small: its random
numbers, its position in the data, and in the middle of an accumulation its shards of the gradients.

=========================  ==========================  ============================================
resumed on                 position in the data        random numbers
=========================  ==========================  ============================================
the same ranks             as it was                   as they were: every later weight is equal
other tensor groups, as    as it was                   those that a group shares as they were; a
many of them                                           rank's own, of attention's dropout, are new
more or fewer groups       the epoch's first batches   new
=========================  ==========================  ============================================

The second line needs the file of each group's first rank; gradients of a half-accumulated step come
back in the first line only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from lightning_commfree.comm.job import ReplicaChannels
from lightning_commfree.comm.ledger import all_gather_bytes, ring_all_reduce_bytes
from lightning_commfree.domino.forecast import bytes_per_step
from lightning_commfree.domino.gradients import AVERAGE_TAG, GradientAverage
from lightning_commfree.domino.settings import DominoSettings
from lightning_commfree.domino.sharded_module import ShardedModule

# entries of a rank's own state that do not depend on which shards it holds
_POSITION = ("random", "epoch_start", "loaders", "ahead", "lost")
FLAGS_TAG, FLAGS_BYTES = "flags", 24  # of the three numbers that ranks exchange before a step


class GradientMean:
    """Average gradients over the data axis during backward; `DominoTPStrategy`'s algorithm.

    Args:
        sharded: the module with the sharded models.
        channels: between and within replicas.
        settings: part of the fingerprint, since they decide the order of random numbers.

    Attributes:
        average: launches and lands the all-reduces.
        models: the sharded models.
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
        # a sublayer's gradients are launched while backward computes the ones before it
        for model in sharded.models:
            model.done = self.average.sublayer_is_done

    def land(self, module: nn.Module) -> None:
        """Wait for the mean gradients and store them."""
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
        """Forecast the bytes that a rank sends in a step, by ledger tag.

        Args:
            module: sharded.
            tokens: of a tensor group's batches of a step.
            mixed: dtype of autocast; None without.
            clips: whether gradients are clipped by their norm.
        """
        replicas, world = self._channels.between.size, self._channels.world.size
        sent = bytes_per_step(self.models, tokens, mixed, clips)
        gradients = sum(p.nbytes for p in module.parameters() if p.requires_grad)
        sent[AVERAGE_TAG] = ring_all_reduce_bytes(gradients, replicas)
        sent[FLAGS_TAG] = all_gather_bytes(FLAGS_BYTES, world)
        return {tag: float(num_bytes) for tag, num_bytes in sent.items() if num_bytes}

    def fingerprint(self) -> dict[str, str]:
        """Return what decides which numbers a rank draws, and for what."""
        chosen, size = self._settings.fingerprint(), self._channels.within.size
        split = {name: chosen[name] for name in ("split", "num_micro_batches")}
        return {"tensor_parallel_size": str(size), **split}

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return nothing: each rank's own state is the sharded model's."""
        return {}, {}

    def load_state_dict(self, shared: dict[str, Any], own: dict[str, Any] | None) -> None:
        """Put back what `state_dict` returned."""
        del shared, own

    def adopt(
        self,
        was: Mapping[str, str],
        ranks: int,
        load: Callable[[Iterable[int]], list[dict[str, Any]]],
    ) -> tuple[dict[str, Any], str] | None:
        """Keep the position in the data, and all random numbers or those that a group shares."""
        size, world, within = (
            int(was["tensor_parallel_size"]),
            self._channels.world,
            self._channels.within,
        )
        if ranks // size != world.size // within.size:
            return None

        found = load([world.rank]) if size == within.size else []
        if found:
            said = "with its optimizer state and all random numbers, now drawn in another order"
            return found[0], said

        found = load([world.rank // within.size * size])
        if not found:
            return None
        return (
            {name: found[0][name] for name in _POSITION},
            "with its optimizer state, at the same place in the data. Random numbers that differ"
            " from rank to rank and gradients of a half-accumulated step start afresh, and sums are"
            " rounded in another way where a tensor group has another size",
        )

    def close(self) -> None:
        """The model is divided no more."""
