"""Checkpoints of a replica whose ranks hold parts of one model: whole files, and nobody holds all.

Where our own plugin writes to a disk, rank 0 has stand-ins in the checkpoint and asks for their
values while it writes (`comm.wholes`). Hooks may keep, rename or remove stand-ins. Where another
plugin writes, or to another file system, and outside of a fit, rank 0 puts everything together.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from lightning_commfree.checkpoint.whole_files import FilePath, local_path
from lightning_commfree.comm.wholes import OneAtATime, Wholes
from lightning_commfree.resume.checkpoint_io import WholeCheckpointIO

if TYPE_CHECKING:
    from lightning_commfree.strategies.base import ReplicaStrategy


class Saves:
    """How the tensors of a checkpoint are put together.

    Args:
        strategy: whose ranks.
    """

    def __init__(self, strategy: ReplicaStrategy) -> None:
        self._strategy = strategy
        self._one_at_a_time: OneAtATime | None = None  # while `Trainer.save_checkpoint` runs

    def begin(self) -> None:
        """Let a fit's checkpoints be put together while they are written."""
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

    def wholes(self) -> Wholes:
        """Return what puts tensors together now."""
        return self._one_at_a_time or Wholes(self._strategy.is_global_zero)

    def writing(self) -> AbstractContextManager[None]:
        """In the body rank 0 writes, and the others of its replica answer."""
        first = self._strategy.global_rank < self._strategy.inside.size
        if self._one_at_a_time is None or not first:
            return nullcontext()
        return self._one_at_a_time.writing()
