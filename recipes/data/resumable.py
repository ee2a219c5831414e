"""A data loader that can be resumed in the middle of an epoch.

Lightning saves and restores the `state_dict` of any training loader that has one. torchdata's
`StatefulDataLoader` has one but does not work here (torchdata 0.11.0, Lightning 2.6.6): Lightning
restores the loader and creates its iterator before it tells the sampler the epoch, so from the
second epoch on a resumed run read the first epoch's order, and a run resumed from a checkpoint at
an epoch's last batch ran one epoch without batches. Reading the epoch only when the first batch is
requested fixes both.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler


class ResumableSampler(DistributedSampler):
    """A `DistributedSampler` whose next pass skips the first `skip` samples of this rank."""

    skip: int = 0

    def __iter__(self) -> Iterator[int]:
        skip, self.skip = self.skip, 0
        return islice(super().__iter__(), skip, None)


class ResumableDataLoader(DataLoader[Any]):
    """A `DataLoader` that resumes after the last batch it returned, with or without workers.

    The state is the epoch and the number of samples that *all* ranks have read in it. It is the
    same on every rank, so the state that Lightning saves (rank 0's) is enough. Because the sampler
    deals samples round-robin, a run resumed on a different number of ranks repeats or loses at most
    part of one batch.

    Args:
        sampler: determines the order; Lightning sets its epoch.
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
        # a generator: this runs when the first batch is requested, after the epoch has been set
        state, self._resume = self._resume, None
        same_epoch = state is not None and state["epoch"] == self.sampler.epoch
        self._samples_before = state["samples"] if state is not None and same_epoch else 0
        self._batches_taken = 0
        self.sampler.skip = self._samples_before // self.sampler.num_replicas
        for batch in super().__iter__():
            self._batches_taken += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Return the epoch and the number of samples that all ranks together have read in it."""
        taken = self._samples_before + self._batches_taken * self._samples_per_batch
        return {"epoch": self.sampler.epoch, "samples": taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Make the next pass continue after `state` if it is a pass through the same epoch."""
        self._resume = dict(state)
