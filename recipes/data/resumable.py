"""A data loader that knows where it is, for runs that are resumed in the middle of an epoch.

Lightning saves and restores the `state_dict` of any training loader that has one. torchdata's
`StatefulDataLoader` has, and does not work here (torchdata 0.11.0, Lightning 2.6.6, tried):
Lightning restores the loader and makes its iterator before it tells the sampler the epoch, so from
the second epoch on a resumed run saw the first epoch's order; and a run resumed from a checkpoint
of an epoch's last batch went through one epoch without batches. Both are cured by looking at the
epoch when the first batch is asked for, not before.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler


class ResumableSampler(DistributedSampler):
    """A `DistributedSampler` whose next pass leaves out the first `skip` samples of this rank."""

    skip: int = 0

    def __iter__(self) -> Iterator[int]:
        skip, self.skip = self.skip, 0
        return islice(super().__iter__(), skip, None)


class ResumableDataLoader(DataLoader[Any]):
    """A `DataLoader` that resumes after the last batch that was handed out, workers or not.

    The state says how many samples *all* ranks have taken in which epoch. It is the same on every
    rank, so the one that Lightning saves (rank 0's) serves all; and because the sampler deals
    samples out in turn, a run resumed on another number of ranks neither repeats nor loses more
    than a part of one batch.

    Args:
        sampler: decides the order; Lightning tells it the epoch.
        batch_size: samples per batch.
        **kwargs: of `torch.utils.data.DataLoader`.
    """

    sampler: ResumableSampler

    def __init__(self, sampler: ResumableSampler, batch_size: int, **kwargs: Any) -> None:
        super().__init__(sampler.dataset, batch_size=batch_size, sampler=sampler, **kwargs)
        self._samples_per_batch = batch_size * sampler.num_replicas
        self._batches_taken = 0
        self._samples_before = 0
        self._resume: dict[str, int] | None = None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # a generator: this runs when the first batch is asked for, when the sampler knows the epoch
        state, self._resume = self._resume, None
        same_epoch = state is not None and state["epoch"] == self.sampler.epoch
        self._samples_before = state["samples"] if state is not None and same_epoch else 0
        self._batches_taken = 0
        self.sampler.skip = self._samples_before // self.sampler.num_replicas
        for batch in super().__iter__():
            self._batches_taken += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Return the epoch and how many samples all ranks together have taken in it."""
        taken = self._samples_before + self._batches_taken * self._samples_per_batch
        return {"epoch": self.sampler.epoch, "samples": taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Make the next pass go on after `state`, if it is a pass through the same epoch."""
        self._resume = dict(state)
