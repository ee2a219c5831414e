"""Going on in the middle of an epoch: random numbers, the place in the data, gradients.

Lightning restores the loops (with help from `loops`), but neither the random number generators nor
the position of a loader that has no `state_dict` of its own: it hands out the epoch's first batches
again. Nor has it the gradients of batches whose optimizer step is still to come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import lightning.pytorch as pl
from torch import Tensor

from lightning_commfree.checkpoint.own_tensors import gradients_of
from lightning_commfree.checkpoint.random_state import (
    random_state,
    set_drawn,
    set_epoch,
    set_generators,
    set_random_state,
)
from lightning_commfree.checkpoint.rank_parts import plain
from lightning_commfree.lightning_internals import (
    MID_EPOCH,
    data_fetcher,
    loaded_later,
    reloaded_at,
)
from lightning_commfree.loop_counters import in_accumulation
from lightning_commfree.resume.epoch_start import EpochStart, training_loaders
from lightning_commfree.resume.loops import Moment, left_out, restore_loops


def data_state(trainer: pl.Trainer, checkpoint: Mapping[str, Any], begin: EpochStart) -> Any:
    """Return where this rank's training data stand.

    Args:
        trainer: in its fit.
        checkpoint: as Lightning dumps it on this rank.
        begin: of this Trainer.

    Returns:
        "loaders": the states of those that have a `state_dict`, None where Lightning alone can
        restore them; "ahead": batches that Lightning had read and not handed out (one, of data
        without a length), None where they are not plain; "epoch_start"; "random".
    """
    works = MID_EPOCH.works(trainer)
    ahead = getattr(data_fetcher(trainer), "batches", []) if works else []
    return {
        "random": random_state(trainer.strategy.root_device),
        "epoch_start": begin.state_dict(),
        "loaders": plain(_loader_states(checkpoint)),
        "ahead": plain([*ahead]),
    }


def half_accumulated(trainer: pl.Trainer) -> dict[str, Tensor]:
    """Return the gradients of batches whose optimizer step is still to come, by parameter.

    Not copies; empty between two accumulations, when those that are there have been stepped with.
    """
    return gradients_of(trainer.lightning_module) if in_accumulation(trainer) else {}


def not_saved(checkpoint: Mapping[str, Any], part: Mapping[str, Any], ranks: int) -> list[str]:
    """Return what stands of rank 0 alone in a checkpoint, and of no rank.

    Args:
        checkpoint: as Lightning dumps it.
        part: of this rank, from it.
        ranks: that save; a single one loses nothing that Lightning saves.
    """
    texts, shared = [], "holds more than tensors and plain values, and every rank gets rank 0's"
    if ranks > 1 and part["loaders"] is None and _loader_states(checkpoint):
        texts.append(f"the state of a training data loader {shared}")
    if ranks > 1 and part["schedulers"] is None and checkpoint.get("lr_schedulers"):
        texts.append(f"the state of a learning-rate scheduler {shared}")
    if part["ahead"] is None:
        texts.append(
            "a batch that had been read ahead is left out: it holds more than tensors and plain"
            " values"
        )
    return texts


def _loader_states(checkpoint: Mapping[str, Any]) -> Any:
    loops: Any = checkpoint.get("loops", {})
    return loops.get("fit_loop", {}).get("state_dict", {}).get("combined_loader")


def restore_place(trainer: pl.Trainer, begin: EpochStart, data: Mapping[str, Any]) -> list[str]:
    """Bring loops, loader and random numbers to where they were; the last thing before the fit.

    1. A checkpoint of the middle of an epoch: the epoch's order is made again, from the random
       numbers with which it was made, the batches that were trained on are drawn and dropped, then
       the random numbers of the save are set.
    2. Of the end of an epoch, or of its last batch: the random numbers are set; Lightning makes the
       next epoch's iterator, which draws from them, at its time.

    A loader with a `state_dict` knows its own place.

    Args:
        trainer: in `Strategy.on_train_start` of a resumed fit.
        begin: of this Trainer; gets the epoch's beginning from `data`.
        data: what `data_state` returned at the save.

    Returns:
        What is not as it was.
    """
    loop = trainer.fit_loop
    opened = loop.restarted_on_epoch_start  # saved in `on_train_epoch_start`
    moment = restore_loops(trainer)
    loaders = training_loaders(trainer)
    if every := int(cast(Any, trainer).reload_dataloaders_every_n_epochs):
        latest = moment.epoch if moment.begun or opened else max(moment.epoch - 1, 0)
        reloaded_at(trainer, latest // every * every)
    set_epoch(moment.epoch, loaders)
    set_random_state(data["random"], trainer.strategy.root_device)

    # Lightning has not loaded them where it took the epoch for over
    later = loaded_later(trainer)
    states = data["loaders"] or later
    if states:
        stateful = [loader for loader in loaders if hasattr(loader, "load_state_dict")]
        for loader, state in zip(stateful, states, strict=True):
            loader.load_state_dict(state)

    texts = left_out(trainer, moment)
    at_batch = (moment.begun and not moment.trained) or (not moment.begun and moment.epoch == 0)
    if at_batch and MID_EPOCH.works(trainer):
        begin.load_state_dict(data["epoch_start"], begun=moment.begun)
        texts += _restore_iterator(trainer, moment, bool(states), data["ahead"] or [], begin)
        set_random_state(data["random"], trainer.strategy.root_device)
    set_generators(data["epoch_start"]["now"], loaders)
    return texts


def _restore_iterator(
    trainer: pl.Trainer, moment: Moment, loaded: bool, ahead: Sequence[Any], begin: EpochStart
) -> list[str]:
    """Make the iterator of an epoch of which some batches have been trained on."""
    fetcher, loaders = data_fetcher(trainer), training_loaders(trainer)
    if any(hasattr(loader, "load_state_dict") for loader in loaders):
        if ahead:
            fetcher.iterator = iter(fetcher.combined_loader)  # `iter(fetcher)` would read ahead
            fetcher.reset()
            fetcher.batches = [*ahead]
        elif loaded:
            iter(fetcher)
        return []
    if fetcher.length is None:
        unknown = (
            "the training data have neither a length nor a `state_dict`, so the fit begins with"
            " their first batch. Give the loader `state_dict` and `load_state_dict`"
        )
        return [unknown] if moment.batches else []

    for loader in loaders:
        if moment.epoch == 0 and getattr(loader, "_iterator", None) is not None:
            loader._iterator = None  # workers that persist; `setup_data` gave them other seeds
    set_drawn(begin.iterator, loaders)
    iter(fetcher)
    set_drawn(begin.batch, loaders)
    for _ in range(moment.batches):
        next(fetcher.iterator)  # not through the fetcher, which Lightning sets itself
    return []
