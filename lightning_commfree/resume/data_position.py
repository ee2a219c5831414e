"""Going on in the middle of an epoch: random numbers, the place in the data, gradients.

Lightning restores the loops (with help from `loops`), but neither the random number generators nor
the position of a loader that has no `state_dict` of its own: it hands out the epoch's first batches
again. Nor has it the gradients of batches whose optimizer step is still to come.

The states of random number generators, in a form that a checkpoint can hold.

Those of the process, and those that data loaders and their samplers have of their own.

The random numbers with which an epoch's data were begun, for a resume in its middle.

A sampler that shuffles draws once an epoch, from the global generator or from one of its own: when
the first batch is read or, with worker processes, when the iterator is made, which gives them their
seeds too. A resumed fit makes the iterator and reads the first batch with the same numbers; it then
draws the same order, and the workers the same numbers.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import CombinedLoader
from lightning_utilities.core.imports import module_available
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

from lightning_commfree.lightning_internals import (
    MID_EPOCH,
    Patches,
    data_fetcher,
    in_accumulation,
    loaded_later,
    reloaded_at,
)
from lightning_commfree.resume.loops import Moment, left_out, restore_loops
from lightning_commfree.resume.rank_files import plain

Drawn = dict[str, Any]  # "random": of the host; "generators": of loaders and samplers


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the states of Python's, numpy's, torch's and, on a CUDA device, its generator.

    Only tensors and plain values, which load with `weights_only=True`.
    """
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if device.type == "cuda":  # not of all that the process sees: it may see others at the resume
        states["device"] = torch.cuda.get_rng_state(device)
    if module_available("numpy"):
        import numpy as np

        kind, keys, *rest = np.random.get_state()
        states["numpy"] = (kind, [int(key) for key in keys], *rest)
    return states


def set_random_state(states: Mapping[str, Any], device: torch.device) -> None:
    """Draw from here on as at the moment at which `random_state` returned `states`."""
    torch.set_rng_state(states["torch"])
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))  # a tuple may come back as a list
    if "numpy" in states and module_available("numpy"):
        import numpy as np

        np.random.set_state(states["numpy"])
    if device.type == "cuda" and "device" in states:
        torch.cuda.set_rng_state(states["device"].cpu(), device)


def loader_generators(loaders: Iterable[object]) -> list[torch.Generator]:
    """Return the generators of loaders and their samplers, each once; the global one is not one."""
    seen: dict[int, object] = {}
    parts = list(loaders)
    while parts:
        part = parts.pop(0)
        if part is None or id(part) in seen:
            continue
        seen[id(part)] = part
        names = ("generator", "sampler", "batch_sampler")
        parts += [getattr(part, name, None) for name in names]
        if isinstance(part, DistributedSampler):  # it may wrap a sampler, as Lightning's does
            inside = getattr(part.dataset, "__dict__", {}).values()
            parts += [one for one in inside if isinstance(one, Iterable)]
    return [part for part in seen.values() if isinstance(part, torch.Generator)]


def drawn(loaders: Iterable[object]) -> Drawn:
    """Return where the host's random numbers stand, and those of loaders."""
    generators = [generator.get_state() for generator in loader_generators(loaders)]
    return {"random": random_state(torch.device("cpu")), "generators": generators}


def set_drawn(state: Drawn | None, loaders: Iterable[object]) -> None:
    """Draw from here on as at the moment at which `drawn` returned `state`, if there is one."""
    if state is not None:
        set_random_state(state["random"], torch.device("cpu"))
        set_generators(state["generators"], loaders)


def set_epoch(epoch: int, loaders: Iterable[object]) -> None:
    """Tell the loaders' samplers which epoch it is; some draw their order from its number."""
    for loader in loaders:
        for owner in (loader, getattr(loader, "batch_sampler", None)):
            sampler: Any = getattr(owner, "sampler", None)
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)


def set_generators(states: Sequence[Tensor], loaders: Iterable[object]) -> None:
    """Let generators of loaders and samplers go on from `states`."""
    generators = loader_generators(loaders)
    if len(generators) == len(states):  # else these are other loaders
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


class EpochStart:
    """Notes random numbers at two moments of an epoch.

    1. Before its iterator is made: the first epoch's when Lightning has prepared the loaders, those
       of later epochs when Lightning's loop begins them.
    2. Before its first batch is read.

    A shorter one of several loaders, which Lightning begins again within the epoch, draws its
    second order from the numbers of that moment, which are not noted.

    Args:
        trainer: begins a fit, and has not made its loaders.
        patches: get what stands before two methods of its own objects.

    Attributes:
        iterator: the random numbers with which this epoch's iterator was made; None: it was not.
        batch: those with which its first batch was read.
    """

    def __init__(self, trainer: pl.Trainer, patches: Patches) -> None:
        self._trainer, self._restored = trainer, False
        self.iterator: Drawn | None = None
        self.batch: Drawn | None = None
        # at the latest preparation of a training loader
        self._host: dict[str, Any] | None = None
        self._prepared: dict[torch.Generator, Tensor] = {}
        strategy, loop = trainer.strategy, trainer.fit_loop.epoch_loop
        prepare, begin = strategy.process_dataloader, loop.on_run_start

        def note_and_prepare(loader: object) -> object:
            if trainer.training:  # else it is a loader of a validation
                self._host = random_state(torch.device("cpu"))
                self._prepared |= {own: own.get_state() for own in loader_generators([loader])}
            return prepare(loader)

        def note_and_begin(fetcher: Any) -> None:
            before, made = self._now(), fetcher.iterator
            fetcher.iterator = None  # to see whether it gets a new one: not in the first epoch
            begin(fetcher)
            is_new = fetcher.iterator is not None
            if not is_new:
                fetcher.iterator = made

            if self._restored:  # this epoch was begun before the save
                self._restored = False
                return
            self.iterator = before if is_new else self._when_prepared()
            self.batch = self._now()

        patches.put(strategy, "process_dataloader", note_and_prepare)
        patches.put(loop, "on_run_start", note_and_begin)

    def state_dict(self) -> dict[str, Any]:
        """Return what was noted, None for a moment that has not been; and the generators' now."""
        iterator = self._when_prepared() if self.iterator is None else self.iterator
        return {"iterator": iterator, "batch": self.batch, "now": self._now()["generators"]}

    def load_state_dict(self, state: dict[str, Any], begun: bool) -> None:
        """Take what `state_dict` returned.

        Args:
            state: of the save.
            begun: the resumed fit begins in the middle of an epoch, whose beginning this is.
        """
        self.iterator, self.batch, self._restored = state["iterator"], state["batch"], begun

    def _now(self) -> Drawn:
        return drawn(training_loaders(self._trainer))

    def _when_prepared(self) -> Drawn | None:
        """Return the state at the first of the two moments, of the first epoch."""
        if self._host is None:
            return None
        generators = loader_generators(training_loaders(self._trainer))
        states = [self._prepared.get(own, own.get_state()) for own in generators]
        return {"random": self._host, "generators": states}


def training_loaders(trainer: pl.Trainer) -> list[Any]:
    """Return the loaders of the training data, none before Lightning has prepared them."""
    loaders = trainer.train_dataloader
    return [] if loaders is None else CombinedLoader(loaders).flattened


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
    With manual optimization nobody but the module knows whether it will still use what is there.
    """
    module = trainer.lightning_module
    kept = in_accumulation(trainer) or not module.automatic_optimization
    return gradients_of(module) if kept else {}


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


def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the gradients that are there, by parameter; not copies."""
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
