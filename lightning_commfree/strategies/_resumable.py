"""Exact resume for strategies whose ranks differ from each other. It knows no algorithm.

A checkpoint stays a normal one; what only one rank knows stands beside it, and rank 0's in it
(`_rank_files`). A fit that resumes on the same number of ranks with the same settings
goes on bit for bit; any other one starts from the checkpoint's weights, and a message says why.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import lightning.pytorch as pl
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_commfree.resume.epoch_start import EpochStart
from lightning_commfree.resume.loops import restore_loops, restore_watched, watched_metrics
from lightning_commfree.resume.own_tensors import OwnTensors
from lightning_commfree.resume.position import (
    Data,
    loadable,
    loop_state,
    read_ahead,
    restore_place,
)
from lightning_commfree.resume.random_state import random_state
from lightning_commfree.resume.rank_files import KEY, RankFiles, SavedParts
from lightning_commfree.resume.rank_parts import Owner, known_tensors, seal
from lightning_commfree.resume.whole_files import writes_later
from lightning_commfree.strategies._gradients import accumulate_further, half_accumulated
from lightning_commfree.strategies._replicated import ReplicatedStrategy
from lightning_commfree.strategies.signals import warn_unsaved


class Adopted(NamedTuple):
    """What a rank goes on with where an exact resume is not possible."""

    own: dict[str, Any]  # as `_whole_rank_state` returns it; "random": None for a fresh start
    said: str  # a clause that tells what is kept


class _Resumed(NamedTuple):
    """What `load_checkpoint` has read."""

    path: _PATH
    checkpoint: dict[str, Any]
    parts: SavedParts
    own: dict[str, Any] | None  # of this rank, where as many ranks had saved it and it is there


class ResumableStrategy(ReplicatedStrategy):
    """A `ReplicatedStrategy` that saves and restores every rank's own state.

    A subclass gives its algorithm's part (`_rank_state`), takes it back (`_load_rank_state`) and
    names what must be as it was (`_fingerprint` and `_resume_fingerprint`).
    """

    _free_at_resume: frozenset[str] = (
        frozenset()
    )  # of `_fingerprint`, what may be another at a resume

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._epoch_start = EpochStart()
        self._fit_runs = False
        self._resume_from: _Resumed | None = None
        self._resumes = False
        self._removed: list[_PATH] = []  # checkpoints, by rank 0, since the last save
        self._own_tensors: OwnTensors | None = None
        self._own: dict[str, Any] | None = None  # this rank's state, until all of it is in place

    @abstractmethod
    def _rank_state(self) -> dict[str, Any]:
        """Return the algorithm's state on this rank: tensors and plain values, copies."""

    @abstractmethod
    def _load_rank_state(self, state: dict[str, Any]) -> None:
        """Put back what `_rank_state` returned; the algorithm stands at its beginning."""

    @abstractmethod
    def _resume_fingerprint(self) -> dict[str, str]:
        """Return what besides `_fingerprint` must be as it was for an exact resume."""

    def _adopt(self, parts: SavedParts) -> Adopted | None:
        """Return what this rank can still use of a save by other ranks or with other settings.

        Collective over the world: all ranks return something, or all return None.

        Args:
            parts: of the checkpoint.
        """
        del parts
        return None

    # -- saving

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None
    ) -> None:
        """Write the ranks' files, then the checkpoint, then remove the files of its predecessor.

        Raises:
            RuntimeError: a file cannot be written; on all ranks.
        """
        if self._stopped_by_hand():
            warn_unsaved()
            return
        if not self._fit_runs or "optimizer_states" not in checkpoint:  # weights only
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        # a file's name, and which one goes, may depend on a metric that is not the same everywhere
        token = f"{self._module.trainer.global_step}-{time.time_ns():x}"
        filepath, token, removed = self.broadcast((filepath, token, self._removed))
        # a name that is free again may be this one, whose files another rank writes already
        self._forget([path for path in removed if path != filepath])
        files, owner = RankFiles(filepath), Owner(self.global_rank, self.world_size, token)
        state = self._whole_rank_state(checkpoint)
        known = {}
        if self.is_global_zero:
            known = known_tensors(checkpoint)
            own = seal(owner, state, known)
            known |= known_tensors(own, (KEY, "own"))
            checkpoint[KEY] = {
                "ranks": self.world_size,
                "token": token,
                "place": files.place(token),
                "fingerprint": {**self._fingerprint(), **self._resume_fingerprint()},
                "own": own,
            }
        known = self.broadcast(known)
        with self._failing_as_one():
            if not self.is_global_zero:
                files.save(token, self.global_rank, seal(owner, state, known))
        super().save_checkpoint(checkpoint, filepath, storage_options)
        # an asynchronous one may not be there yet, and its predecessor still needs the set before;
        # by the next save it is taken to be there
        files.keep_only(token, spare=int(writes_later(self.checkpoint_io)))

    @override
    def remove_checkpoint(self, filepath: _PATH) -> None:
        """Remove what rank 0 removes; on disks of other nodes with the next save."""
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            RankFiles(filepath).remove()
            self._removed.append(filepath)

    def _forget(self, removed: list[_PATH]) -> None:
        """Remove this node's files of checkpoints that rank 0 has removed."""
        for path in removed:
            RankFiles(path).remove()
        self._removed = []

    @override
    def on_train_end(self) -> None:
        if self._fit_runs:
            self._forget(self.broadcast(self._removed))
        super().on_train_end()

    def _whole_rank_state(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        assert self._own_tensors is not None, "a fit runs"
        several = self.world_size > 1  # one rank loses nothing
        loader, scheduler = several * "a training data loader", several * "a scheduler"
        return {
            "algorithm": self._rank_state(),
            "optimizers": [self.optimizer_state(optimizer) for optimizer in self.optimizers],
            "precision": self.precision_plugin.state_dict(),
            "gradients": half_accumulated(self._module),
            "random": random_state(self.root_device),
            "epoch_start": self._epoch_start.state_dict(),
            "loaders": loadable(loop_state(checkpoint).get("combined_loader"), loader),
            "ahead": loadable(read_ahead(self._module.trainer)),
            "schedulers": loadable(checkpoint.get("lr_schedulers"), scheduler),
            "watched": watched_metrics(self._module.trainer),
            "tensors": self._own_tensors.state(self.broadcast),
        }

    # -- resuming, in the order in which the Trainer calls it

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, *args: Any, **kwargs: Any) -> dict[str, Any]:
        # later releases of Lightning pass more arguments
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        if self.lightning_module is not None and self._module.trainer.state.fn == TrainerFn.FITTING:
            weights_only = kwargs.get("weights_only", args[0] if args else None)
            parts = SavedParts(checkpoint_path, checkpoint, weights_only)
            own = None
            if parts.entry.get("ranks") == self.world_size:
                (own,) = self._load_parts(parts, [self.global_rank])
            self._resume_from = _Resumed(checkpoint_path, checkpoint, parts, own)
        return checkpoint

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self._epoch_start.install(self._module.trainer)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        self._fit_runs = trainer.state.fn == TrainerFn.FITTING
        if self._fit_runs:
            self._own_tensors = OwnTensors(self._module, self.optimizers)
            resumed, self._resume_from = self._resume_from, None
            self._resumes = resumed is not None
            if resumed is not None:
                self._own = self._take_own(resumed)

    def _take_own(self, resumed: _Resumed) -> dict[str, Any] | None:
        """Put this rank's own weights and tensors in place, and the rest where Lightning finds it.

        Returns:
            What else is this rank's own; None where nothing is.
        """
        path, checkpoint, parts, _ = resumed
        reason, own = self._find_own(resumed)
        if own is not None:
            # Lightning, which restores them later, has saved those of rank 0 only
            if own.get("loaders") is not None:
                loop_state(checkpoint)["combined_loader"] = own["loaders"]
            schedulers = own.get("schedulers") or ()
            if len(schedulers) == len(checkpoint.get("lr_schedulers", ())):
                checkpoint["lr_schedulers"] = schedulers
        else:
            adopted = self._adopt(parts) if parts.entry else None
            kept = (
                "with the optimizer state of rank 0 where it stands in the checkpoint; what else is"
                " the strategy's own begins anew"
            )
            if adopted is not None:
                own, kept = adopted
            rank_zero_warn(
                f"The fit does not go on exactly where {str(path)!r} was saved: {reason}. Every"
                f" rank starts from the checkpoint's weights, {kept}."
            )
        if own is not None:
            assert self._own_tensors is not None, "`setup` has made it"
            # first: what the algorithm exchanges is its own to restore
            self._own_tensors.load(own.get("tensors", {}))
            self._load_rank_state(own["algorithm"])
        return own

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore this rank's own optimizers and gradient scaler, the checkpoint's without it."""
        if self._own is None:
            super().load_optimizer_state_dict(checkpoint)
            return
        super().load_optimizer_state_dict({"optimizer_states": self._own["optimizers"]})
        if self._own["precision"]:  # nothing without a gradient scaler, which takes no nothing
            self.precision_plugin.load_state_dict(self._own["precision"])

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        trainer, own = self._module.trainer, self._own
        if own is not None and own["random"] is not None:
            data = Data(own.get("loaders"), own.get("ahead", []), own.get("epoch_start"))
            moment = restore_place(trainer, own["random"], self._epoch_start, data)
            accumulate_further(self._module, own.get("gradients", {}))
            restore_watched(trainer, own.get("watched", {}), moment)
        elif self._resumes:
            restore_loops(trainer)
        self._own, self._resumes = None, False

    @override
    def teardown(self) -> None:
        self._fit_runs = self._resumes = False
        self._resume_from = self._own = self._own_tensors = None
        self._epoch_start.remove()
        super().teardown()

    def _find_own(self, resumed: _Resumed) -> tuple[str, dict[str, Any] | None]:
        """Return this rank's part if all ranks have theirs, else the reason why they go without."""
        entry = resumed.parts.entry
        if not entry:
            reason = (
                "it holds no state of single ranks, as another strategy saves it or as it is saved"
                " outside of a fit"
            )
            return reason, None
        fingerprint, saved = (
            {**self._fingerprint(), **self._resume_fingerprint()},
            entry["fingerprint"],
        )
        changed = [
            f"{name} was {saved.get(name, 'absent')} and is {fingerprint.get(name, 'absent')}"
            for name in sorted((fingerprint.keys() | saved.keys()) - self._free_at_resume)
            if fingerprint.get(name) != saved.get(name)
        ]
        if entry["ranks"] != self.world_size:
            changed.insert(
                0, f"it was saved by {entry['ranks']} ranks, these are {self.world_size}"
            )
        if changed:
            return "; ".join(changed), None
        found = self._all_flags(resumed.own is not None)
        missing = [str(rank) for rank, has in enumerate(found) if not has]
        if missing:
            return f"the files of rank {', '.join(missing)} below {entry['place']!r} are gone", None
        return "", resumed.own

    def _load_parts(self, parts: SavedParts, ranks: Iterable[int]) -> list[dict[str, Any] | None]:
        """Return the parts of some ranks; collective over the world, and so are its errors."""
        with self._failing_as_one():
            return [parts.load(rank) for rank in ranks]
