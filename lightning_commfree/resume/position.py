"""Going on in the middle of an epoch: random numbers and the place in the data.

Lightning restores the loops (with help from `_loops`), but neither the random number generators nor
the position of a loader that has no `state_dict` of its own: it hands out the epoch's first batches
again.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import lightning.pytorch as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_commfree.lightning_internals import (
    MID_EPOCH,
    data_fetcher,
    loaded_later,
    reloaded_at,
)
from lightning_commfree.resume.epoch_start import EpochStart, training_loaders
from lightning_commfree.resume.loops import Moment, restore_loops
from lightning_commfree.resume.random_state import set_random_state, without_device


def loop_state(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint keeps of the fit loop: "combined_loader" has the loaders' states."""
    state: dict[str, Any] = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    return state


class Data(NamedTuple):
    """Where the training data stood at a save.

    Attributes:
        loaders: the states of the loaders that have a `state_dict`; None: as Lightning has restored
            them.
        ahead: batches that Lightning had read and not handed out: one, of data without a length.
            None: they cannot be read back.
        epoch_start: of the epoch; None: unknown, in a checkpoint of an older version.
    """

    loaders: list[dict[str, Any]] | None = None
    ahead: Sequence[Any] | None = ()
    epoch_start: dict[str, Any] | None = None


def read_ahead(trainer: pl.Trainer) -> list[Any]:
    """Return the batches that Lightning has read and not handed out."""
    return list(getattr(data_fetcher(trainer), "batches", [])) if MID_EPOCH.works(trainer) else []


def loadable(state: Any, what: str = "") -> Any:
    """Return what this rank's loaders or schedulers hold; None where only pickle can load it.

    What comes from another rank, or from its file, is read without running code from it. Rank 0's,
    in the checkpoint itself, is then taken by all.

    Args:
        state: as they give it.
        what: whose it is, for a message where it is not kept; none without it.
    """
    if _is_plain(state):
        return state
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    try:
        return torch.load(buffer, weights_only=True)
    except pickle.UnpicklingError as error:
        if what:
            rank_zero_warn(
                f"The state of {what} holds more than tensors and plain values, and is kept of"
                " rank 0 only: a resumed fit gives every rank that of rank 0. What was found:"
                f" {str(error).splitlines()[-1]}"
            )
        return None


def _is_plain(state: Any) -> bool:
    """Return whether it is known without a try that no code is needed to load it."""
    if type(state) is dict:
        return all(map(_is_plain, (*state.keys(), *state.values())))
    if type(state) in (list, tuple):
        return all(map(_is_plain, state))
    return state is None or type(state) in (bool, int, float, str, bytes, torch.Tensor)


def restore_place(
    trainer: pl.Trainer, random: dict[str, Any], begin: EpochStart, data: Data
) -> Moment:
    """Bring loops, loader and random numbers to where they were; the last thing before the fit.

    1. A checkpoint of the middle of an epoch: the epoch's order is made again, from the random
       numbers with which it was made, the batches that were trained on are drawn and dropped, then
       the random numbers of the save are set.
    2. Of the end of an epoch, or of its last batch: the random numbers are set; Lightning makes the
       next epoch's iterator, which draws from them, at its time.

    A loader with a `state_dict` knows its own place.

    Args:
        trainer: in `Strategy.on_train_start` of a resumed fit.
        random: what `random_state` returned at the save.
        begin: of this Trainer; gets the epoch's beginning from `data`.
        data: where the data stood.

    Returns:
        Where the fit goes on.
    """
    loop = trainer.fit_loop
    opened = loop.restarted_on_epoch_start  # saved in `on_train_epoch_start`
    moment = restore_loops(trainer)
    loaders = training_loaders(trainer)
    if every := int(cast(Any, trainer).reload_dataloaders_every_n_epochs):
        latest = moment.epoch if moment.begun or opened else max(moment.epoch - 1, 0)
        reloaded_at(trainer, latest // every * every)
    for loader in loaders:
        _begin_epoch(loader, moment.epoch)
    set_random_state(random, trainer.strategy.root_device)

    # Lightning has not loaded them where it took the epoch for over
    later = loaded_later(trainer)
    states = data.loaders or later
    if states:
        stateful = [loader for loader in loaders if hasattr(loader, "load_state_dict")]
        for loader, state in zip(stateful, states, strict=True):
            loader.load_state_dict(state)

    at_batch = (moment.begun and not moment.trained) or (not moment.begun and moment.epoch == 0)
    if at_batch and MID_EPOCH.works(trainer):
        unknown = {"iterator": {"random": without_device(random), "generators": []}, "batch": None}
        begin.load_state_dict(data.epoch_start or unknown, begun=moment.begun)
        _restore_iterator(trainer, moment, bool(states), data.ahead, begin)
        set_random_state(random, trainer.strategy.root_device)
    begin.set_generators((data.epoch_start or {}).get("now", []))
    return moment


def _restore_iterator(
    trainer: pl.Trainer,
    moment: Moment,
    loaded: bool,
    ahead: Sequence[Any] | None,
    begin: EpochStart,
) -> None:
    """Make the iterator of an epoch of which some batches have been trained on."""
    fetcher, loaders = data_fetcher(trainer), training_loaders(trainer)
    if any(hasattr(loader, "load_state_dict") for loader in loaders):
        if ahead is None:
            rank_zero_warn(
                "A batch that was read ahead when the checkpoint was written is left out: it holds"
                " more than tensors and plain values, which is not read from a rank's file."
            )
        if ahead:
            fetcher.iterator = iter(fetcher.combined_loader)  # `iter(fetcher)` would read ahead
            fetcher.reset()
            fetcher.batches = list(ahead)
        elif loaded:
            iter(fetcher)
    elif fetcher.length is None:
        if moment.batches:
            rank_zero_warn(
                "The training data has neither a length nor a `state_dict`, so its place in the"
                " middle of an epoch is unknown: the resumed fit begins with its first batch. Give"
                " the loader `state_dict` and `load_state_dict` to resume exactly."
            )
    else:
        for loader in loaders:
            if moment.epoch == 0 and getattr(loader, "_iterator", None) is not None:
                loader._iterator = None  # workers that persist; `setup_data` gave them other seeds
        begin.set_for_iterator()
        iter(fetcher)
        assert fetcher.iterator is not None, "`iter` has made it"
        begin.set_for_batch()
        for _ in range(moment.batches):
            next(fetcher.iterator)  # not through the fetcher, which Lightning sets itself


def _begin_epoch(loader: Any, epoch: int) -> None:
    """Tell a loader's samplers which epoch it is, as Lightning does at an epoch's beginning."""
    for owner in (loader, getattr(loader, "batch_sampler", None)):
        sampler: Any = getattr(owner, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
