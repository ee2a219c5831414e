"""Data parallelism across tensor groups: average gradients on every step.

A checkpoint contains the full weights and optimizer state, so a fit can resume on any number of
ranks. The rest of the state is small and is saved by each rank: RNG state, position in the data,
and partly accumulated gradients.

===========================  ===================  ================================================
resumed on                   position in data     random number generators
===========================  ===================  ================================================
the same ranks               restored             restored: the fit continues bit for bit
the same number of groups    restored             shared ones are restored; each rank's own
of a different size                               (attention dropout) are reset
different number of groups   start of the epoch   reset
===========================  ===================  ================================================

The second row requires the file that the first rank of each group saved. Partly accumulated
gradients are restored only in the first row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from lightning_commfree.comm.job import ReplicaChannels
from lightning_commfree.comm.ledger import all_gather_bytes, ring_all_reduce_bytes
from lightning_commfree.domino.forecast import bytes_per_step
from lightning_commfree.domino.gradients import AVERAGE_TAG, GradientAverage
from lightning_commfree.domino.settings import DominoSettings
from lightning_commfree.domino.sharded_module import ShardedModule

# entries of a rank's own state (`resume.contents`) that do not depend on its shards
_POSITION = ("changes", "random", "starts", "order", "loaders", "ahead", "lost")
FLAGS_TAG, FLAGS_BYTES = "flags", 24  # three int64 values per rank, exchanged before each step


class GradientMean:
    """Algorithm of `DominoTPStrategy`: averages gradients across tensor groups during backward."""

    name = "Domino"

    def __init__(
        self,
        sharded: ShardedModule,
        channels: ReplicaChannels,
        settings: DominoSettings,
    ) -> None:
        self._channels, self._settings = channels, settings
        self.models = sharded.models
        self.average = GradientAverage(channels.between)
        # launch a sublayer's gradients while backward computes those of earlier sublayers
        for model in sharded.models:
            model.done = self.average.launch_sublayer

    def land(self, module: nn.Module) -> None:
        """Wait for the mean gradients, and store them in the parameters' `grad`."""
        self.average.land(module.parameters())

    def after_step(self) -> None:
        """Do nothing: `DominoSession.backward` exchanges requests before the step."""

    def cycle(self) -> tuple[Mapping[str, float], int]:
        """Return no bytes, and a cycle of one step; `bytes_per_step` forecasts the bytes."""
        return {}, 1

    def bytes_per_step(
        self,
        module: nn.Module,
        tokens_per_step: int,  # of a tensor group
        autocast_dtype: torch.dtype | None,  # None without autocast
        clips_by_norm: bool,
    ) -> dict[str, float]:
        """Forecast the bytes that a rank sends per step, by ledger tag."""
        replicas, world = self._channels.between.size, self._channels.world.size
        sent = bytes_per_step(self.models, tokens_per_step, autocast_dtype, clips_by_norm)
        gradients = sum(p.nbytes for p in module.parameters() if p.requires_grad)
        sent[AVERAGE_TAG] = ring_all_reduce_bytes(gradients, replicas)
        sent[FLAGS_TAG] = all_gather_bytes(FLAGS_BYTES, world)
        return {tag: float(num_bytes) for tag, num_bytes in sent.items() if num_bytes}

    def fingerprint(self) -> dict[str, str]:
        """Return the settings that must match across ranks and stay unchanged for exact resume."""
        chosen, size = self._settings.fingerprint(), self._channels.within.size
        split = {name: chosen[name] for name in ("split", "num_micro_batches")}
        return {"tensor_parallel_size": str(size), **split}

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return two empty dicts; each rank's state is in `ShardedModule.own_state`."""
        return {}, {}

    def load_state_dict(self, shared: dict[str, Any], own: dict[str, Any] | None) -> None:
        """Do nothing: there is no state."""
        del shared, own

    def adopt(
        self,
        saved_fingerprint: Mapping[str, str],
        num_ranks: int,
        load_states: Callable[[Iterable[int]], list[dict[str, Any]]],
    ) -> tuple[dict[str, Any], str] | None:
        """Return (reusable part of a saved rank's state, message to users), or None; collective.

        With another size of tensor groups or a rank file missing, reuse at most data position and
        shared RNG state; with another number of groups, nothing (`Resumable.adopt`).
        """
        size = int(saved_fingerprint["tensor_parallel_size"])
        world, within = self._channels.world, self._channels.within
        if num_ranks // size != world.size // within.size:
            return None

        found = load_states([world.rank]) if size == within.size else []
        if found:
            kept = "with its optimizer state and all random numbers, now drawn in another order"
            return found[0], kept

        found = load_states([world.rank // within.size * size])
        if not found:
            return None
        return (
            {name: found[0][name] for name in _POSITION},
            "with its optimizer state, at the same position in the data. Random numbers that differ"
            " between ranks and gradients of a partially accumulated step start over, and with"
            " another tensor group size sums are rounded differently",
        )
