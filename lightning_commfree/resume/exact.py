"""Exact resume: one object of a strategy's, called in the order in which its methods stand here.

A checkpoint stays a normal one. What only one rank knows is that rank's *part* of it, a dictionary
whose entries `ExactResume._own_part` lists. Rank 0's part lies in the checkpoint, those of the
others in files beside it (`rank_files`). A fit that resumes on as many ranks with the same settings
goes on bit for bit. Any other one starts from the checkpoint's weights and takes of the parts what
its strategy can still use (`RankState.adopt`), and a message says why.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_commfree.resume.epoch_start import EpochStart
from lightning_commfree.resume.loops import restore_loops, restore_watched, watched_metrics
from lightning_commfree.resume.own_tensors import (
    OwnTensors,
    accumulate_further,
    half_accumulated,
)
from lightning_commfree.resume.position import (
    Data,
    loadable,
    loop_state,
    read_ahead,
    restore_place,
)
from lightning_commfree.resume.random_state import random_state
from lightning_commfree.resume.rank_files import KEY, RankFiles, SavedParts
from lightning_commfree.resume.rank_parts import Key, Owner, by_key, kinds_of, seal
from lightning_commfree.resume.whole_files import FilePath, writes_later

Part = dict[str, Any]  # of one rank, by the names in `ExactResume._own_part`

REPLICA = ("algorithm", "optimizers", "precision", "tensors")  # entries of a replica's own
PLACE = ("random", "epoch_start", "loaders", "ahead")  # and of where its data stand


class Agreeing(Protocol):
    """What ranks tell each other while they save and resume; all methods are collective."""

    def all_flags(self, mine: bool) -> list[bool]:
        """Return the flags of all ranks, by rank."""

    def failing_as_one(self) -> AbstractContextManager[None]:
        """If the body fails on some rank, let all ranks raise."""


class Adopted(NamedTuple):
    """What a rank goes on with where an exact resume is not possible."""

    part: Part  # some entries of a part; what is not there begins anew
    said: str  # what is kept, behind "Every rank starts from the checkpoint's weights, "


class RankState(Protocol):
    """What a strategy's algorithm knows on this rank; it answers from `begin` to `end`.

    Attributes:
        name: of the algorithm; another one has no use for its parts.
        replicas: ranks hold models of their own, with optimizers and further tensors of their own.
            Else they hold parts of one, which a checkpoint puts together.
        free_at_resume: names in `fingerprint` that may have other values at a resume.
    """

    name: str
    replicas: bool
    free_at_resume: frozenset[str]

    def fingerprint(self) -> dict[str, str]:
        """Return the settings that must be as they were for an exact resume."""

    def state_dict(self) -> dict[str, Any]:
        """Return the algorithm's state on this rank: tensors and plain values, copies."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what `state_dict` returned; the algorithm stands at its beginning."""

    def adopt(self, saved: Saved) -> Adopted | None:
        """Choose what this rank can use of a save by other ranks or with other settings.

        Collective over the world: all ranks return something, or all return None.

        Args:
            saved: by the same algorithm; files of some ranks may be gone.
        """


class Saved:
    """The parts of a checkpoint, for all ranks together.

    Attributes:
        entry: what the checkpoint says of its ranks; empty where it says nothing.
    """

    def __init__(self, parts: SavedParts, ranks: Agreeing) -> None:
        self.entry = parts.entry
        self._parts, self._ranks = parts, ranks

    def load(self, wanted: Iterable[int]) -> list[Part | None]:
        """Return the parts of some ranks, None for one that is gone.

        Collective, and so is its error.

        Raises:
            RuntimeError: what is there is another rank's, of another save, or damaged.
        """
        with self._ranks.failing_as_one():
            return [self._parts.load(rank) for rank in wanted]

    def load_all(self, wanted: Iterable[int]) -> list[Part]:
        """Return the parts of some ranks, or none if some rank does not find all that it wants."""
        found = self.load(wanted)
        complete = all(self._ranks.all_flags(None not in found))
        return [part for part in found if part is not None and complete]


@dataclass
class _Fit:
    """A fit from `begin` to `end`."""

    trainer: pl.Trainer
    owner: RankState
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

    Attributes:
        pending: this rank has its own weights back, and the rest follows in `go_on`.
    """

    def __init__(self, strategy: DDPStrategy, ranks: Agreeing) -> None:
        self._strategy, self._ranks = strategy, ranks
        self._epoch_start = EpochStart()
        self._removed: list[FilePath] = []  # checkpoints, by rank 0, since the last save
        self._fit: _Fit | None = None
        self._source: _Source | None = None
        self._resumes = False  # until `go_on`
        self._part: Part | None = None  # what this rank goes on with, until all of it is in place

    @property
    def pending(self) -> bool:  # noqa: D102 - in the docstring of the class
        return self._part is not None

    def install(self, trainer: pl.Trainer) -> None:
        """Watch a fit's random numbers from its first loader on; in `setup_environment`."""
        self._epoch_start.install(trainer)

    # -- resuming

    def read(
        self, path: FilePath, checkpoint: dict[str, Any], weights_only: bool | None = None
    ) -> None:
        """Read this rank's part of a checkpoint that a fit resumes; after `load_checkpoint`.

        Collective.

        Args:
            path: where the checkpoint was read.
            checkpoint: as it was read. Some entries of this rank's own replace those of rank 0, as
                Lightning restores them later.
            weights_only: as `Trainer.fit` got it; None stands for True.

        Raises:
            RuntimeError: a part is another rank's, of another save, or damaged; on all ranks.
        """
        if self._fit is not None and not self._strategy.restore_checkpoint_after_setup:
            return  # somebody looks at a file
        saved, mine = Saved(SavedParts(path, checkpoint, weights_only), self._ranks), None
        if saved.entry.get("ranks") == self._strategy.world_size:
            (mine,) = saved.load([self._strategy.global_rank])
        self._source = _Source(path, checkpoint, saved, mine)
        if self._fit is not None:
            self._take(self._fit, self._source)

    def begin(self, trainer: pl.Trainer, owner: RankState) -> None:
        """Begin a fit, and put this rank's own weights and tensors in place if it resumes.

        Collective; in `setup`, when module, optimizers and algorithm stand. A checkpoint that is
        restored after setup is put in place by `read`.

        Args:
            trainer: of the fit.
            owner: the algorithm.
        """
        self._fit = _Fit(trainer, owner, OwnTensors(trainer.lightning_module, trainer.optimizers))
        if self._source is not None:
            self._take(self._fit, self._source)

    def optimizer_states(self, checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what `load_optimizer_state_dict` shall load: this rank's own, if it has any.

        Its gradient scaler is restored here.
        """
        if self._part is None or "optimizers" not in self._part:
            return checkpoint
        if self._part["precision"]:  # nothing without a gradient scaler, which takes no nothing
            self._strategy.precision_plugin.load_state_dict(self._part["precision"])
        return {**checkpoint, "optimizer_states": self._part["optimizers"]}

    def go_on(self) -> None:
        """Bring loops, data and random numbers to where they were; in `on_train_start`."""
        fit, part = self._fit, self._part or {}
        if fit is None or not self._resumes:
            return
        if "random" in part:
            data = Data(part["loaders"], part["ahead"], part["epoch_start"])
            moment = restore_place(fit.trainer, part["random"], self._epoch_start, data)
            accumulate_further(fit.trainer.lightning_module, part.get("gradients", {}))
            restore_watched(fit.trainer, part.get("watched", {}), moment)
        else:
            restore_loops(fit.trainer)
        self._part, self._resumes = None, False

    def _take(self, fit: _Fit, source: _Source) -> None:
        """Put in place what has to be before Lightning restores the rest."""
        self._source, self._resumes = None, True
        reason = self._why_not_exact(fit.owner, source)
        part = source.mine
        if reason:
            part, said = self._adopted(fit.owner, source.saved)
            rank_zero_warn(
                f"The fit does not go on exactly where {str(source.path)!r} was saved: {reason}."
                f" Every rank starts from the checkpoint's weights, {said}."
            )
        if not part:
            return
        self._part = part
        # Lightning, which restores them later, has saved those of rank 0 only
        schedulers = part.get("schedulers") or ()
        if len(schedulers) == len(source.checkpoint.get("lr_schedulers", ())):
            source.checkpoint["lr_schedulers"] = schedulers
        # first: what the algorithm exchanges is its own to restore
        fit.tensors.load(part.get("tensors", {}))
        if "algorithm" in part:
            fit.owner.load_state_dict(part["algorithm"])

    def _adopted(self, owner: RankState, saved: Saved) -> Adopted:
        same = saved.entry.get("algorithm") == owner.name
        adopted = owner.adopt(saved) if same else None
        if adopted is not None:
            return adopted
        state = "the optimizer state of rank 0" if owner.replicas else "its optimizer state"
        return Adopted(
            {},
            f"with {state} where it stands in the checkpoint. What else only single ranks know"
            " begins anew: the epoch's data, random numbers and the strategy's own",
        )

    def _why_not_exact(self, owner: RankState, source: _Source) -> str:
        """Return why the ranks do not go on with their own parts; empty if they do."""
        entry, size = source.saved.entry, self._strategy.world_size
        if not entry:
            return (
                "it holds no state of single ranks, as another strategy saves it or as it is saved"
                " outside of a fit"
            )
        if entry["algorithm"] != owner.name:
            return f"it was saved by {entry['algorithm']}, and this is {owner.name}"
        now, was = owner.fingerprint(), entry["fingerprint"]
        changed = [
            f"{name} was {was.get(name, 'absent')} and is {now.get(name, 'absent')}"
            for name in sorted((now.keys() | was.keys()) - owner.free_at_resume)
            if now.get(name) != was.get(name)
        ]
        if entry["ranks"] != size:
            changed.insert(0, f"it was saved by {entry['ranks']} ranks, these are {size}")
        if changed:
            return "; ".join(changed)
        found = self._ranks.all_flags(source.mine is not None)
        missing = [str(rank) for rank, has in enumerate(found) if not has]
        if missing:
            return f"the files of rank {', '.join(missing)} below {entry['place']!r} are gone"
        return ""

    # -- saving

    def save(
        self, checkpoint: dict[str, Any], filepath: FilePath, write: Callable[[FilePath], None]
    ) -> None:
        """Write the ranks' files, then the checkpoint, then remove the files of its predecessor.

        Collective.

        Args:
            checkpoint: gets rank 0's part.
            filepath: where to; rank 0's counts.
            write: writes `checkpoint`.

        Raises:
            RuntimeError: a file cannot be written; on all ranks.
        """
        if self._fit is None or "optimizer_states" not in checkpoint:  # weights only
            write(filepath)
            return
        strategy, fit = self._strategy, self._fit
        # a file's name, and which one goes, may depend on a metric that is not the same everywhere
        token = f"{fit.trainer.global_step}-{time.time_ns():x}"
        filepath, token, removed = strategy.broadcast((filepath, token, self._removed))
        # a name that is free again may be this one, whose files another rank writes already
        self._forget([path for path in removed if path != filepath])
        files = RankFiles(filepath)
        owner = Owner(strategy.global_rank, strategy.world_size, token)
        part = self._own_part(fit, checkpoint)
        known: set[Key] = set()
        if strategy.is_global_zero:
            kinds = kinds_of(part)  # the others' are the same
            known = {*by_key(checkpoint, kinds)}
            own = seal(owner, part, known)
            known |= by_key(own, kinds).keys()
            checkpoint[KEY] = {
                "ranks": strategy.world_size,
                "token": token,
                "place": files.place(token),
                "algorithm": fit.owner.name,
                "fingerprint": fit.owner.fingerprint(),
                "own": own,
            }
        known = strategy.broadcast(known)
        with self._ranks.failing_as_one():
            if not strategy.is_global_zero:
                files.save(token, strategy.global_rank, seal(owner, part, known))
        write(filepath)
        # an asynchronous one may not be there yet, and its predecessor still needs the set before;
        # by the next save it is taken to be there
        files.keep_only(token, spare=int(writes_later(strategy.checkpoint_io)))

    def _own_part(self, fit: _Fit, checkpoint: Mapping[str, Any]) -> Part:
        strategy, trainer, part = self._strategy, fit.trainer, {}
        several = strategy.world_size > 1  # one rank loses nothing
        loader, scheduler = several * "a training data loader", several * "a scheduler"
        if fit.owner.replicas:
            part = {
                "optimizers": [strategy.optimizer_state(one) for one in strategy.optimizers],
                "precision": strategy.precision_plugin.state_dict(),
                "tensors": fit.tensors.state(strategy.broadcast),
            }
        return part | {
            "algorithm": fit.owner.state_dict(),
            "gradients": half_accumulated(trainer),
            "random": random_state(strategy.root_device),
            "epoch_start": self._epoch_start.state_dict(),
            "loaders": loadable(loop_state(checkpoint).get("combined_loader"), loader),
            "ahead": loadable(read_ahead(trainer)),
            "schedulers": loadable(checkpoint.get("lr_schedulers"), scheduler),
            "watched": watched_metrics(trainer),
        }

    def remove(self, filepath: FilePath) -> None:
        """Remove the files of a checkpoint that rank 0 removes; in `remove_checkpoint`.

        Those on disks of other nodes go with the next save, or in `settle`.
        """
        if self._strategy.is_global_zero:
            RankFiles(filepath).remove()
            self._removed.append(filepath)

    def settle(self) -> None:
        """Remove what is left to be removed; collective, in `on_train_end`."""
        if self._fit is not None:
            self._forget(self._strategy.broadcast(self._removed))

    def _forget(self, removed: list[FilePath]) -> None:
        """Remove this node's files of checkpoints that rank 0 has removed."""
        for path in removed:
            RankFiles(path).remove()
        self._removed = []

    def end(self) -> None:
        """Forget the fit; in `teardown`."""
        self._fit = self._source = self._part = None
        self._resumes = False
        self._epoch_start.remove()
