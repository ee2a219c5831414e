"""The random numbers with which an epoch's data were begun, for a resume in its middle.

A sampler that shuffles draws once an epoch, from the global generator or from one of its own: when
the first batch is read or, with worker processes, when the iterator is made, which gives them their
seeds too. A resumed fit makes the iterator and reads the first batch with the same numbers; it then
draws the same order, and the workers the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor

from lightning_commfree.checkpoint.random_state import random_state, set_random_state
from lightning_commfree.patches import Patches

_State = dict[str, Any]  # "random": of the host; "generators": of loaders and samplers


class EpochStart:
    """Notes random numbers, from `install` to `end`, at two moments of an epoch.

    1. Before its iterator is made: the first epoch's when Lightning has prepared the loaders, those
       of later epochs when Lightning's loop begins them.
    2. Before its first batch is read.

    A shorter one of several loaders, which Lightning begins again within the epoch, draws its
    second order from the numbers of that moment, which are not noted.
    """

    def __init__(self) -> None:
        self._trainer: pl.Trainer | None = None
        self._iterator: _State | None = None
        self._batch: _State | None = None
        self._restored = False
        # at the latest preparation of a training loader
        self._host: dict[str, Any] | None = None
        self._prepared: dict[torch.Generator, Tensor] = {}

    def install(self, trainer: pl.Trainer, patches: Patches) -> None:
        """Patch two methods of this Trainer's own objects; before it makes its loaders."""
        self._trainer, self._restored = trainer, False
        self._iterator = self._batch = self._host = None
        self._prepared = {}
        strategy, loop = trainer.strategy, trainer.fit_loop.epoch_loop
        prepare, begin = strategy.process_dataloader, loop.on_run_start

        def note_and_prepare(loader: object) -> object:
            if trainer.training:  # else it is a loader of a validation
                self._host = _host_state()
                self._prepared |= {own: own.get_state() for own in _generators([loader])}
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
            self._iterator = before if is_new else self._when_prepared()
            self._batch = self._now()

        patches.put(strategy, "process_dataloader", note_and_prepare)
        patches.put(loop, "on_run_start", note_and_begin)

    def end(self) -> None:
        """Forget the Trainer."""
        self._trainer = None

    def state_dict(self) -> dict[str, Any]:
        """Return what was noted, None for a moment that has not been; and the generators' now."""
        iterator = self._when_prepared() if self._iterator is None else self._iterator
        return {"iterator": iterator, "batch": self._batch, "now": self._now()["generators"]}

    def load_state_dict(self, state: dict[str, Any], begun: bool) -> None:
        """Take what `state_dict` returned.

        Args:
            state: of the save.
            begun: the resumed fit begins in the middle of an epoch, whose beginning this is.
        """
        self._iterator, self._batch, self._restored = state["iterator"], state["batch"], begun

    def set_for_iterator(self) -> None:
        """Draw as when the epoch's iterator was made, if that is known."""
        self._set(self._iterator)

    def set_for_batch(self) -> None:
        """Draw as when the epoch's first batch was read, if it has been."""
        self._set(self._batch)

    def set_generators(self, states: Sequence[Tensor]) -> None:
        """Let generators of loaders and samplers go on from `states`, "now" of `state_dict`."""
        generators = self._generators()
        if len(generators) == len(states):  # else these are other loaders
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)

    def _generators(self) -> list[torch.Generator]:
        return [] if self._trainer is None else list(_generators(training_loaders(self._trainer)))

    def _now(self) -> _State:
        generators = [generator.get_state() for generator in self._generators()]
        return {"random": _host_state(), "generators": generators}

    def _when_prepared(self) -> _State | None:
        """Return the state at the first of the two moments, of the first epoch."""
        if self._host is None:
            return None
        generators = [self._prepared.get(own, own.get_state()) for own in self._generators()]
        return {"random": self._host, "generators": generators}

    def _set(self, state: _State | None) -> None:
        if state is not None:
            set_random_state(state["random"], torch.device("cpu"))
            self.set_generators(state["generators"])


def training_loaders(trainer: pl.Trainer) -> list[Any]:
    """Return the loaders of the training data, none before Lightning has prepared them."""
    loaders = trainer.train_dataloader
    return [] if loaders is None else CombinedLoader(loaders).flattened


def _generators(loaders: Sequence[object]) -> Iterator[torch.Generator]:
    """Yield the generators of loaders and their samplers, each once; the global one is not one."""
    seen: set[int] = set()
    parts = list(loaders)
    while parts:
        part = parts.pop(0)
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, torch.Generator):
            yield part
            continue
        names = ("generator", "sampler", "batch_sampler")
        parts += [getattr(part, name, None) for name in names]
        if isinstance(part, DistributedSamplerWrapper):
            parts += vars(part.dataset).values()  # the sampler that it wraps is among them


def _host_state() -> dict[str, Any]:
    return random_state(torch.device("cpu"))
