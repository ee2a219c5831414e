"""The random numbers with which an epoch's data were begun, for a resume in its middle.

A sampler that shuffles draws once an epoch, from the global generator or from one of its own: when
the first batch is read or, with worker processes, when the iterator is made, which gives them their
seeds too. A resumed fit makes the iterator and reads the first batch with the same numbers; it then
draws the same order, and the workers the same numbers.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor

from lightning_commfree.checkpoint.random_state import (
    Drawn,
    drawn,
    loader_generators,
    random_state,
)
from lightning_commfree.patches import Patches


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
