"""Give all ranks that share a model the same number of validation, test and predict batches.

If each rank of a replica holds a shard of the model, the ranks compute every batch together. A rank
with more batches than the others would wait for them until the timeout. For `validate` and `test`,
Lightning's own sampler gives every rank the same number, but a user's sampler or a stream may give
different numbers.

- *Loaders with a length*: before the first batch, the ranks of a replica agree on the smallest
  length. A warning says so, because metrics then cover fewer batches.
- *Streams*, and loaders that yield fewer batches than their length: the ranks exchange one byte per
  batch, and stop together as soon as one of them runs out.
- *Predict*: an error is raised instead, because rows would be missing from the result. Lightning's
  sampler for `predict` gives some ranks one more batch if the rows cannot be divided evenly.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from lightning_commfree.fit.contracts import Inside
from lightning_commfree.fit.ranks import Ranks
from lightning_commfree.host import TrainerFn, pl
from lightning_commfree.lightning_internals import (
    EVALUATION,
    Patches,
    batch_limits,
    drop_first_batch,
    evaluation_loop,
    fetches_ahead,
    has_no_batch,
    wrap_batches,
)

TAG = "evaluation"
_SHOWN = 20  # ranks in a message


class SharedEvaluation:
    """Wraps a Trainer's evaluation loop so that ranks that share a model run the same batches.

    Args:
        trainer: the Trainer; in a fit, its validation loop is used.
        ranks: all ranks of the job.
        inside: layout of the model across the ranks of a replica.
        patches: receives wrappers for the loop's methods.
    """

    def __init__(self, trainer: pl.Trainer, ranks: Ranks, inside: Inside, patches: Patches) -> None:
        self._ranks, self._inside = ranks, inside
        self._loop = loop = evaluation_loop(trainer)
        self._predicts = trainer.state.fn == TrainerFn.PREDICTING
        if EVALUATION.works(trainer):
            patches.put(loop, "setup_data", partial(self._set_up_data, loop.setup_data))
            patches.put(loop, "reset", partial(self._reset, loop.reset))

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Context manager around a batch. If a collective fails, its error names the lost ranks."""
        if not self._inside.shares_model:
            yield
            return
        with self._ranks.guarded("evaluation"):
            yield

    def _set_up_data(self, set_up: Callable[[], None]) -> None:
        """Run `set_up`, then limit each loader to its shortest length within the replica.

        `set_up` is the loop's own method, which creates the loaders.
        """
        before = batch_limits(self._loop)
        set_up()
        limits = batch_limits(self._loop)
        same_loaders = limits is before
        if same_loaders or not self._inside.shares_model:
            return
        within, uneven = self._ranks.channels.within, []
        for i, mine in enumerate(limits):
            # Lightning itself needs a length on all ranks or on none
            counts = self._ranks.all_values(-1 if math.isinf(mine) else int(mine))
            for first in range(0, len(counts), within.size):
                replica = counts[first : first + within.size]
                uneven += [
                    f"rank {first + j} has {count}, but another rank of its replica has"
                    f" {min(replica)}"
                    for j, count in enumerate(replica)
                    if count > min(replica)
                ]
                if first == within.ranks[0] and not math.isinf(mine):
                    limits[i] = min(replica)
        self._report_uneven(uneven, self._ranks.rank == 0)

    def _reset(self, reset: Callable[[], None]) -> None:
        """Run `reset`, then wrap the loop's batches so that the replica's ranks stop together.

        `reset` is the loop's own method, which may already fetch the first batch.
        """
        reset()
        if not self._inside.shares_model:
            return
        if fetches_ahead(self._loop) and not self._all_have(not has_no_batch(self._loop)):
            drop_first_batch(self._loop)
        wrap_batches(self._loop, self._until_any_ends)

    def _until_any_ends(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield batches until any rank of the replica runs out; collective for each batch."""
        while True:
            batch = next(batches, None)
            if not self._all_have(batch is not None):
                return
            yield batch

    def _all_have(self, mine: bool) -> bool:
        """Return whether all ranks of the replica have a batch; collective."""
        within = self._ranks.channels.within
        flag = torch.tensor([mine], dtype=torch.uint8, device=within.device)
        found = within.all_gather(flag, TAG).wait().flatten().tolist()
        without = [rank for rank, has in zip(within.ranks, found, strict=True) if not has]
        if 0 < len(without) < within.size:
            ended = [f"the data of rank {rank} ends first" for rank in without]
            self._report_uneven(ended, within.rank == 0)
        return not without

    def _report_uneven(self, found: list[str], warns: bool) -> None:
        """Warn about skipped batches; in `predict`, raise an error on all ranks."""
        if not found:
            return
        text = (
            "The ranks of a replica share a model, so they must have the same number of batches,"
            f" but they do not: {'; '.join(found[:_SHOWN])}. "
        )
        if self._predicts:
            text += (
                "`predict` would leave out rows: give every rank of a replica the same number of"
                " batches, or predict on one device, from a checkpoint."
            )
            raise self._ranks.channels.world.peers.agreed(text)
        if warns:
            warnings.warn(
                text + "Metrics leave out the extra batches. Give every rank of a replica the same"
                " number of batches, as Lightning's own sampler does.",
                stacklevel=2,
            )
