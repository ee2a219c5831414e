"""Exact resume: what a checkpoint contains, and how each rank gets its own state back.

`ExactResume` belongs to a strategy, which calls its methods in the order in which they are here.
It adds one entry to a Lightning checkpoint:

    checkpoint["lightning_commfree"] = {
        "ranks", "token", "folder",      # of this save, and where its rank files are
        "algorithm", "fingerprint",      # what must be the same for an exact resume
        "shared",                        # the algorithm's state that all replicas have equally
        "own",                           # rank 0's own state; every other rank's is in its file
    }

A rank's own state has these entries (`_own_state`):

    "algorithm"                           the algorithm's: local weights, fragments in flight
    "optimizers", "precision", "tensors"  where every rank has a model of its own
    "inside", "gradients", "schedulers"   of the layout, of a half-accumulated step, of this rank
    "random", "epoch_start", "loaders", "ahead"   the position in the data: `data_position`
    "shared"                              of ranks that hold another shard than rank 0: theirs
    "lost"                                texts: what an exact resume will not restore

A fit that resumes on as many ranks with the same settings continues bit for bit. Any other fit
starts from the checkpoint's weights, uses what its algorithm can (`adopt`), and a message says why.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_commfree.lightning_internals import Patches
from lightning_commfree.resume.checkpoint_io import writes_later
from lightning_commfree.resume.data_position import (
    EpochStart,
    data_state,
    half_accumulated,
    not_saved,
    restore_place,
)
from lightning_commfree.resume.files import FilePath
from lightning_commfree.resume.folders import write_folder
from lightning_commfree.resume.loops import restore_loops
from lightning_commfree.resume.own_tensors import OwnTensors
from lightning_commfree.resume.rank_files import Owner, RankFiles, copied, local_tensors, plain

KEY = "lightning_commfree"  # the checkpoint's entry
_ENTRY = {"ranks", "token", "folder", "algorithm", "fingerprint", "shared", "own"}

State = dict[str, Any]


class Resumable(Protocol):
    """What exact resume asks of an algorithm between replicas.

    Attributes:
        name: of the algorithm; another one has no use for its state.
        replicas: every rank, or group of ranks, has a model of its own, with optimizers and
            untrained tensors of its own. Else all ranks hold shards of one, which a checkpoint puts
            together.
        free_at_resume: names in `fingerprint` that may have other values at a resume.
    """

    name: str
    replicas: bool
    free_at_resume: frozenset[str]

    def fingerprint(self) -> dict[str, str]:
        """Return the settings that must be the same for an exact resume."""

    def state_dict(self) -> tuple[State, State]:
        """Return the state that all replicas have equally, and this rank's own.

        Plain values and tensors, which need not be copies.
        """

    def load_state_dict(self, shared: State, own: State | None) -> None:
        """Put back what `state_dict` returned, into an algorithm that has not begun.

        Args:
            shared: the state of all replicas.
            own: this rank's; None: this replica joins others, and has none.
        """

    def adopt(
        self, was: Mapping[str, str], ranks: int, load: Callable[[Iterable[int]], list[State]]
    ) -> tuple[State, str] | None:
        """Choose what this rank can use of a save by other ranks or with other settings.

        Collective over the world: all ranks return something, or all return None.

        Args:
            was: the fingerprint of the save, by the same algorithm.
            ranks: that saved.
            load: returns the own states of some ranks, or nothing if any rank lacks a file.

        Returns:
            Some entries of an own state, and a text on what is kept, to follow "Every rank starts
            from the checkpoint's weights, ".
        """


@contextmanager
def failing_as_one(ranks: Any) -> Iterator[None]:
    """If the body fails on some rank, raise on all ranks: their own error, or that rank's text."""
    failure = None
    try:
        yield
    except Exception as error:  # noqa: BLE001 - raised below
        failure = error
    failed = ranks.all_flags(failure is not None)
    if any(failed):
        text = ranks.broadcast(str(failure), failed.index(True))
        raise failure or RuntimeError(text)


@dataclass
class _Fit:
    """A fit from `begin` to `end`."""

    trainer: pl.Trainer
    algorithm: Resumable
    inside: Any  # of `strategies.contracts.Inside`
    tensors: OwnTensors


class Save:
    """A checkpoint that a fit resumes from, and the rank states of its save.

    Args:
        path: where the checkpoint was read.
        checkpoint: as it was read.
        ranks: of the fit (`strategies.ranks.Ranks`).
        weights_only: as `Trainer.fit` got it; None stands for True.

    Attributes:
        entry: the checkpoint's entry, empty if it has none.

    Raises:
        RuntimeError: the entry has another format.
    """

    def __init__(
        self, path: FilePath, checkpoint: State, ranks: Any, weights_only: bool | None = None
    ) -> None:
        self.path, self.checkpoint = path, checkpoint
        self.entry: State = checkpoint.get(KEY, {})
        if self.entry and not self.entry.keys() >= _ENTRY:
            raise RuntimeError(
                f"The entry {KEY!r} of the checkpoint {str(path)!r} was written by another version."
                " Load its weights alone (`load_from_checkpoint`), or resume with the version that"
                " saved it."
            )
        self._ranks, self._weights_only = ranks, weights_only is not False

    def own_state(self, rank: int) -> State | None:
        """Return a rank's own state, None if its file is missing.

        Raises:
            RuntimeError: the file is another rank's, of another save, or damaged.
        """
        if rank == 0:
            return self.entry["own"]  # type: ignore[no-any-return]
        owner = Owner(rank, self.entry["ranks"], self.entry["token"])
        found: State | None = RankFiles(self.path).read(
            owner, self.entry["folder"], self._weights_only
        )
        return found

    def load(self, wanted: Iterable[int]) -> list[State]:
        """Return the own states of some ranks, or nothing if any rank lacks one; collective."""
        with failing_as_one(self._ranks):
            found = [self.own_state(rank) for rank in wanted]
        complete = all(self._ranks.all_flags(None not in found))
        return [state for state in found if state is not None and complete]

    def why_not_exact(self, algorithm: Resumable, found: bool) -> str:
        """Return why the ranks cannot use their own states, "" if they can; collective.

        `found` says whether this rank has its own state.
        """
        if not self.entry:
            return (
                "it has no per-rank state (saved by another strategy, as weights only, or outside"
                " `fit`)"
            )
        if self.entry["algorithm"] != algorithm.name:
            return f"it was saved by {self.entry['algorithm']}, and this is {algorithm.name}"
        now, was = algorithm.fingerprint(), self.entry["fingerprint"]
        changed = [
            f"{name} was {was.get(name, 'absent')} and is {now.get(name, 'absent')}"
            for name in sorted((now.keys() | was.keys()) - algorithm.free_at_resume)
            if now.get(name) != was.get(name)
        ]
        if self.entry["ranks"] != self._ranks.size:
            number = f"it was saved by {self.entry['ranks']} ranks, these are {self._ranks.size}"
            changed.insert(0, number)
        if changed:
            return "; ".join(changed)
        flags = self._ranks.all_flags(found)
        missing = ", ".join(str(rank) for rank, has in enumerate(flags) if not has)
        folder = self.entry["folder"]
        return f"the files of rank {missing} below {folder!r} are gone" if missing else ""

    def adopted_by(self, algorithm: Resumable) -> tuple[State, str]:
        """Return what a rank uses that does not resume exactly, and a text; collective."""
        adopted = None
        if self.entry.get("algorithm") == algorithm.name:
            adopted = algorithm.adopt(self.entry["fingerprint"], self.entry["ranks"], self.load)
        if adopted is not None:
            return adopted
        state = "the optimizer state of rank 0" if algorithm.replicas else "its optimizer state"
        return {}, (
            f"with {state} if the checkpoint has it. The epoch's data, random numbers and the"
            " strategy's own state start afresh"
        )


class ExactResume:
    """Saves and restores each rank's own state.

    Args:
        strategy: whose ranks save and resume.
        ranks: all ranks of its job (`strategies.ranks.Ranks`).
    """

    def __init__(self, strategy: Any, ranks: Any) -> None:
        self._strategy, self._ranks = strategy, ranks
        self._fit: _Fit | None = None
        self._save: Save | None = None  # that the fit resumes from, until `begin` or `read`
        self._own: State | None = None  # what this rank resumes with, until all is restored
        self._removed: list[FilePath] = []  # checkpoints removed by rank 0 since the last save

    def install(self, trainer: pl.Trainer, patches: Patches) -> None:
        """Record a fit's random numbers from its first loader on; in `setup_environment`."""
        self._epoch_start = EpochStart(trainer, patches)

    # -- resuming

    def read(self, path: FilePath, checkpoint: State, weights_only: bool | None = None) -> None:
        """Read this rank's own state of a checkpoint that a fit resumes; after `load_checkpoint`.

        Collective. Optimizers and schedulers of this rank then replace rank 0's in `checkpoint`,
        because Lightning restores them later.

        Raises:
            RuntimeError: the state is another rank's, of another save, or damaged; on all ranks.
        """
        strategy, module = self._strategy, self._strategy.lightning_module
        fits = module is not None and module.trainer.state.fn == TrainerFn.FITTING
        if not fits or (self._fit is not None and not strategy.restore_checkpoint_after_setup):
            return  # a hook of the user's reads a file
        save = Save(path, checkpoint, self._ranks, weights_only)
        self._own = None
        if save.entry.get("ranks") == self._ranks.size:
            with failing_as_one(self._ranks):
                self._own = save.own_state(self._ranks.rank)
        self._save = save
        if self._fit is not None:
            self._restore_own(self._fit, save)

    def begin(self, trainer: pl.Trainer, algorithm: Resumable, inside: Any) -> None:
        """Begin a fit, and restore this rank's own weights and tensors if it resumes.

        Collective; in `setup`, when module, optimizers, algorithm and layout (`inside`) are made.
        A checkpoint that Lightning restores after setup is restored by `read`.
        """
        tensors = OwnTensors(trainer.lightning_module, self._strategy.optimizers)
        self._fit = _Fit(trainer, algorithm, inside, tensors)
        if self._save is not None:
            self._restore_own(self._fit, self._save)

    def restore_position(self) -> bool:
        """Restore loops, position in the data and random numbers; in `on_train_start`.

        Returns:
            Whether this rank has some state of its own back.
        """
        fit, own = self._fit, self._own
        if fit is None or own is None:
            return False
        self._own = None
        if self._strategy.restore_checkpoint_after_setup:
            self._restore_weights(fit, own)
        if "random" not in own:
            restore_loops(fit.trainer)
            return bool(own)
        lost = [*own["lost"], *restore_place(fit.trainer, self._epoch_start, own)]
        _put_gradients(fit.trainer.lightning_module, own.get("gradients", {}))
        if lost:
            rank_zero_warn(f"The fit resumes where it was saved, but: {'; '.join(lost)}.")
        return True

    def _restore_own(self, fit: _Fit, save: Save) -> None:
        """Restore what must be in place before Lightning restores the rest."""
        self._save = None
        if reason := save.why_not_exact(fit.algorithm, self._own is not None):
            self._own, said = save.adopted_by(fit.algorithm)
            rank_zero_warn(
                f"Resuming from {str(save.path)!r} is not exact: {reason}. Every rank starts from"
                f" the checkpoint's weights, {said}."
            )
        own, checkpoint = self._own or {}, save.checkpoint
        self._own = {"shared": save.entry.get("shared"), **own} if own else {}

        # Lightning restores these later, from the checkpoint, which has rank 0's
        if own.get("schedulers"):
            checkpoint["lr_schedulers"] = own["schedulers"]
        if "optimizers" in own:
            checkpoint["optimizer_states"] = own["optimizers"]
        if own.get("precision"):  # empty without a gradient scaler, which refuses an empty state
            plugin = type(self._strategy.precision_plugin).__qualname__
            checkpoint[plugin] = own["precision"]
        if not self._strategy.restore_checkpoint_after_setup:
            self._restore_weights(fit, self._own)  # else Lightning's weights would replace them

    @staticmethod
    def _restore_weights(fit: _Fit, own: State) -> None:
        # first, because the algorithm restores the tensors that it exchanges
        fit.tensors.load(own.get("tensors", {}))
        if "algorithm" in own:
            fit.algorithm.load_state_dict(own["shared"], own["algorithm"])
        if "inside" in own:
            fit.inside.load_state_dict(own["inside"])

    # -- saving

    def save(self, checkpoint: State, filepath: FilePath, options: Any = None) -> None:
        """Write a checkpoint, and in a fit the rank files; collective.

        `checkpoint` gets our entry on rank 0, whose `filepath` counts; `options` are for the plugin
        that writes.

        Raises:
            RuntimeError: a file cannot be written; on all ranks.
        """
        fit, ranks = self._fit, self._ranks
        if fit is None or "optimizer_states" not in checkpoint:  # weights only
            self._write(checkpoint, filepath, options)
            return
        # a file's name, and which one is removed, may depend on a metric that differs by rank
        token = f"{fit.trainer.global_step}-{time.time_ns():x}"
        filepath, token, removed = ranks.broadcast((filepath, token, self._removed))
        # a path that is free again may be this save's
        self._remove_files_of(path for path in removed if path != filepath)

        owner, files = Owner(ranks.rank, ranks.size, token), RankFiles(filepath)
        shared, own = self._state(fit, checkpoint)
        with failing_as_one(ranks):
            if owner.rank == 0:
                checkpoint[KEY] = {
                    "ranks": ranks.size,
                    "token": token,
                    "folder": files.folder(token),
                    "algorithm": fit.algorithm.name,
                    "fingerprint": fit.algorithm.fingerprint(),
                    "shared": local_tensors(shared),
                    "own": local_tensors(own),
                }
            else:
                files.write(owner, own)
        self._write(checkpoint, filepath, options)
        # a checkpoint that is written later may not be there yet, and the one before still needs
        # its rank files; at the next save it is taken to be there
        files.remove_older(token, keep=int(writes_later(self._strategy.checkpoint_io)))

    def _state(self, fit: _Fit, checkpoint: State) -> tuple[State, State]:
        """Return the algorithm's shared state and this rank's own state; no copies."""
        strategy, trainer = self._strategy, fit.trainer
        shared, of_algorithm = fit.algorithm.state_dict()
        own: State = {
            "algorithm": of_algorithm,
            "inside": fit.inside.state_dict(),
            "gradients": half_accumulated(trainer),
            "schedulers": plain(checkpoint.get("lr_schedulers")),
            **data_state(trainer, checkpoint, self._epoch_start),
        }
        own["lost"] = not_saved(trainer, checkpoint, own)
        if fit.algorithm.replicas:
            own |= {
                # Lightning's: the strategy's own gathers the states of several ranks
                "optimizers": [
                    DDPStrategy.optimizer_state(strategy, one) for one in strategy.optimizers
                ],
                "precision": strategy.precision_plugin.state_dict(),
                "tensors": fit.tensors.state(strategy.channels),
            }
        if strategy.channels.within.rank:
            own["shared"] = shared  # of this rank's shards; the checkpoint has rank 0's
        return shared, own

    def _write(self, checkpoint: State, filepath: FilePath, options: Any) -> None:
        """Write a checkpoint on rank 0, or a folder on all ranks of the first replica."""
        strategy = self._strategy
        with failing_as_one(self._ranks):
            if strategy.inside.saves_folders:
                if self._ranks.rank < strategy.inside.size:
                    write_folder(checkpoint, filepath, strategy.channels.within)
                return
            if strategy.is_global_zero and writes_later(strategy.checkpoint_io):
                # Lightning before 2.6 writes what the tensors have become meanwhile
                checkpoint = copied(checkpoint)
            DDPStrategy.save_checkpoint(strategy, checkpoint, filepath, options)

    # -- removing

    def remove(self, filepath: FilePath) -> None:
        """Remove the rank files of a checkpoint that rank 0 removes; in `remove_checkpoint`.

        Those on disks of other machines are removed at the next save, or in `remove_leftovers`.
        """
        if self._ranks.rank == 0:
            RankFiles(filepath).remove()
            self._removed.append(filepath)

    def remove_leftovers(self) -> None:
        """Remove the last removed checkpoints' rank files here; collective, in `on_train_end`."""
        if self._fit is not None:
            self._remove_files_of(self._ranks.broadcast(self._removed))

    def _remove_files_of(self, removed: Iterable[FilePath]) -> None:
        for path in removed:
            RankFiles(path).remove()
        self._removed = []

    def end(self) -> None:
        """Forget the fit; in `teardown`."""
        self._fit = self._save = self._own = None


def _put_gradients(module: nn.Module, gradients: Mapping[str, Tensor]) -> None:
    """Put the gradients of a half-accumulated step back, before a resumed fit's first batch."""
    for name, gradient in gradients.items():
        parameter = module.get_parameter(name)
        parameter.grad = gradient.to(parameter.device, parameter.dtype)
