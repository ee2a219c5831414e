"""Save a fit, and resume it exactly: the steps of both, and when a resume cannot be exact.

`contents` lists what a save contains. A fit that resumes on the same number of ranks with the same
settings continues bit for bit. Any other fit starts from the checkpoint's weights, reuses as much
as the algorithm can (`adopt`), and warns why the resume is not exact.

A change that an `on_load_checkpoint` hook makes to the checkpoint wins over a rank's own state
(`hook_changes`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_commfree.comm.handshake import check_agreement
from lightning_commfree.host import DDPStrategy, TrainerFn, is_overridden, pl
from lightning_commfree.lightning_internals import (
    Patches,
    around_loading,
    hide_resume_warning,
)
from lightning_commfree.model.replication import AveragedBuffers
from lightning_commfree.model.shards import copy_to_cpu
from lightning_commfree.resume.changes import FitChanges
from lightning_commfree.resume.checkpoint_io import writes_later
from lightning_commfree.resume.contents import (
    ENTRY,
    KEY,
    SavedFit,
    State,
    contents,
    keep_hook_changes,
    precision_entry,
    restore_by_lightning,
    restore_position,
    restore_weights,
)
from lightning_commfree.resume.copies import Ranks, drop_copy, find_checkpoint, send
from lightning_commfree.resume.data_position import plan_epochs, training_orders
from lightning_commfree.resume.files import FilePath
from lightning_commfree.resume.folders import write_folder
from lightning_commfree.resume.hook_changes import HookChanges, named_tensors
from lightning_commfree.resume.loops import restore_loops, unknown_callbacks
from lightning_commfree.resume.own_tensors import OwnTensors
from lightning_commfree.resume.rank_files import Owner, RankFiles, file_of_rank

RESTORED = (
    "weights, optimizers, schedulers, the strategy's state, random numbers and the position in the"
    " data"
)


class Resumable(Protocol):
    """Interface that an algorithm implements for saving and exact resume."""

    name: str  # a resume uses only states saved under the same name
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
        """Return a tuple: the state shared by all replicas, and this rank's own state.

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
        self,
        saved_fingerprint: Mapping[str, str],
        num_ranks: int,
        load_states: Callable[[Iterable[int]], list[State]],
    ) -> tuple[State, str] | None:
        """Return parts of a checkpoint to reuse if an exact resume is impossible; collective.

        The checkpoint may have been saved with different settings or by a different number of
        ranks, or some of its rank files may be missing.

        Args:
            saved_fingerprint: the fingerprint in the checkpoint, which the same algorithm saved.
            num_ranks: the number of ranks that saved the checkpoint.
            load_states: function that takes a list of ranks and returns their saved states,
                or an empty list if any file is missing.

        Returns:
            Entries for this rank's own state, and a description of the reused state, which
            continues the sentence "Every rank starts from the checkpoint's weights, "; or None, on
            all ranks, if nothing is reused.
        """
        del saved_fingerprint, num_ranks, load_states
        return None


class SavesFolders(Protocol):
    """Interface of a sharded model's states that a resume uses (`fit.contracts.ShardedStates`)."""

    @property
    def saves_folders(self) -> bool:
        """Whether checkpoints are currently folders, written by all ranks of a replica."""


class ResumableLayout(Protocol):
    """Interface of a layout that a resume uses (`fit.contracts.Layout`)."""

    size: int  # number of ranks in a replica

    @property
    def states(self) -> SavesFolders | None:
        """The sharded model's states; None if every rank holds the full model."""

    def state_dict(self) -> State:
        """Return the layout's own state on this rank."""

    def load_state_dict(self, state: State) -> list[str]:
        """Restore the state returned by `state_dict`; return messages about what is lost."""


class Save:
    """A checkpoint to resume from, and its rank files.

    `entry` is `checkpoint[KEY]`, or {} if there is none. `weights_only` is the argument of
    `Trainer.fit`; None means True.
    """

    def __init__(
        self, path: FilePath, checkpoint: State, ranks: Ranks, weights_only: bool | None = None
    ) -> None:
        self.path, self.checkpoint = path, checkpoint
        self.entry: State = checkpoint.get(KEY, {})
        if self.entry and not self.entry.keys() >= ENTRY:
            raise RuntimeError(
                f"The checkpoint {str(path)!r} was written by another version of"
                " lightning_commfree. Load only its weights (`load_from_checkpoint`), or resume"
                " with the version that saved it."
            )
        self._ranks, self._weights_only = ranks, weights_only is not False

    def own_state(self, rank: int) -> State | None:
        """Return a rank's own state, or None if its file is missing.

        Raise a RuntimeError if the file is damaged, or is from another rank or save.
        """
        if rank == 0:
            return self.entry["own"]  # type: ignore[no-any-return]
        owner = Owner(rank, self.entry["ranks"], self.entry["token"])
        found: State | None = RankFiles(self.path).read(
            owner, self.entry["folder"], self._weights_only
        )
        return found

    def fetch(self, wanted: Iterable[int]) -> None:
        """Copy rank files that this rank lacks from other ranks' disks to its own; collective.

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

        `found`: whether this rank's own state was found.
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
        """Return the state to reuse if an exact resume is impossible, and a text; collective."""
        adopted = None
        if self.entry.get("algorithm") == algorithm.name:
            adopted = algorithm.adopt(self.entry["fingerprint"], self.entry["ranks"], self.load)
        if adopted is not None:
            return adopted
        one = self._ranks.channels.one_model
        state = "its optimizer state" if one else "the optimizer state of rank 0"
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
        self, strategy: DDPStrategy, ranks: Ranks, layout: ResumableLayout, patches: Patches
    ) -> None:
        self._strategy, self._ranks = strategy, ranks
        self._layout, self._patches = layout, patches
        self._fit: SavedFit | None = None
        self._save: Save | None = None  # the save to resume from, until `begin` or `read` uses it
        self._changes: HookChanges | None = None  # None if no hook can change the checkpoint
        self._own: State | None = None  # this rank's state to restore, until all of it is restored
        self._complete = False  # whether all ranks have found their own state
        self._removed: list[FilePath] = []  # checkpoints removed by rank 0 since the last save

    def install(self, trainer: pl.Trainer) -> None:
        """Patch the Trainer: plan the data's order, and find checkpoints on any rank's disk.

        Call this before the first loader is created.
        """
        plan_epochs(trainer, self._patches)
        if self._ranks.size > 1:
            around_loading(trainer, self._patches, partial(find_checkpoint, self._ranks), drop_copy)

    # -- resuming

    def read(self, path: FilePath, checkpoint: State, weights_only: bool | None = None) -> None:
        """Read this rank's own state from the checkpoint to resume from, and keep it; collective.

        All ranks raise a RuntimeError if a rank file is damaged, or is from another rank or save.
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
        if _overrides_on_load(module):
            self._changes = HookChanges(checkpoint, precision_entry(strategy))
        self._save = save

    @contextmanager
    def loading_model(self) -> Iterator[None]:
        """Context manager for loading the model; records changes that load hooks make."""
        changes, after_setup = self._changes, self._strategy.restore_checkpoint_after_setup
        if changes is not None:
            changes.compare_weights()
        yield
        if changes is not None and not after_setup:
            changes.note_module(named_tensors(self._module))

    def before_setup(self) -> None:
        """Record the changes of callbacks' load hooks to the module, before it is prepared."""
        if self._changes is not None:
            self._changes.compare_module(named_tensors(self._module))

    def begin(self, trainer: pl.Trainer, algorithm: Resumable) -> None:
        """Prepare to save a fit; on a resume, restore this rank's own state; collective.

        Call this in `setup`, after the optimizers are created. If Lightning restores the checkpoint
        after setup, `before_optimizers` and `restore_position` restore the state instead.
        """
        tensors = OwnTensors(
            trainer.lightning_module,
            lambda: self._strategy.optimizers,
            algorithm.averaged_buffers(),
        )
        self._fit = SavedFit(
            self._strategy,
            trainer,
            self._ranks,
            self._layout,
            algorithm,
            tensors,
            FitChanges(trainer),
        )
        self.before_optimizers()

    def before_optimizers(self) -> None:
        """Restore this rank's own state unless `begin` has done so; collective.

        Called before Lightning restores the optimizers, and after the hooks have run.
        """
        if self._fit is not None and self._save is not None:
            self._restore_own(self._fit, self._save)

    def restore_position(self, get_not_restored: Callable[[], list[str]]) -> bool:
        """Restore loops, data, RNG and gradients; return whether the algorithm was restored.

        Collective; prints what was restored. Call this in `on_train_start`. `get_not_restored`
        returns messages about state that the strategy cannot restore.
        """
        fit, own = self._fit, self._own
        self._own = self._changes = None  # frees the checkpoint
        if fit is None or own is None:
            return False
        if self._strategy.restore_checkpoint_after_setup:
            restore_weights(fit, own)
        if "random" not in own:
            restore_loops(fit.trainer)
            return "algorithm" in own
        lost, unknown = restore_position(fit, own)
        hide_resume_warning(fit.trainer, self._patches)
        self._report(lost + get_not_restored(), unknown + unknown_callbacks(fit.trainer))
        return "algorithm" in own

    def _report(self, lost: list[str], unknown: list[str]) -> None:
        """Print on rank 0 what was restored, and whether any rank lost state; collective.

        `lost` are messages about state that this rank could not restore, `unknown` descriptions of
        objects whose state may be incomplete.
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

    def _restore_own(self, fit: SavedFit, save: Save) -> None:
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
        if own:
            own = {**own, "shared": own.get("shared") or save.entry.get("shared")}
            if changes is not None:
                keep_hook_changes(fit, own, checkpoint, changes)
        restore_by_lightning(fit, own, checkpoint, changes)
        if not self._strategy.restore_checkpoint_after_setup:
            restore_weights(fit, own)  # otherwise later, after Lightning's restore
        self._own = own

    @property
    def _module(self) -> pl.LightningModule:
        module = self._strategy.lightning_module
        assert module is not None, "the Trainer has connected one"
        return module

    def skip(self) -> None:
        """Discard this rank's own state, because other replicas are ahead of the checkpoint."""
        self._own = None

    # -- saving

    def save(
        self,
        checkpoint: State,
        filepath: FilePath,
        options: Any = None,
        own_folders: bool = False,
    ) -> None:
        """Write a checkpoint and, during a fit, the rank files; collective.

        All ranks use rank 0's `filepath`, and rank 0 adds the entry `KEY` to `checkpoint`. With
        `own_folders`, each rank's file goes into the folder of its own `filepath`: whoever calls
        this merges the folders later. If a file cannot be written, all ranks raise a RuntimeError.
        """
        fit, ranks = self._fit, self._ranks
        if fit is None or "optimizer_states" not in checkpoint:  # weights only
            self._write(checkpoint, filepath, options)
            return
        # use rank 0's names, because file names may depend on a metric that differs between ranks
        token = f"{fit.trainer.global_step}-{time.time_ns():x}"
        left_out = fit.tensors.absent_from(checkpoint.get("state_dict", {}))
        own_folder = os.path.dirname(filepath)
        names = filepath, token, self._removed, left_out
        filepath, token, removed, left_out = ranks.broadcast(names)
        # this save may reuse the path of a removed checkpoint
        self._remove_files_of(path for path in removed if path != filepath)

        owner, files = Owner(ranks.rank, ranks.size, token), RankFiles(filepath)
        if own_folders:
            files = RankFiles(os.path.join(own_folder, os.path.basename(filepath)))
        entry = contents(fit, checkpoint, token, files.folder(token), left_out)
        if owner.rank == 0:
            checkpoint[KEY] = entry
        try:
            with ranks.fail_together():
                if owner.rank != 0:
                    files.write(owner, entry["own"])
            # after the rank files: if a process dies before this, the old checkpoint still has its
            # rank files
            self._write(checkpoint, filepath, options)
        except Exception:  # on all ranks; a full disk must not fill up with files of failed saves
            files.discard(token)
            raise
        # an asynchronous plugin may not have written the new checkpoint yet: keep the previous
        # checkpoint's rank files until the next save
        files.remove_older(token, keep=int(writes_later(self._strategy.checkpoint_io)))

    def _write(self, checkpoint: State, filepath: FilePath, options: Any) -> None:
        """Write a checkpoint file on rank 0, or a folder in the first replica; collective."""
        strategy = self._strategy
        with self._ranks.fail_together():
            states = self._layout.states
            if states is not None and states.saves_folders:
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

    def _remove_files_of(self, paths: Iterable[FilePath]) -> None:
        """Remove the rank files of checkpoints, and empty the list of removed checkpoints."""
        for path in paths:
            RankFiles(path).remove()
        self._removed = []

    def end(self) -> None:
        """End a fit and drop all references to it; called in `teardown`."""
        for order in [] if self._fit is None else training_orders(self._fit.trainer):
            order.detach()
        self._fit = self._save = self._own = self._changes = None


def _overrides_on_load(module: pl.LightningModule) -> bool:
    """Return whether the module or a callback has `on_load_checkpoint`, which can change it."""
    name, callbacks = "on_load_checkpoint", module.trainer.callbacks  # type: ignore[attr-defined]
    by_callback = any(is_overridden(name, one, pl.Callback) for one in callbacks)
    return by_callback or bool(is_overridden(name, module, pl.LightningModule))
