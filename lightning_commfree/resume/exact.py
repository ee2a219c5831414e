"""Exact resume: one object of a strategy's, called in the order in which its methods stand here.

A checkpoint stays a normal one. What only one rank knows is that rank's *part* of it, a dictionary
whose entries `_part_of` lists. Rank 0's part lies in the checkpoint, those of the others in files
beside it (`rank_files`). A fit that resumes on as many ranks with the same settings goes on bit for
bit. Any other one starts from the checkpoint's weights and takes of the parts what its strategy can
still use (`RankState.adopt`), and a message says why. What an exact one does not restore, in rare
cases, another message says.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_commfree.checkpoint.own_tensors import OwnTensors, accumulate_further
from lightning_commfree.checkpoint.rank_files import SavedParts
from lightning_commfree.checkpoint.rank_parts import copied, plain
from lightning_commfree.checkpoint.rank_state import (
    Agreeing,
    Part,
    RankState,
    ReplicaState,
    Saved,
    failing_as_one,
)
from lightning_commfree.checkpoint.saving import Saving
from lightning_commfree.checkpoint.whole_files import FilePath
from lightning_commfree.loop_counters import in_accumulation
from lightning_commfree.patches import Patches
from lightning_commfree.resume.checkpoint_io import writes_later
from lightning_commfree.resume.epoch_start import EpochStart
from lightning_commfree.resume.loops import open_plateaus, restore_loops
from lightning_commfree.resume.position import (
    data_state,
    half_accumulated,
    not_saved,
    restore_place,
)


@dataclass
class _Fit:
    """A fit from `begin` to `end`."""

    trainer: pl.Trainer
    owner: RankState
    inside: ReplicaState
    tensors: OwnTensors


@dataclass
class _Source:
    """The checkpoint that a fit resumes from."""

    path: FilePath
    checkpoint: dict[str, Any]
    saved: Saved
    mine: Part | None  # this rank's part, where as many ranks had saved it and it is there


class ExactResume:
    """Saves what only one rank knows, and puts it back.

    Args:
        strategy: whose ranks save and resume.
        ranks: the same, as they tell each other.
    """

    def __init__(self, strategy: DDPStrategy, ranks: Agreeing) -> None:
        self._strategy, self._ranks, self._saving = strategy, ranks, Saving(ranks)
        self._fit: _Fit | None = None
        self._source: _Source | None = None
        self._part: Part | None = None  # what this rank goes on with, until all of it is in place

    def install(self, trainer: pl.Trainer, patches: Patches) -> None:
        """Watch a fit's random numbers from its first loader on; in `setup_environment`."""
        self._epoch_start = EpochStart(trainer, patches)

    # -- resuming

    def read(
        self, path: FilePath, checkpoint: dict[str, Any], weights_only: bool | None = None
    ) -> None:
        """Read this rank's part of a checkpoint that a fit resumes; after `load_checkpoint`.

        Collective.

        Args:
            path: where the checkpoint was read.
            checkpoint: as it was read. Schedulers of this rank's own replace those of rank 0, as
                Lightning restores them later.
            weights_only: as `Trainer.fit` got it; None stands for True.

        Raises:
            RuntimeError: a part is another rank's, of another save, or damaged; on all ranks.
        """
        strategy, module = self._strategy, self._strategy.lightning_module
        fits = module is not None and module.trainer.state.fn == TrainerFn.FITTING
        if not fits or (self._fit is not None and not strategy.restore_checkpoint_after_setup):
            return  # somebody looks at a file
        saved, mine = Saved(SavedParts(path, checkpoint, weights_only), self._ranks), None
        if saved.entry.get("ranks") == self._strategy.world_size:
            (mine,) = saved.load([self._strategy.global_rank])
        self._source = _Source(path, checkpoint, saved, mine)
        if self._fit is not None:
            self._take(self._fit, self._source)

    def begin(self, trainer: pl.Trainer, owner: RankState, inside: ReplicaState) -> None:
        """Begin a fit, and put this rank's own weights and tensors in place if it resumes.

        Collective; in `setup`, when module, optimizers and algorithm stand. A checkpoint that is
        restored after setup is put in place by `read`.

        Args:
            trainer: of the fit.
            owner: the algorithm.
            inside: what holds this rank's replica.
        """
        tensors = OwnTensors(trainer.lightning_module, self._strategy.optimizers)
        self._fit = _Fit(trainer, owner, inside, tensors)
        if self._source is not None:
            self._take(self._fit, self._source)

    def go_on(self) -> bool:
        """Bring loops, data and random numbers to where they were; in `on_train_start`.

        Returns:
            Whether this rank has something of its own back.
        """
        fit, part = self._fit, self._part
        if fit is None or part is None:
            return False
        self._part = None
        if self._strategy.restore_checkpoint_after_setup:
            self._put_own_weights(fit, part)
        if "random" not in part:
            restore_loops(fit.trainer)
            return bool(part)
        lost = [*part["lost"], *restore_place(fit.trainer, self._epoch_start, part)]
        accumulate_further(fit.trainer.lightning_module, part.get("gradients", {}))
        if lost:
            rank_zero_warn(f"The fit goes on where it was saved, but: {'; '.join(lost)}.")
        return True

    def _take(self, fit: _Fit, source: _Source) -> None:
        """Put in place what has to be before Lightning restores the rest."""
        self._source = None
        part = source.mine or {}
        if reason := source.saved.why_not_exact(fit.owner, bool(part), self._strategy.world_size):
            part, said = source.saved.adopted_by(fit.owner)
            rank_zero_warn(
                f"The fit does not go on exactly where {str(source.path)!r} was saved: {reason}."
                f" Every rank starts from the checkpoint's weights, {said}."
            )
        self._part = part

        # Lightning, which restores them later, has saved those of rank 0 only
        if part.get("schedulers"):
            source.checkpoint["lr_schedulers"] = part["schedulers"]
        if "optimizers" in part:
            source.checkpoint["optimizer_states"] = part["optimizers"]
        if part.get("precision"):  # nothing without a gradient scaler, which takes no nothing
            plugin = type(self._strategy.precision_plugin).__qualname__
            source.checkpoint[plugin] = part["precision"]
        if not self._strategy.restore_checkpoint_after_setup:  # else Lightning's weights come later
            self._put_own_weights(fit, part)

    def _put_own_weights(self, fit: _Fit, part: Part) -> None:
        # first: what the algorithm exchanges is its own to restore
        fit.tensors.load(part.get("tensors", {}))
        if "algorithm" in part:
            fit.owner.load_state_dict(part["algorithm"])
        if "inside" in part:
            fit.inside.load_state_dict(part["inside"])

    # -- saving

    def save(self, checkpoint: dict[str, Any], filepath: FilePath, options: Any = None) -> None:
        """Write a checkpoint, and in a fit the parts of all ranks; collective.

        Args:
            checkpoint: gets rank 0's part.
            filepath: where to; rank 0's counts.
            options: for the plugin that writes.

        Raises:
            RuntimeError: a file cannot be written; on all ranks.
        """
        write = partial(self._write, checkpoint, options)
        if self._fit is None or "optimizer_states" not in checkpoint:  # weights only
            write(filepath)
            return
        strategy, fit = self._strategy, self._fit
        part = _part_of(strategy, fit, checkpoint, self._epoch_start)
        step, later = fit.trainer.global_step, writes_later(strategy.checkpoint_io)
        self._saving.save(checkpoint, filepath, step, fit.owner, part, write, later)

    def remove(self, filepath: FilePath) -> None:
        """Remove the files of a checkpoint that rank 0 removes; in `remove_checkpoint`."""
        self._saving.remove(filepath)

    def settle(self) -> None:
        """Remove what is left to be removed; collective, in `on_train_end`."""
        if self._fit is not None:
            self._saving.settle()

    def _write(self, checkpoint: dict[str, Any], options: Any, filepath: FilePath) -> None:
        """Write a checkpoint on rank 0."""
        writing = nullcontext() if self._fit is None else self._fit.inside.writing()
        with failing_as_one(self._ranks), writing:
            if self._strategy.is_global_zero and writes_later(self._strategy.checkpoint_io):
                # Lightning before 2.6 writes what the tensors have become meanwhile
                checkpoint = copied(checkpoint)
            DDPStrategy.save_checkpoint(self._strategy, checkpoint, filepath, options)

    def end(self) -> None:
        """Forget the fit; in `teardown`."""
        self._fit = self._source = self._part = None


def _part_of(
    strategy: DDPStrategy, fit: _Fit, checkpoint: Mapping[str, Any], begin: EpochStart
) -> Part:
    """Return what only this rank knows; no copies."""
    part: Part = {
        "algorithm": fit.owner.state_dict(),
        "inside": fit.inside.state_dict(),
        "gradients": half_accumulated(fit.trainer),
        "schedulers": plain(checkpoint.get("lr_schedulers")),
        **data_state(fit.trainer, checkpoint, begin),
    }
    part["lost"] = not_saved(checkpoint, part, strategy.world_size) + open_plateaus(fit.trainer)
    if in_accumulation(fit.trainer) and not part["gradients"]:
        part["lost"].append(
            "the gradients of an optimizer step that was half accumulated are lost: FSDP keeps them"
            " to itself until the step"
        )
    if fit.owner.replicas:
        part |= {
            # Lightning's own: a strategy may put whole states together for the checkpoint
            "optimizers": [
                DDPStrategy.optimizer_state(strategy, one) for one in strategy.optimizers
            ],
            "precision": strategy.precision_plugin.state_dict(),
            "tensors": fit.tensors.state(),
        }
    return part
