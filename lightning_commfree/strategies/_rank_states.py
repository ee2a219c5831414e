"""Exact resume where ranks share one model: what a rank knows that is not in the checkpoint.

Weights and optimizer state of tensor-parallel ranks are put together in a checkpoint, whole. What
is left to each rank is small: its random numbers, the place of its data, and in the middle of an
accumulation its parts of the gradients. Rank 0's lies in the checkpoint, the others' in files
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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_commfree.domino import ParallelModel
from lightning_commfree.resume.rank_state import PLACE, Adopted, Saved


@dataclass
class TensorRank:
    """What one of the ranks that share a model knows.

    Args:
        models: the divided ones.
        rank: in the world.
        ranks: of the world.
        group_size: consecutive ranks that share a model.
        settings: those that decide in which order random numbers are drawn.
    """

    models: Sequence[ParallelModel]
    rank: int
    ranks: int
    group_size: int
    settings: Mapping[str, str]

    name = "Domino"
    replicas = False
    free_at_resume: frozenset[str] = frozenset()

    def fingerprint(self) -> dict[str, str]:
        """Return what decides which numbers a rank draws, and for what."""
        return {"tensor_parallel_size": str(self.group_size), **self.settings}

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the generators that differ from rank to rank."""
        return {"random": [model.group.own_state() for model in self.models]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what `state_dict` returned."""
        for model, own in zip(self.models, state["random"], strict=True):
            model.group.load_own_state(own)

    def adopt(self, saved: Saved) -> Adopted | None:
        """Go on in the data, with all random numbers or with those that a tensor group shares."""
        size = int(saved.entry["fingerprint"]["tensor_parallel_size"])
        if saved.entry["ranks"] // size != self.ranks // self.group_size:
            return None

        parts = saved.load_all([self.rank]) if size == self.group_size else []
        if parts:
            said = "with its optimizer state and all random numbers, now drawn in another order"
            return Adopted(parts[0], said)

        parts = saved.load_all([self.rank // self.group_size * size])
        if not parts:
            return None
        return Adopted(
            {name: parts[0][name] for name in PLACE},
            "with its optimizer state, at the same place in the data. Random numbers that differ"
            " from rank to rank and gradients of a half-accumulated step begin anew, and sums are"
            " rounded in another way where a tensor group has another size",
        )
