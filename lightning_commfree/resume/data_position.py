"""The position in the data in the middle of an epoch: random numbers, loaders, gradients.

Lightning restores the loops (with help from `loops`), but neither random number generators nor the
position of a loader that has no `state_dict`: such a loader starts with the epoch's first batches
again. Nor does it restore the gradients of a half-accumulated optimizer step.

A loader that shuffles draws from the global generator, or from the one that it was given
(`DataLoader(generator=...)`): when its first batch is read or, with worker processes, when its
iterator is made, which also seeds the workers. `EpochStart` records the generators at both moments.
A resumed fit makes the iterator and reads the first batch with the same numbers: it gets the same
order, and the workers draw what they drew.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import CombinedLoader
from lightning_utilities.core.imports import module_available
from torch import Tensor

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

Drawn = dict[str, Any]  # "random": of the host; "generators": of the loaders


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the states of Python's, numpy's and torch's generators, and of a CUDA device's.

    Tensors and plain values alone, which load with `weights_only=True`.
    """
    version, numbers, gauss = random.getstate()
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": (version, torch.tensor(numbers), gauss),  # 625 numbers are slow to walk through
    }
    if device.type == "cuda":  # not of all visible devices: at the resume there may be others
        states["device"] = torch.cuda.get_rng_state(device)
    if module_available("numpy"):
        import numpy as np

        state: Any = np.random.get_state()
        kind, keys, *rest = state
        states["numpy"] = (kind, torch.tensor(keys.astype(np.int64)), *rest)
    return states


def set_random_state(states: Mapping[str, Any], device: torch.device) -> None:
    """Set the generators to what `random_state` returned."""
    torch.set_rng_state(states["torch"])
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    if "numpy" in states and module_available("numpy"):
        import numpy as np

        kind, keys, *rest = states["numpy"]
        np.random.set_state((kind, keys.numpy(), *rest))
    if device.type == "cuda" and "device" in states:
        torch.cuda.set_rng_state(states["device"].cpu(), device)


def loader_generators(loaders: Iterable[object]) -> list[torch.Generator]:
    """Return the generators that loaders were given, each once.

    Samplers' own are left out: every kind of sampler, and of wrapper around one, hides its
    generator in another place.
    """
    given = (getattr(loader, "generator", None) for loader in loaders)
    return list(dict.fromkeys(one for one in given if isinstance(one, torch.Generator)))


def drawn(loaders: Iterable[object]) -> Drawn:
    """Return the states of the host's generators and the loaders'."""
    generators = [generator.get_state() for generator in loader_generators(loaders)]
    return {"random": random_state(torch.device("cpu")), "generators": generators}


def set_drawn(state: Drawn | None, loaders: Iterable[object]) -> None:
    """Set the generators to what `drawn` returned, if there is a state."""
    if state is not None:
        set_random_state(state["random"], torch.device("cpu"))
        set_generators(state["generators"], loaders)


def set_epoch(epoch: int, loaders: Iterable[object]) -> None:
    """Tell the loaders' samplers the epoch; some draw their order from its number."""
    for loader in loaders:
        for owner in (loader, getattr(loader, "batch_sampler", None)):
            sampler: Any = getattr(owner, "sampler", None)
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)


def set_generators(states: Sequence[Tensor], loaders: Iterable[object]) -> None:
    """Set the loaders' generators."""
    generators = loader_generators(loaders)
    if len(generators) == len(states):  # else these are other loaders
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


class EpochStart:
    """Records random numbers at two moments of an epoch.

    1. Before its iterator is made: of the first epoch when Lightning has prepared the loaders, of
       later epochs when Lightning's loop begins them.
    2. Before its first batch is read.

    Not recorded: the moment within an epoch at which Lightning starts a shorter one of several
    loaders again.

    Args:
        trainer: begins a fit, and has not made its loaders.
        patches: get functions that run around two methods of the Trainer's objects.

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
            fetcher.iterator = None  # to find out whether it gets a new one: not in the first epoch
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
        """Return the records, None for a moment to come, and the loaders' generators now."""
        iterator = self._when_prepared() if self.iterator is None else self.iterator
        return {"iterator": iterator, "batch": self.batch, "now": self._now()["generators"]}

    def load_state_dict(self, state: dict[str, Any], begun: bool) -> None:
        """Restore the records of a save.

        Args:
            state: as `state_dict` returned it.
            begun: the resumed fit begins in the middle of the epoch that they are of.
        """
        self.iterator, self.batch, self._restored = state["iterator"], state["batch"], begun

    def _now(self) -> Drawn:
        return drawn(training_loaders(self._trainer))

    def _when_prepared(self) -> Drawn | None:
        """Return the record of the first moment in the first epoch."""
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
    """Return this rank's position in the training data.

    Args:
        trainer: in its fit.
        checkpoint: as Lightning dumps it on this rank.
        begin: of this Trainer.

    Returns:
        "loaders": the states of loaders that have a `state_dict`, None where they need pickle, so
        that Lightning restores rank 0's; "ahead": batches that were read and not trained on (one,
        of data without a length), None where they need pickle; "epoch_start"; "random".
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
    """Return the gradients of a half-accumulated optimizer step by parameter, not copies.

    Empty between two accumulations, when an optimizer step has used the gradients. With manual
    optimization only the module knows whether it will use those that are there.
    """
    module = trainer.lightning_module
    if module.automatic_optimization and not in_accumulation(trainer):
        return {}
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def not_saved(
    trainer: pl.Trainer, checkpoint: Mapping[str, Any], own: Mapping[str, Any]
) -> list[str]:
    """Return texts on what an exact resume from now will not restore.

    Args:
        trainer: in its fit.
        checkpoint: as Lightning dumps it.
        own: this rank's own state, from it.
    """
    texts = needing_pickle(checkpoint, own, trainer.world_size)
    if in_accumulation(trainer) and not own["gradients"]:
        texts.append(
            "the gradients of an optimizer step that was half accumulated are lost: FSDP keeps them"
            " to itself until the step"
        )
    return texts + _skipped_schedulers(trainer)


def needing_pickle(checkpoint: Mapping[str, Any], own: Mapping[str, Any], ranks: int) -> list[str]:
    """Return texts on states that only rank 0 saves, or no rank, because they need pickle."""
    texts, shared = [], "holds more than tensors and plain values, and every rank gets rank 0's"
    # a single rank loses nothing that Lightning saves
    if ranks > 1 and own["loaders"] is None and _loader_states(checkpoint):
        texts.append(f"the state of a training data loader {shared}")
    if ranks > 1 and own["schedulers"] is None and checkpoint.get("lr_schedulers"):
        texts.append(f"the state of a learning-rate scheduler {shared}")
    if own["ahead"] is None:
        texts.append(
            "a batch that had been read ahead is left out: it holds more than tensors and plain"
            " values"
        )
    return texts


def _skipped_schedulers(trainer: pl.Trainer) -> list[str]:
    """Return texts on schedulers that watch a metric: after a resume from now they skip a step.

    Lightning does not save metrics, and skips the step of such a scheduler for the batch and at
    the end of the epoch in which the checkpoint was written.
    """
    epoch: Any = trainer.fit_loop.epoch_progress.current
    if epoch.completed == epoch.started:  # the step of the last epoch was taken
        return []
    return [
        f"the scheduler that watches {config.monitor!r} leaves out its step for the batch or at the"
        " end of the epoch of the save, as Lightning does not keep metrics. Save in"
        " `on_train_epoch_start`, or schedule by steps, to resume exactly"
        for config in trainer.lr_scheduler_configs
        if config.reduce_on_plateau
    ]


def _loader_states(checkpoint: Mapping[str, Any]) -> Any:
    loops: Any = checkpoint.get("loops", {})
    return loops.get("fit_loop", {}).get("state_dict", {}).get("combined_loader")


def restore_place(trainer: pl.Trainer, begin: EpochStart, own: Mapping[str, Any]) -> list[str]:
    """Restore loops, loaders and random numbers; the last thing before training.

    1. Saved in the middle of an epoch: the epoch's order is drawn again from the recorded random
       numbers, the batches that were trained on are read and dropped, then the random numbers of
       the save are set.
    2. Saved at the end of an epoch, or after its last batch: the random numbers are set; Lightning
       makes the next epoch's iterator, which draws from them.

    A loader with a `state_dict` restores its own position.

    Args:
        trainer: in `Strategy.on_train_start` of a resumed fit.
        begin: of this Trainer; gets the records of the epoch.
        own: this rank's own state, with the entries of `data_state`.

    Returns:
        Texts on what is not as it was.
    """
    loop = trainer.fit_loop
    opened = loop.restarted_on_epoch_start  # saved in `on_train_epoch_start`
    moment = restore_loops(trainer)
    loaders = training_loaders(trainer)
    if every := int(cast(Any, trainer).reload_dataloaders_every_n_epochs):
        latest = moment.epoch if moment.begun or opened else max(moment.epoch - 1, 0)
        reloaded_at(trainer, latest // every * every)
    set_epoch(moment.epoch, loaders)
    set_random_state(own["random"], trainer.strategy.root_device)

    # Lightning does not load them where it takes the epoch for finished
    later = loaded_later(trainer)
    states = own["loaders"] or later
    if states:
        stateful = [loader for loader in loaders if hasattr(loader, "load_state_dict")]
        for loader, state in zip(stateful, states, strict=True):
            loader.load_state_dict(state)

    texts = left_out(trainer, moment)
    at_batch = (moment.begun and not moment.trained) or (not moment.begun and moment.epoch == 0)
    if at_batch and MID_EPOCH.works(trainer):
        begin.load_state_dict(own["epoch_start"], begun=moment.begun)
        texts += _restore_iterator(trainer, moment, bool(states), own["ahead"] or [], begin)
        set_random_state(own["random"], trainer.strategy.root_device)
    set_generators(own["epoch_start"]["now"], loaders)
    return texts


def _restore_iterator(
    trainer: pl.Trainer, moment: Moment, loaded: bool, ahead: Sequence[Any], begin: EpochStart
) -> list[str]:
    """Make an epoch's iterator, and skip the batches that were trained on."""
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
            "the training data have neither a length nor a `state_dict`, so the fit starts with"
            " their first batch. Give the loader `state_dict` and `load_state_dict`"
        )
        return [unknown] if moment.batches else []

    for loader in loaders:
        if moment.epoch == 0 and getattr(loader, "_iterator", None) is not None:
            loader._iterator = None  # persistent workers, which `setup_data` gave other seeds
    set_drawn(begin.iterator, loaders)
    iter(fetcher)
    set_drawn(begin.batch, loaders)
    for _ in range(moment.batches):
        next(fetcher.iterator)  # not through the fetcher, whose counters Lightning restores
    return []
