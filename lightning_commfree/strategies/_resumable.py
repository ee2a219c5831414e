"""The hooks of a strategy whose replicas resume exactly: each hands on to `ExactResume`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_commfree.resume.exact import ExactResume
from lightning_commfree.resume.rank_state import Adopted, Saved
from lightning_commfree.resume.whole_files import FilePath
from lightning_commfree.strategies._replicated import ReplicatedStrategy
from lightning_commfree.strategies.signals import warn_unsaved


class ResumableStrategy(ReplicatedStrategy):
    """A `ReplicatedStrategy` that saves and restores every rank's own state.

    A subclass gives its algorithm's part (`_rank_state`), takes it back (`_load_rank_state`) and
    names what must be as it was (`_fingerprint` and `_resume_fingerprint`).
    """

    _algorithm: str
    # of `_fingerprint`, what may be another at a resume
    _free_at_resume: frozenset[str] = frozenset()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._resume = ExactResume(self, self)

    @abstractmethod
    def _rank_state(self) -> dict[str, Any]:
        """Return the algorithm's state on this rank: tensors and plain values, copies."""

    @abstractmethod
    def _load_rank_state(self, state: dict[str, Any]) -> None:
        """Put back what `_rank_state` returned; the algorithm stands at its beginning."""

    @abstractmethod
    def _resume_fingerprint(self) -> dict[str, str]:
        """Return what besides `_fingerprint` must be as it was for an exact resume."""

    def _adopt(self, saved: Saved) -> Adopted | None:
        """Choose what this rank can use of a save by other ranks or with other settings."""
        del saved
        return None

    # -- what follows is for the Trainer, in the order in which it calls it

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        # before the first loader is made
        self._resume.install(self._module.trainer)

    @override
    def load_checkpoint(
        self, checkpoint_path: FilePath, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        # later releases of Lightning pass more arguments
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        # the ranks' files are looked at before anything is restored
        if self.lightning_module is not None and self._module.trainer.state.fn == TrainerFn.FITTING:
            weights_only = kwargs.get("weights_only", args[0] if args else None)
            self._resume.read(checkpoint_path, checkpoint, weights_only)
        return checkpoint

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        # last: the algorithm stands, and takes its state back
        if trainer.state.fn == TrainerFn.FITTING:
            self._resume.begin(trainer, _Owner(self))

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore this rank's own optimizers and gradient scaler, the checkpoint's without it."""
        super().load_optimizer_state_dict(self._resume.optimizer_states(checkpoint))

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        # last before the first batch: what hooks drew until now does not count
        self._resume.go_on()

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: FilePath, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint and the ranks' files beside it."""
        if self._stopped_by_hand():
            warn_unsaved()
            return
        write = super().save_checkpoint
        self._resume.save(
            checkpoint, filepath, lambda path: write(checkpoint, path, storage_options)
        )

    @override
    def remove_checkpoint(self, filepath: FilePath) -> None:
        super().remove_checkpoint(filepath)
        self._resume.remove(filepath)

    @override
    def on_train_end(self) -> None:
        # all ranks are here for the last time
        self._resume.settle()
        super().on_train_end()

    @override
    def teardown(self) -> None:
        self._resume.end()
        super().teardown()


class _Owner:
    """The algorithm, as `ExactResume` asks for it."""

    replicas = True

    def __init__(self, strategy: ResumableStrategy) -> None:
        self._strategy = strategy
        self.name = strategy._algorithm
        self.free_at_resume = strategy._free_at_resume
        self.state_dict = strategy._rank_state
        self.load_state_dict = strategy._load_rank_state
        self.adopt = strategy._adopt

    def fingerprint(self) -> dict[str, str]:
        return {**self._strategy._fingerprint(), **self._strategy._resume_fingerprint()}
