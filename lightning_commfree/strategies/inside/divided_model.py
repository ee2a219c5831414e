"""A model that is divided among the ranks of a replica, whatever divides it.

It is divided before the optimizer is made. Its checkpoints are whole files, and nobody holds
all of one: where our own plugin writes to a disk, rank 0 has stand-ins in the checkpoint and asks
for their values while it writes (`comm.wholes`). Hooks may keep, rename or remove stand-ins. Where
another plugin writes, or to another file system, and outside of a fit, rank 0 puts everything
together.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_commfree.checkpoint.whole_files import FilePath, local_path
from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.division import check_optimizers
from lightning_commfree.comm.materialize import described, on_meta
from lightning_commfree.comm.sharing import START_TAG, common_start
from lightning_commfree.comm.wholes import OneAtATime, Wholes
from lightning_commfree.resume.checkpoint_io import WholeCheckpointIO

if TYPE_CHECKING:
    from lightning_commfree.strategies.base import ReplicaStrategy


class DividedModel:
    """The model of a fit, from before it is divided to the end.

    Args:
        strategy: whose ranks divide it.

    Attributes:
        was_on_meta: it had no values when it was divided.
    """

    def __init__(self, strategy: ReplicaStrategy) -> None:
        self._strategy = strategy
        self._undivided: set[nn.Parameter] = set()
        self.was_on_meta = False
        self._one_at_a_time: OneAtATime | None = None  # while `Trainer.save_checkpoint` runs

    @property
    def restores_after_setup(self) -> bool:
        """Whether a checkpoint has room in it only once it is divided: it is on `meta`."""
        module = self._strategy.lightning_module
        return self.was_on_meta or (module is not None and bool(on_meta(module)))

    def start(self, world: Channel) -> int:
        """Start all ranks from the same undivided model; return a seed that they have alike."""
        module = self._strategy.module
        self.was_on_meta = self.restores_after_setup
        common_start(world, module, {**self._strategy.fingerprint(), **described(module)})
        self._undivided = set(module.parameters())
        seed = torch.tensor(torch.initial_seed() % 2**31)
        return int(world.broadcast(seed, START_TAG).wait())

    def begin(self, optimizers: Sequence[Optimizer]) -> None:
        """Look at the optimizers, and let the fit's checkpoints be put together when written.

        Raises:
            ValueError: an optimizer holds parameters of the undivided model.
        """
        check_optimizers(optimizers, self._undivided - set(self._strategy.module.parameters()))
        self._undivided = set()
        self._put_together_while_written()

    def end(self) -> None:
        """The fit is over."""
        self.was_on_meta = False

    # -- checkpoints

    def writing(self) -> AbstractContextManager[None]:
        """In the body rank 0 writes, and the others of its replica answer."""
        first = self._strategy.global_rank < self._strategy.inside.size
        if self._one_at_a_time is None or not first:
            return nullcontext()
        return self._one_at_a_time.writing()

    def wholes(self) -> Wholes:
        """Return what puts tensors together now."""
        return self._one_at_a_time or Wholes(self._strategy.is_global_zero)

    def _put_together_while_written(self) -> None:
        strategy, trainer = self._strategy, self._strategy.module.trainer
        save = trainer.save_checkpoint

        def save_one_at_a_time(filepath: FilePath, *args: Any, **kwargs: Any) -> None:
            options = kwargs.get("storage_options", args[1] if len(args) > 1 else None)
            ours = type(strategy.checkpoint_io) is WholeCheckpointIO and options is None
            if ours and local_path(filepath) is not None:
                within = strategy.channels.within
                self._one_at_a_time = OneAtATime(strategy.is_global_zero, within)
            try:
                save(filepath, *args, **kwargs)
            finally:
                self._one_at_a_time = None

        strategy.patches.put(trainer, "save_checkpoint", save_one_at_a_time)
