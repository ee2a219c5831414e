"""Checkpoints that were written before a fit had found that it ends."""

from __future__ import annotations

import os

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_commfree.resume.files import FilePath


def scores_its_saves(trainer: pl.Trainer) -> bool:
    """Return whether a `ModelCheckpoint` saves files under a monitored value."""
    return any(callback.monitor is not None for callback in _savers(trainer))


class EarlySaves:
    """Checkpoints of a fit that were written before its weights were the final ones.

    1. `ModelCheckpoint` saves at the end of a validation, after step 250.
    2. The epoch ends; a callback sets `trainer.should_stop`. The last exchange changes the weights.
    3. The file of step 250 is the last checkpoint and must validate like the model in memory: it is
       written again. If it bears a score it must validate to that score, and stays as it is; a link
       to it, as `ModelCheckpoint(save_last="link")` makes one, gives way to a file of its own.
    """

    def __init__(self) -> None:
        self._saves: dict[FilePath, tuple[int, bool]] = {}  # inner step, without trainer state
        self._owed: dict[FilePath, bool] = {}  # without trainer state

    def owe(self, filepath: FilePath, weights_only: bool) -> None:
        """Keep in mind that a checkpoint is still to be written, when all ranks are there."""
        self._owed[filepath] = weights_only

    def note(self, filepath: FilePath, step: int, weights_only: bool) -> None:
        """Keep in mind that a checkpoint is written, and after which inner step."""
        self._saves[filepath] = step, weights_only

    def forget(self, filepath: FilePath) -> None:
        """A checkpoint is removed."""
        self._saves.pop(filepath, None)
        self._owed.pop(filepath, None)

    def write_again(self, trainer: pl.Trainer, step: int) -> None:
        """Write those of inner step `step` again; on all ranks, which save as one."""
        # rank 0's: elsewhere the same checkpoint may have another name, and another one may go
        stale = trainer.strategy.broadcast(self._stale(trainer, step) | self._owed)
        for path, weights_only in stale.items():
            if trainer.is_global_zero and os.path.islink(path):
                os.remove(path)  # else a move to another disk would write what it points to
            trainer.save_checkpoint(path, weights_only)

    def _stale(self, trainer: pl.Trainer, step: int) -> dict[FilePath, bool]:
        """Return what must hold the final weights, by path: whether without trainer state."""
        early = {path: only for path, (after, only) in self._saves.items() if after == step}
        savers = _savers(trainer)
        scored = {
            path for saver in savers if saver.monitor is not None for path in saver.best_k_models
        }
        stale = {path: only for path, only in early.items() if str(path) not in scored}

        targets = {
            os.path.realpath(path): only for path, only in early.items() if path not in stale
        }
        for path in (saver.last_model_path for saver in savers):
            if os.path.islink(path) and os.path.realpath(path) in targets:
                stale[path] = targets[os.path.realpath(path)]
        return stale


def _savers(trainer: pl.Trainer) -> list[ModelCheckpoint]:
    callbacks = trainer.checkpoint_callbacks
    return [callback for callback in callbacks if isinstance(callback, ModelCheckpoint)]
