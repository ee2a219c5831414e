"""Exact resume: the contents of a checkpoint, and how each rank restores its own state.

A checkpoint is a Lightning checkpoint with full tensors and one additional entry:

    checkpoint["lightning_commfree"] = {
        "ranks", "token", "folder",      # number of ranks, id of the save, folder of its rank files
        "algorithm", "fingerprint",      # an exact resume needs the same algorithm and settings
        "shared",                        # the algorithm's state that is the same on all replicas
        "own",                           # rank 0's own state; other ranks' states are in rank files
    }

A rank's own state has these entries (`ExactResume._state`):

    "algorithm"                            the algorithm's state: local weights, in-flight fragments
    "optimizers", "precision"              only if each replica has its own weights
    "tensors"                              untrained tensors (`OwnTensors`)
    "inside"                               the layout's state (`Layout.state_dict`)
    "gradients", "schedulers"              partially accumulated gradients; schedulers
    "changes", "dtypes"                    settings that hooks have changed; parameters' dtypes
    "random", "starts", "order", "loaders", "ahead", "sizes"   position in the data
                                                               (`data_position`)
    "shared"                               only on ranks whose shards differ from rank 0's
    "lost"                                 messages about state that could not be saved

A fit that resumes on the same number of ranks with the same settings continues bit for bit. Any
other fit starts from the checkpoint's weights, reuses as much as the algorithm can (`adopt`), and
warns why the resume is not exact.

A change that an `on_load_checkpoint` hook makes to the checkpoint wins over a rank's own state
(`hook_changes`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_commfree.comm.digest import digest
from lightning_commfree.comm.handshake import check_agreement, common_entries
from lightning_commfree.comm.job import ReplicaChannels
from lightning_commfree.host import DDPStrategy, TrainerFn, is_overridden, pl
from lightning_commfree.lightning_internals import (
    Patches,
    around_loading,
    hide_resume_warning,
)
from lightning_commfree.model.replication import (
    AveragedBuffers,
    differ_from_first,
    persistent_buffers,
)
from lightning_commfree.model.shards import is_shard, local_tensor
from lightning_commfree.resume.changes import FitChanges
from lightning_commfree.resume.checkpoint_io import writes_later
from lightning_commfree.resume.copies import Ranks, drop_copy, find_checkpoint, send
from lightning_commfree.resume.data_position import (
    data_state,
    half_accumulated,
    not_saved,
    record_orders,
    restore_data_position,
    training_orders,
)
from lightning_commfree.resume.files import FilePath
from lightning_commfree.resume.folders import write_folder
from lightning_commfree.resume.hook_changes import HookChanges
from lightning_commfree.resume.loops import restore_loops, unknown_callbacks
from lightning_commfree.resume.rank_files import (
    Owner,
    RankFiles,
    copy_to_cpu,
    file_of_rank,
    local_tensors,
    plain_or_none,
)

KEY = "lightning_commfree"  # key of the additional entry in a checkpoint
TAG = "save"  # ledger tag
RESTORED = (
    "weights, optimizers, schedulers, the strategy's state, random numbers and the position in the"
    " data"
)
_ENTRY = {"ranks", "token", "folder", "algorithm", "fingerprint", "shared", "own"}

State = dict[str, Any]


class Resumable(Protocol):
    """Interface that an algorithm implements for saving and exact resume."""

    name: str  # a resume uses only states saved under the same name
    # True if each replica has its own model, optimizers and untrained tensors; False if all ranks
    # hold shards of one model, which a checkpoint contains in full.
    replicas: bool = True
    free_at_resume: frozenset[str] = frozenset()  # `fingerprint` values that may change on resume

    def fingerprint(self) -> dict[str, str]:
        """Return the settings that must be equal on all ranks.

        For an exact resume, they must also equal the settings in the checkpoint, except those in
        `free_at_resume`.
        """
        return {}

    def averaged_buffers(self) -> AveragedBuffers | None:
        """Return the buffers that it averages over the ranks and restores, if any."""
        return None

    def state_dict(self) -> tuple[State, State]:
        """Return the state shared by all replicas, and this rank's own state.

        Both consist of plain values and tensors, which need not be copies.
        """

    def load_state_dict(self, shared: State, own: State | None) -> None:
        """Restore the state returned by `state_dict`, before the first step.

        `own` is None for a new replica.
        """

    def overwrites(self, shared: State, own: State) -> set[str]:
        """Return the names of the module's tensors that `load_state_dict` would overwrite."""
        del shared, own
        return set()

    def adopt(
        self, was: Mapping[str, str], ranks: int, load: Callable[[Iterable[int]], list[State]]
    ) -> tuple[State, str] | None:
        """Reuse parts of a checkpoint from which an exact resume is impossible; collective.

        It may have been saved with different settings or by a different number of ranks, or some of
        its rank files may be missing.

        Args:
            was: the fingerprint in the checkpoint, which was saved by the same algorithm.
            ranks: the number of ranks that saved the checkpoint.
            load: function that takes a list of ranks and returns the saved states of these ranks,
                or an empty list if any file is missing.

        Returns:
            Entries for this rank's own state, and a description of the reused state, which
            continues the sentence "Every rank starts from the checkpoint's weights, "; or None, on
            all ranks, if nothing is reused.
        """
        del was, ranks, load
        return None


class SavedLayout(Protocol):
    """What a resume needs of a layout (`fit.contracts.Layout`)."""

    size: int  # number of ranks in a replica

    @property
    def saves_folders(self) -> bool:
        """Whether checkpoints are currently folders, written by all ranks of a replica."""

    def state_dict(self) -> State:
        """Return the layout's own state on this rank."""

    def load_state_dict(self, state: State) -> None:
        """Restore the state returned by `state_dict`."""


@dataclass
class _Fit:
    """Objects that `ExactResume` holds during a fit, from `begin` to `end`."""

    trainer: pl.Trainer
    algorithm: Resumable
    tensors: OwnTensors
    changes: FitChanges


class Save:
    """A checkpoint to resume from, and its rank files.

    Args:
        path: path of the checkpoint.
        checkpoint: the loaded checkpoint.
        ranks: all ranks of the job.
        weights_only: the argument of `Trainer.fit`; None means True.

    Attributes:
        entry: `checkpoint[KEY]`, the state that only this library saves; {} if the checkpoint has
            no such entry.

    Raises:
        RuntimeError: the entry was written by another version of this package.
    """

    def __init__(
        self, path: FilePath, checkpoint: State, ranks: Ranks, weights_only: bool | None = None
    ) -> None:
        self.path, self.checkpoint = path, checkpoint
        self.entry: State = checkpoint.get(KEY, {})
        if self.entry and not self.entry.keys() >= _ENTRY:
            raise RuntimeError(
                f"The checkpoint {str(path)!r} was written by another version of"
                " lightning_commfree. Load only its weights (`load_from_checkpoint`), or resume"
                " with the version that saved it."
            )
        self._ranks, self._weights_only = ranks, weights_only is not False

    def own_state(self, rank: int) -> State | None:
        """Return a rank's own state, or None if its file is missing.

        Raises:
            RuntimeError: the file is damaged, or belongs to another rank or another checkpoint.
        """
        if rank == 0:
            return self.entry["own"]  # type: ignore[no-any-return]
        owner = Owner(rank, self.entry["ranks"], self.entry["token"])
        found: State | None = RankFiles(self.path).read(
            owner, self.entry["folder"], self._weights_only
        )
        return found

    def fetch(self, wanted: Iterable[int]) -> None:
        """Copy rank files that this rank needs from other ranks' disks; collective.

        `wanted` contains the ranks whose files this rank needs.
        """
        folder, all_flags = self.entry["folder"], self._ranks.all_flags
        saved = range(1, self.entry["ranks"])  # rank 0 has no file
        found = {rank: RankFiles(self.path).find(folder, rank) for rank in saved}
        lacks = {rank for rank in saved if rank in wanted and found[rank] is None}
        if not any(all_flags(bool(lacks))):
            return
        for rank in saved:
            has, needed = all_flags(found[rank] is not None), any(all_flags(rank in lacks))
            if needed and any(has):
                place = Path(found[rank] or file_of_rank(self.path, folder, rank))
                send(self._ranks, has.index(True), place, place if rank in lacks else None)

    def load(self, wanted: Iterable[int]) -> list[State]:
        """Return the states of the ranks in `wanted`, or [] if any is missing; collective."""
        wanted = list(wanted)
        self.fetch(wanted)
        with self._ranks.fail_together():
            found = [self.own_state(rank) for rank in wanted]
        complete = all(self._ranks.all_flags(None not in found))
        return [state for state in found if state is not None and complete]

    def why_not_exact(self, algorithm: Resumable, found: bool) -> str:
        """Explain why an exact resume is impossible; return "" if it is possible; collective.

        Args:
            algorithm: the algorithm of this fit.
            found: whether this rank's own state was found.
        """
        if not self.entry:
            return (
                "it has no per-rank state (saved by another strategy, as weights only, or outside"
                " `fit`)"
            )
        if self.entry["algorithm"] != algorithm.name:
            return f"it was saved by {self.entry['algorithm']}, but this is {algorithm.name}"
        now, was = algorithm.fingerprint(), self.entry["fingerprint"]
        changed = [
            f"{name} was {was.get(name, 'absent')} and is {now.get(name, 'absent')}"
            for name in sorted((now.keys() | was.keys()) - algorithm.free_at_resume)
            if now.get(name) != was.get(name)
        ]
        if self.entry["ranks"] != self._ranks.size:
            size = f"it was saved by {self.entry['ranks']} ranks, but this fit has"
            changed.insert(0, f"{size} {self._ranks.size}")
        if changed:
            return "; ".join(changed)
        flags = self._ranks.all_flags(found)
        missing = ", ".join(str(rank) for rank, has in enumerate(flags) if not has)
        folder = self.entry["folder"]
        return f"the rank files of rank {missing} in {folder!r} are missing" if missing else ""

    def adopt(self, algorithm: Resumable) -> tuple[State, str]:
        """Choose what this rank can reuse if an exact resume is impossible; collective.

        Returns:
            The state to restore, and a description of it for the user.
        """
        adopted = None
        if self.entry.get("algorithm") == algorithm.name:
            adopted = algorithm.adopt(self.entry["fingerprint"], self.entry["ranks"], self.load)
        if adopted is not None:
            return adopted
        state = "the optimizer state of rank 0" if algorithm.replicas else "its optimizer state"
        return {}, (
            f"with {state} if the checkpoint has it. The epoch's data, random numbers and the"
            " strategy's own state start over"
        )


class ExactResume:
    """Saves and restores each rank's own state.

    The strategy calls the methods in the order in which they are defined. Of the strategy itself,
    this class knows only what it has in common with Lightning's.
    """

    def __init__(
        self, strategy: DDPStrategy, ranks: Ranks, layout: SavedLayout, patches: Patches
    ) -> None:
        self._strategy, self._ranks = strategy, ranks
        self._layout, self._patches = layout, patches
        self._fit: _Fit | None = None
        self._save: Save | None = None  # the save to resume from, until `begin` or `read` uses it
        self._changes: HookChanges | None = None  # None if no hook can change the checkpoint
        self._own: State | None = None  # this rank's state to restore, until all of it is restored
        self._complete = False  # whether all ranks have found their own state
        self._removed: list[FilePath] = []  # checkpoints removed by rank 0 since the last save

    def install(self, trainer: pl.Trainer) -> None:
        """Record the data's order, and make the Trainer find checkpoints on any rank's disk.

        Call this before the first loader is created.
        """
        record_orders(trainer, self._patches)
        if self._ranks.size > 1:
            around_loading(trainer, self._patches, partial(find_checkpoint, self._ranks), drop_copy)

    # -- resuming

    def read(self, path: FilePath, checkpoint: State, weights_only: bool | None = None) -> None:
        """Read this rank's own state from the checkpoint that a fit resumes from; collective.

        Raises:
            RuntimeError: a rank file is damaged, or belongs to another rank or another checkpoint;
                raised on all ranks.
        """
        strategy, module = self._strategy, self._strategy.lightning_module
        if module is None or module.trainer.state.fn != TrainerFn.FITTING:
            return
        if self._fit is not None and not strategy.restore_checkpoint_after_setup:
            return  # not a resume: a user's hook is loading a checkpoint
        save = Save(path, checkpoint, self._ranks, weights_only)
        self._own = None
        if save.entry.get("ranks") == self._ranks.size:
            save.fetch([self._ranks.rank])
            with self._ranks.fail_together():
                self._own = save.own_state(self._ranks.rank)
        self._changes = None
        if _has_load_hooks(module):
            self._changes = HookChanges(checkpoint, self._precision_entry)
        self._save = save

    @contextmanager
    def loading_model(self) -> Iterator[None]:
        """Context manager in which Lightning loads the model, after the module's hook has run."""
        changes, after_setup = self._changes, self._strategy.restore_checkpoint_after_setup
        if changes is not None:
            changes.compare_weights()
        yield
        if changes is not None and not after_setup:
            changes.note_module(_named_tensors(self._module))

    def before_setup(self) -> None:
        """Find what the callbacks' hooks have changed in the module, before it is prepared."""
        if self._changes is not None:
            self._changes.compare_module(_named_tensors(self._module))

    def is_changed(self, entry: str) -> bool:
        """Return whether an `on_load_checkpoint` hook has changed an entry of the checkpoint."""
        return self._changes is not None and entry in self._changes

    @staticmethod
    def saved_dtypes(checkpoint: Mapping[str, Any]) -> list[str]:
        """Return the dtypes that the parameters had when a checkpoint was saved, as strings.

        The weights in it may have other dtypes: `WeightAveraging` replaces them by its averages.
        """
        found: list[str] = checkpoint.get(KEY, {}).get("own", {}).get("dtypes", [])
        return found

    def begin(self, trainer: pl.Trainer, algorithm: Resumable) -> None:
        """Prepare to save and restore a fit's state; collective.

        Call this in `setup`, after the optimizers are created. On resume, it restores this rank's
        own weights and tensors. If Lightning restores the checkpoint after setup,
        `before_optimizers` and `restore_position` restore them instead.
        """
        tensors = OwnTensors(
            trainer.lightning_module,
            lambda: self._strategy.optimizers,
            algorithm.averaged_buffers(),
        )
        self._fit = _Fit(trainer, algorithm, tensors, FitChanges(trainer))
        self.before_optimizers()

    def before_optimizers(self) -> None:
        """Restore this rank's own state unless `begin` has done so; collective.

        Called before Lightning restores the optimizers, and after the hooks have run.
        """
        if self._fit is not None and self._save is not None:
            self._restore_own(self._fit, self._save)

    def restore_position(self, not_restored: Callable[[], list[str]]) -> bool:
        """Restore the loops, data position, RNG state and partially accumulated gradients.

        Call this in `on_train_start`. `not_restored` returns messages about state that the strategy
        cannot restore.

        Returns:
            Whether the algorithm's state has been restored.
        """
        fit, own = self._fit, self._own
        self._own = self._changes = None  # frees the checkpoint
        if fit is None or own is None:
            return False
        if self._strategy.restore_checkpoint_after_setup:
            self._restore_weights(fit, own)
        if "random" not in own:
            restore_loops(fit.trainer)
            return "algorithm" in own
        # before the loops, which count steps by it
        lost = [*own["lost"], *fit.changes.load_state_dict(own["changes"])]
        lost_position, unknown = restore_data_position(fit.trainer, own)
        lost += lost_position + not_restored()
        hide_resume_warning(fit.trainer, self._patches)
        for name, gradient in own.get("gradients", {}).items():
            parameter = fit.trainer.lightning_module.get_parameter(name)
            parameter.grad = gradient.to(parameter.device, parameter.dtype)
        self._report(lost, unknown + unknown_callbacks(fit.trainer))
        return "algorithm" in own

    def _report(self, lost: list[str], unknown: list[str]) -> None:
        """Tell the user what the resume has restored; collective.

        Args:
            lost: messages about state that this rank could not restore.
            unknown: descriptions of objects whose state may be incomplete.
        """
        flags = self._ranks.all_flags(bool(lost)) if self._complete else []
        if any(flags) and not lost:
            lost = [f"rank {flags.index(True)} could not restore all of its state"]
        names = ", ".join(dict.fromkeys(unknown))
        unverified = f" Not verified, because only you know its state: {names}." if names else ""
        if lost:
            rank_zero_warn(f"Training was not resumed exactly: {'; '.join(lost)}.{unverified}")
        elif self._complete and unverified:
            rank_zero_info(f"Restored on all ranks: {RESTORED}.{unverified}")
        elif self._complete:
            module = type(self._module).__name__
            rank_zero_info(
                f"Resumed exactly: {RESTORED} are restored on all ranks. Plain attributes of"
                f" `{module}`, its callbacks and its data are in no checkpoint."
            )

    def _restore_own(self, fit: _Fit, save: Save) -> None:
        """Restore as much of this rank's own state as possible before Lightning's own restore.

        Collective. States that Lightning restores, such as optimizer states, are copied into the
        checkpoint.
        """
        self._save = None
        checkpoint, changes = save.checkpoint, self._changes
        if KEY not in checkpoint:  # a hook may also have removed it
            self._own, save.entry = None, {}
        if changes is not None:
            changes.compare()
        # a hook that runs on one rank only would make the ranks take different paths below
        edits = {} if changes is None else changes.fingerprint()
        check_agreement(self._ranks.channels.world, {KEY: str(bool(save.entry)), **edits})

        reason = save.why_not_exact(fit.algorithm, self._own is not None)
        self._complete = not reason
        if reason:
            self._own, kept = save.adopt(fit.algorithm)
            rank_zero_warn(
                f"Cannot resume exactly from {str(save.path)!r}: {reason}. Every rank starts from"
                f" the checkpoint's weights, {kept}."
            )
        own = self._own or {}
        self._own = own = {"shared": save.entry.get("shared"), **own} if own else {}
        if changes is not None and own:
            self._keep_weights(fit, changes, own, checkpoint)

        # Lightning restores these later from the checkpoint, which contains rank 0's states so far
        for entry, key in (
            ("lr_schedulers", "schedulers"),
            ("optimizer_states", "optimizers"),
            (self._precision_entry, "precision"),
        ):
            state = own.get(key)
            if state and entry in checkpoint:  # a gradient scaler rejects an empty state
                checkpoint[entry] = state if changes is None else changes.keep(entry, state)
        if not self._strategy.restore_checkpoint_after_setup:
            self._restore_weights(fit, self._own)  # otherwise later, after Lightning's restore

    @staticmethod
    def _keep_weights(fit: _Fit, changes: HookChanges, own: State, checkpoint: State) -> None:
        """Remove from this rank's own state whatever would undo the hooks' changes of weights."""
        if not str(changes):
            return
        text = f"`on_load_checkpoint` changed {changes}"
        if changes.loaders:
            own["loaders"] = None  # Lightning loads the positions in the checkpoint

        tensors = _named_tensors(fit.trainer.lightning_module)
        # by id: a tied weight has several names
        changed = {id(tensors[name]) for name in changes.weights if name in tensors}
        for key in own.keys() & {"tensors", "gradients"}:
            own[key] = {n: t for n, t in own[key].items() if id(tensors.get(n)) not in changed}
        names: set[str] = set()
        if "algorithm" in own:
            names = fit.algorithm.overwrites(own["shared"], own["algorithm"])
        unknown = (changes.weights - tensors.keys()) & checkpoint["state_dict"].keys()
        if names and (unknown or any(id(tensors.get(name)) in changed for name in names)):
            del own["algorithm"]
            text += (
                ", so every rank starts from the checkpoint's weights, and the state of"
                f" {fit.algorithm.name} starts over"
            )
        own["lost"] = [*own.get("lost", []), text]

    def _restore_weights(self, fit: _Fit, own: State) -> None:
        # load these first, because the algorithm overwrites the tensors that it exchanges
        fit.tensors.load(own.get("tensors", {}))
        if "algorithm" in own:
            fit.algorithm.load_state_dict(own["shared"], own["algorithm"])
        if "inside" in own:
            self._layout.load_state_dict(own["inside"])

    @property
    def _module(self) -> pl.LightningModule:
        module = self._strategy.lightning_module
        assert module is not None, "the Trainer has connected one"
        return module

    @property
    def _precision_entry(self) -> str:
        """Key of the precision plugin's entry in a checkpoint."""
        return type(self._strategy.precision_plugin).__qualname__

    def skip(self) -> None:
        """Discard this rank's own state, because other replicas are ahead of the checkpoint."""
        self._own = None

    # -- saving

    def save(self, checkpoint: State, filepath: FilePath, options: Any = None) -> None:
        """Write a checkpoint and, during a fit, the rank files; collective.

        All ranks use rank 0's `filepath`, and rank 0 adds the entry `KEY` to `checkpoint`.

        Raises:
            RuntimeError: a file cannot be written; raised on all ranks.
        """
        fit, ranks = self._fit, self._ranks
        if fit is None or "optimizer_states" not in checkpoint:  # weights only
            self._write(checkpoint, filepath, options)
            return
        # use rank 0's names, because file names may depend on a metric that differs between ranks
        token = f"{fit.trainer.global_step}-{time.time_ns():x}"
        left_out = fit.tensors.absent_from(checkpoint.get("state_dict", {}))
        names = filepath, token, self._removed, left_out
        filepath, token, removed, left_out = ranks.broadcast(names)
        # this save may reuse the path of a removed checkpoint
        self._remove_files_of(path for path in removed if path != filepath)

        owner, files = Owner(ranks.rank, ranks.size, token), RankFiles(filepath)
        shared, own = self._state(fit, checkpoint, left_out)
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
        try:
            with ranks.fail_together():
                if owner.rank != 0:
                    files.write(owner, own)
            # after the rank files: if a process dies before this, the old checkpoint still has its
            # rank files
            self._write(checkpoint, filepath, options)
        except Exception:  # on all ranks; a full disk must not fill up with files of failed saves
            files.discard(token)
            raise
        # an asynchronous plugin may not have written the new checkpoint yet: keep the previous
        # checkpoint's rank files until the next save
        files.remove_older(token, keep=int(writes_later(self._strategy.checkpoint_io)))

    def _state(self, fit: _Fit, checkpoint: State, left_out: Iterable[str]) -> tuple[State, State]:
        """Return the algorithm's shared state and this rank's own state, without copying.

        `left_out` contains the names of the tensors that are not in the checkpoint's `state_dict`.
        """
        strategy, trainer = self._strategy, fit.trainer
        shared, algorithm_own = fit.algorithm.state_dict()
        own: State = {
            "algorithm": algorithm_own,
            "inside": self._layout.state_dict(),
            "gradients": half_accumulated(trainer),
            "schedulers": plain_or_none(checkpoint.get("lr_schedulers")),
            "changes": fit.changes.state_dict(),
            "dtypes": sorted({str(p.dtype) for p in trainer.lightning_module.parameters()}),
            "tensors": fit.tensors.changed(left_out),
            **data_state(trainer, checkpoint),
        }
        own["lost"] = not_saved(trainer, checkpoint, own)
        if fit.algorithm.replicas:
            own |= {
                # use Lightning's method, because the strategy's own method gathers shards
                "optimizers": [
                    DDPStrategy.optimizer_state(strategy, one) for one in strategy.optimizers
                ],
                "precision": strategy.precision_plugin.state_dict(),
                "tensors": own["tensors"] | fit.tensors.state(self._ranks.channels),
            }
        if self._ranks.channels.within.rank:
            own["shared"] = shared  # with this rank's shards; the checkpoint has rank 0's
        return shared, own

    def _write(self, checkpoint: State, filepath: FilePath, options: Any) -> None:
        """Write a checkpoint file on rank 0, or a folder on all ranks of the first replica."""
        strategy = self._strategy
        with self._ranks.fail_together():
            if self._layout.saves_folders:
                if self._ranks.rank < self._layout.size:
                    write_folder(checkpoint, filepath, self._ranks.channels.within)
                return
            if strategy.is_global_zero and writes_later(strategy.checkpoint_io):
                # Lightning before 2.6 does not copy tensors, and they may change before the write
                checkpoint = copy_to_cpu(checkpoint)
            DDPStrategy.save_checkpoint(strategy, checkpoint, filepath, options)

    # -- removing

    def remove(self, filepath: FilePath) -> None:
        """Remove a checkpoint's rank files; called after the checkpoint has been removed.

        Files on other machines' disks are removed by the next save or by `remove_leftovers`.
        """
        if self._ranks.rank == 0:
            RankFiles(filepath).remove()
            self._removed.append(filepath)

    def remove_leftovers(self) -> None:
        """Remove the rank files of recently removed checkpoints on every machine; collective."""
        if self._fit is not None:
            self._remove_files_of(self._ranks.broadcast(self._removed))

    def _remove_files_of(self, removed: Iterable[FilePath]) -> None:
        for path in removed:
            RankFiles(path).remove()
        self._removed = []

    def end(self) -> None:
        """End a fit and drop all references to it; called in `teardown`."""
        for order in [] if self._fit is None else training_orders(self._fit.trainer):
            order.detach()
        self._fit = self._save = self._own = self._changes = None


def _named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's parameters and buffers by name; tied tensors have several names."""
    parameters = module.named_parameters(remove_duplicate=False)
    return {**dict(parameters), **dict(module.named_buffers(remove_duplicate=False))}


def _has_load_hooks(module: pl.LightningModule) -> bool:
    """Return whether hooks can change a checkpoint before it is restored."""
    name, callbacks = "on_load_checkpoint", module.trainer.callbacks  # type: ignore[attr-defined]
    by_callback = any(is_overridden(name, one, pl.Callback) for one in callbacks)
    return by_callback or bool(is_overridden(name, module, pl.LightningModule))


class OwnTensors:
    """Saves and restores untrained tensors that can differ between ranks.

    Examples are the weights of mean teachers, counters, queues and caches.

    A checkpoint contains only rank 0's tensors and no non-persistent buffers. So each rank saves
    the persistent tensors that differ from rank 0's, and the non-persistent buffers that changed
    during the fit. Trained parameters and averaged floating-point buffers are not included, because
    the strategy restores them.

    The module's own `state_dict` or a hook may leave tensors out of the checkpoint. Each rank then
    saves those that changed during the fit, trained or not, but not a frozen base model.

    Create this object before any rank has restored its own state. `optimizers` returns this rank's
    optimizers, which hooks may replace. `buffers` are the averaged buffers.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizers: Callable[[], Iterable[Optimizer]],
        buffers: AveragedBuffers | None = None,
    ) -> None:
        self._module, self._optimizers, self._buffers = module, optimizers, buffers
        persistent, others = self._tensors()
        self._at_begin = _digests(persistent | others)

    def state(self, channels: ReplicaChannels) -> dict[str, Tensor]:
        """Return the untrained tensors that this rank must save, without copies; collective."""
        persistent, others = self._tensors()
        found: dict[str, Tensor] = {}
        # a large frozen base model is the same on all ranks, and comparing hashes keeps it out of
        # the files
        for channel, sharded in ((channels.world, False), (channels.between, True)):
            some = {name: one for name, one in persistent.items() if is_shard(one) == sharded}
            # during a fit, a rank may have registered buffers or frozen parameters that others have
            # not; it saves them
            common = common_entries(channel, list(some))
            compared = [name for name in some if name in common]
            differ = differ_from_first(channel, [some[name] for name in compared], TAG)
            same = {name for name, is_own in zip(compared, differ, strict=True) if not is_own}
            found |= {name: tensor for name, tensor in some.items() if name not in same}
        found = {name: local_tensor(tensor) for name, tensor in found.items()}
        # buffers that changed their shape, even where equal: a new fit begins with the old shape
        reshaped = () if self._buffers is None else self._buffers.own
        return found | self.changed((*others, *reshaped))

    def absent_from(self, saved: Mapping[str, Any]) -> list[str]:
        """Return the names of the tensors that are not in `saved`, a module's `state_dict`.

        A tied tensor counts as saved if it is saved under one of its names.
        """
        names: dict[Tensor, list[str]] = {}
        parameters = self._module.named_parameters(remove_duplicate=False)
        buffers = persistent_buffers(self._module, remove_duplicate=False).items()
        for name, tensor in (*parameters, *buffers):
            names.setdefault(tensor, []).append(name)
        return [every[0] for every in names.values() if saved.keys().isdisjoint(every)]

    def changed(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the tensors among `names` that changed during the fit, without copies."""
        every = self._all()
        found = {name: every[name] for name in names if name in every}
        now = _digests({name: one for name, one in found.items() if name in self._at_begin})
        return {
            name: local_tensor(tensor)
            for name, tensor in found.items()
            if name not in now or now[name] != self._at_begin[name]
        }

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore the tensors that `state` returned; replace buffers of other shapes or dtypes."""
        tensors = {name: local_tensor(one) for name, one in self._all().items()}
        for name, saved in state.items():
            tensor = tensors.get(name)
            if tensor is None:
                self._replace(name, saved)
            elif (tensor.shape, tensor.dtype) == (saved.shape, saved.dtype):
                tensor.copy_(saved)
            else:
                self._replace(name, saved.to(tensor.device))

    def _replace(self, name: str, buffer: Tensor) -> None:
        owner, _, own_name = name.rpartition(".")
        module = self._module.get_submodule(owner)
        if own_name in module._buffers:
            module._buffers[own_name] = buffer
        elif not hasattr(module, own_name):  # registered during the fit
            module.register_buffer(own_name, buffer)

    def _all(self) -> dict[str, Tensor]:
        every = chain(self._module.named_parameters(), self._module.named_buffers())
        return _dense_and_materialized(dict(every))

    def _tensors(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return two dicts of untrained tensors: persistent tensors, and non-persistent buffers.

        Averaged buffers are in neither dict, because the strategy restores them.
        """
        groups = [group for optimizer in self._optimizers() for group in optimizer.param_groups]
        trained = {p for group in groups for p in group["params"] if p.requires_grad}
        kept = persistent_buffers(self._module)
        averaged = set() if self._buffers is None else set(self._buffers.averaged)
        persistent: dict[str, Tensor] = {
            name: p for name, p in self._module.named_parameters() if p not in trained
        }
        others: dict[str, Tensor] = {}
        for name, buffer in self._module.named_buffers():
            if name not in kept:
                others[name] = buffer
            elif name not in averaged:
                persistent[name] = buffer
        return _dense_and_materialized(persistent), _dense_and_materialized(others)


def _dense_and_materialized(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: tensor
        for name, tensor in tensors.items()
        if not (is_lazy(tensor) or tensor.is_meta) and local_tensor(tensor).layout == torch.strided
    }


def _digests(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    return {
        name: int(digest(local_tensor(tensor).contiguous())) for name, tensor in tensors.items()
    }
