"""Exact resume: one object of a strategy's, called in the order in which its methods stand here.

A checkpoint stays a normal one. What only one rank knows is that rank's *part* of it, a dictionary
whose entries `_part_of` lists. Rank 0's part lies in the checkpoint, those of the others in files
beside it (`rank_files`). A fit that resumes on as many ranks with the same settings goes on bit for
bit. Any other one starts from the checkpoint's weights and takes of the parts what its strategy can
still use (`RankState.adopt`), and a message says why. What an exact one does not restore, in rare
cases, another message says.

Tensors of the module that are neither trained nor averaged, and may differ from rank to rank.

Hooks move them: the weights of a mean teacher, counters, a queue, a cache. A checkpoint holds those
of rank 0, and of non-persistent buffers none. A rank's part has all persistent ones, of which those
that are equal to rank 0's are references that take no room, and such non-persistent ones as are not
what they were when the fit began. What is trained is not among them, nor floating-point buffers of
a checkpoint: the strategy restores them.

The ranks of a job save as one: a part of each, and what goes with the checkpoints before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_commfree.comm.digest import digest
from lightning_commfree.lightning_internals import Patches, in_accumulation
from lightning_commfree.model.shards import own
from lightning_commfree.resume.checkpoint_io import writes_later
from lightning_commfree.resume.data_position import (
    EpochStart,
    data_state,
    half_accumulated,
    not_saved,
    restore_place,
)
from lightning_commfree.resume.files import FilePath
from lightning_commfree.resume.loops import open_plateaus, restore_loops
from lightning_commfree.resume.rank_files import Key, Owner, RankFiles, SavedParts, copied, plain
from lightning_commfree.resume.rank_state import (
    Agreeing,
    Part,
    RankState,
    ReplicaState,
    Saved,
    failing_as_one,
)


class OwnTensors:
    """Those of one fit.

    Args:
        module: as every fit finds it, on all ranks alike; nothing has been restored into it that
            only this rank knows.
        optimizers: of this rank; what they train is left out.
    """

    def __init__(self, module: nn.Module, optimizers: Iterable[Optimizer]) -> None:
        self._module = module
        self._optimizers = optimizers
        self._at_begin = _digests(self._split()[1])

    def state(self) -> dict[str, Tensor]:
        """Return what rank 0 may have otherwise: the module's own tensors, not copies."""
        persistent, others = self._split()
        now = _digests(others)
        changed = {
            name: tensor for name, tensor in others.items() if now[name] != self._at_begin.get(name)
        }
        return {name: tensor.detach() for name, tensor in {**persistent, **changed}.items()}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Put back what `state` returned; a buffer that has another size now is replaced."""
        tensors = {name: tensor for kind in self._split() for name, tensor in kind.items()}
        for name, saved in state.items():
            tensor = tensors.get(name)
            if tensor is not None and tensor.shape == saved.shape:
                tensor.copy_(saved)
            elif not isinstance(tensor, nn.Parameter):
                self._replace(name, saved if tensor is None else saved.to(tensor))

    def _replace(self, name: str, buffer: Tensor) -> None:
        owner, _, own_name = name.rpartition(".")
        module = self._module.get_submodule(owner)
        if own_name in module._buffers:
            module._buffers[own_name] = buffer

    def _split(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return what a checkpoint holds of rank 0, and what it does not hold."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        trained = {p for group in groups for p in group["params"] if p.requires_grad}
        kept = self._module.state_dict(keep_vars=True)
        persistent: dict[str, Tensor] = {}
        others: dict[str, Tensor] = {}
        for name, parameter in self._module.named_parameters():
            if parameter not in trained:
                persistent[name] = parameter
        for name, buffer in self._module.named_buffers():
            if name not in kept:
                others[name] = buffer
            elif not buffer.is_floating_point():
                persistent[name] = buffer
        return _with_values(persistent), _with_values(others)


def accumulate_further(module: nn.Module, gradients: Mapping[str, Tensor]) -> None:
    """Put back what `gradients_of` returned, ahead of a resumed fit's first batch."""
    for name, gradient in gradients.items():
        parameter = module.get_parameter(name)
        parameter.grad = gradient.to(parameter.device, parameter.dtype)


def _with_values(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: own(tensor)
        for name, tensor in tensors.items()
        if not (is_lazy(tensor) or tensor.is_meta) and tensor.layout == torch.strided
    }


def _digests(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    found = {name: digest(tensor.detach().contiguous()) for name, tensor in tensors.items()}
    return {name: int(value) for name, value in found.items()}


class Saving:
    """What the ranks save and remove.

    Args:
        ranks: as they tell each other.
    """

    def __init__(self, ranks: Agreeing) -> None:
        self._ranks = ranks
        self._removed: list[FilePath] = []  # checkpoints, by rank 0, since the last save

    def save(
        self,
        checkpoint: dict[str, Any],
        filepath: FilePath,
        step: int,
        algorithm: RankState,
        part: Part,
        write: Callable[[FilePath], None],
        later: bool = False,
    ) -> None:
        """Write the ranks' files, then the checkpoint, then remove the files of its predecessor.

        Collective.

        Args:
            checkpoint: gets rank 0's part.
            filepath: where to; rank 0's counts.
            step: optimizer steps done.
            algorithm: that keeps the ranks together.
            part: this rank's.
            write: writes `checkpoint`.
            later: it may still be writing when it returns.

        Raises:
            RuntimeError: a file cannot be written; on all ranks.
        """
        ranks = self._ranks
        # a file's name, and which one goes, may depend on a metric that is not the same everywhere
        token = f"{step}-{time.time_ns():x}"
        filepath, token, removed = ranks.broadcast((filepath, token, self._removed))
        # a name that is free again may be this one, whose files another rank writes already
        self._forget([path for path in removed if path != filepath])

        files, owner = RankFiles(filepath), Owner(ranks.rank, ranks.size, token)
        known: set[Key] = set()
        if owner.rank == 0:
            said = algorithm.name, algorithm.fingerprint()
            known = files.enter(checkpoint, owner, *said, part)
        known = ranks.broadcast(known)
        with failing_as_one(ranks):
            if owner.rank:
                files.save(owner, part, known)

        write(filepath)
        # one that is written later may not be there yet, and its predecessor still needs the set
        # before; by the next save it is taken to be there
        files.keep_only(token, spare=int(later))

    def remove(self, filepath: FilePath) -> None:
        """Remove the files of a checkpoint that rank 0 removes.

        Those on disks of other nodes go with the next save, or in `settle`.
        """
        if self._ranks.rank == 0:
            RankFiles(filepath).remove()
            self._removed.append(filepath)

    def settle(self) -> None:
        """Remove what is left to be removed; collective."""
        self._forget(self._ranks.broadcast(self._removed))

    def _forget(self, removed: list[FilePath]) -> None:
        """Remove this node's files of checkpoints that rank 0 has removed."""
        for path in removed:
            RankFiles(path).remove()
        self._removed = []


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
