"""Going on in the middle of an epoch: random numbers and the place in the data.

Lightning restores the loops, but neither the random number generators nor the position of a loader
that has no `state_dict` of its own: it hands out the epoch's first batches again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import lightning.pytorch as pl
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch.loops.progress import _ProcessedTracker
from lightning_utilities.core.rank_zero import rank_zero_warn


def random_state() -> dict[str, Any]:
    """Return the states of Python's, numpy's, torch's and CUDA's generators.

    Only tensors and plain values, which load with `weights_only=True`.
    """
    states = _collect_rng_states()
    if "numpy" in states:
        kind, keys, *rest = states["numpy"]
        states["numpy"] = (kind, [int(key) for key in keys], *rest)
    return states


def loop_state(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint keeps of the fit loop: "combined_loader" has the loaders' states."""
    state: dict[str, Any] = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    return state


def restore_place(trainer: pl.Trainer, random: dict[str, Any]) -> None:
    """Bring loader and random numbers to where they were; the last thing before the first batch.

    1. A checkpoint of the middle of an epoch: the epoch's order is made again, the batches that
       were trained on are drawn and dropped, then the random numbers are set.
    2. A checkpoint of the end of an epoch: the random numbers are set, then the next epoch's
       iterator is made, which draws from them.

    A loader with a `state_dict` knows its own place: Lightning has restored it already.

    Args:
        trainer: in `Strategy.on_train_start` of a resumed fit.
        random: what `random_state` returned at the save.
    """
    loop = trainer.fit_loop
    fetcher, loaders = loop._data_fetcher, loop._combined_loader
    assert fetcher is not None, "the loaders are set up before `on_train_start`"
    assert loaders is not None, "the loaders are set up before `on_train_start`"
    progress = loop.epoch_loop.batch_progress
    mid_epoch = loop.restarted_mid_epoch and not progress.is_last_batch
    if any(hasattr(loader, "load_state_dict") for loader in loaders.flattened):
        _set_rng_states(random)
        return
    if fetcher.length is None:
        rank_zero_warn(
            "The training data has neither a length nor a `state_dict`, so its place in the middle"
            " of an epoch is unknown: the resumed fit begins with its first batch. Give the loader"
            " `state_dict` and `load_state_dict` to resume exactly."
        )
        _set_rng_states(random)
        return
    for loader in loaders.flattened:
        _set_sampler_epoch(loader, cast(_ProcessedTracker, loop.epoch_progress.current).processed)
    _set_rng_states(random)
    iter(fetcher)
    if mid_epoch:
        assert fetcher.iterator is not None, "`iter` has just made it"
        for _ in range(progress.current.ready):
            next(fetcher.iterator)  # not through the fetcher, which Lightning sets itself
        _set_rng_states(random)
