"""Validation, test and predict batches of ranks that share a model: the same number on each.

Where each rank of a replica holds a shard of the model, its ranks compute every batch together. A
rank with more batches than the others would wait for them until the timeout. For `validate` and
`test` Lightning's own sampler gives every rank the same number; a user's sampler or a stream may
not.

- *Loaders with a length*: before the first batch, the ranks agree on the shortest of the replica. A
  warning says so, because metrics then cover fewer batches.
- *Streams*: before each batch, the ranks exchange whether it is their last, and stop together.
- *Predict*: an error instead, because the result would lack rows. Lightning's sampler for `predict`
  gives some ranks a batch more if the rows cannot be divided equally.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn

from lightning_commfree.lightning_internals import (
    EVALUATION,
    Patches,
    batch_limits,
    end_evaluation_after_this_batch,
    evaluation_loop,
    has_no_batch,
)
from lightning_commfree.strategies.contracts import Inside
from lightning_commfree.strategies.ranks import Ranks

TAG = "evaluation"
_SHOWN = 20  # ranks in a message


class SharedEvaluation:
    """The evaluation loop of a Trainer, on a rank that may share its model with others.

    Args:
        trainer: the Trainer; in a fit, this is about its validations.
        ranks: all ranks of the job.
        inside: layout of the model on the ranks of a replica.
        patches: receives the wrappers of the loop's methods.
    """

    def __init__(self, trainer: pl.Trainer, ranks: Ranks, inside: Inside, patches: Patches) -> None:
        self._ranks, self._inside = ranks, inside
        self._loop = loop = evaluation_loop(trainer)
        self._predicts = trainer.state.fn == TrainerFn.PREDICTING
        self._on_streams = False  # the number of batches is not known in advance
        if EVALUATION.works(trainer):
            patches.put(loop, "setup_data", partial(self._set_up_data, loop.setup_data))
            patches.put(loop, "on_run_start", partial(self._start, loop.on_run_start))

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Wrap the computation of a batch; an error in it names the lost ranks.

        Raises:
            AgreedError: in `predict`, some rank's stream ends with this batch, and another's not.
        """
        if not self._inside.shares_model:
            yield
            return
        if self._on_streams:
            last = self._of_replica(self._loop.batch_progress.is_last_batch)
            if any(last):
                end_evaluation_after_this_batch(self._loop)
            if not all(last):
                ended = [f"the data of rank {rank} end first" for rank in self._where(last)]
                self._tell_uneven(ended, self._ranks.channels.within.rank == 0)
        with self._ranks.naming_lost("evaluation"):
            yield

    def _set_up_data(self, set_up: Callable[[], None]) -> None:
        """Wrap the setup of the loaders: limit each to the shortest of the replica."""
        before = batch_limits(self._loop)
        set_up()
        limits = batch_limits(self._loop)
        if (
            limits is before or not self._inside.shares_model
        ):  # the loaders are those of the last run
            return
        within, uneven = self._ranks.channels.within, []
        for i, mine in enumerate(limits):
            counts = self._ranks.all_values(-1 if math.isinf(mine) else int(mine))  # of one kind
            for first in range(0, len(counts), within.size):
                replica = counts[first : first + within.size]
                uneven += [
                    f"rank {first + j} has {count}, another rank of its replica {min(replica)}"
                    for j, count in enumerate(replica)
                    if count > min(replica)
                ]
                if first == within.ranks[0] and not math.isinf(mine):
                    limits[i] = min(replica)
        self._on_streams = any(map(math.isinf, limits))
        self._tell_uneven(uneven, self._ranks.rank == 0)

    def _start(self, start: Callable[[], None]) -> None:
        """Wrap the start of the loop, and check that all streams of the replica have a batch.

        Raises:
            AgreedError: only some have one; on all ranks.
        """
        if self._on_streams and self._inside.shares_model:
            empty = self._where(self._of_replica(has_no_batch(self._loop)))
            if 0 < len(empty) < self._ranks.channels.within.size:
                raise self._ranks.channels.world.peers.agreed(
                    f"Evaluation has no batches on ranks {empty}, but other ranks of their replica"
                    " have some. The ranks of a replica compute each batch together: give them the"
                    " same number of batches."
                )
        start()

    def _tell_uneven(self, found: list[str], speaks: bool) -> None:
        """Warn about batches that are left out; in `predict`, raise an error on all ranks."""
        if not found:
            return
        text = (
            "The ranks of a replica compute each batch together, but their numbers of batches"
            f" differ: {', '.join(found[:_SHOWN])}. "
        )
        if self._predicts:
            text += (
                "`predict` would leave out rows: give every rank of a replica the same number of"
                " batches, or predict on one device, from a checkpoint."
            )
            raise self._ranks.channels.world.peers.agreed(text)
        if speaks:
            warnings.warn(
                text + "Metrics cover only the batches that all of them have. Give every rank of a"
                " replica the same number of batches, as Lightning's own sampler does.",
                stacklevel=2,
            )

    def _of_replica(self, mine: bool) -> list[bool]:
        """Gather a flag from the ranks of the replica; collective."""
        within = self._ranks.channels.within
        flag = torch.tensor([mine], dtype=torch.uint8, device=within.device)
        return [bool(flag) for flag in within.all_gather(flag, TAG).wait().flatten().tolist()]

    def _where(self, flags: list[bool]) -> list[int]:
        ranks = self._ranks.channels.within.ranks
        return [rank for rank, flag in zip(ranks, flags, strict=True) if flag]
