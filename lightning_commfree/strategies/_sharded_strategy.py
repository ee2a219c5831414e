"""What a strategy with a divided model needs of Lightning: whole checkpoints, resumed exactly.

It knows no schedule. Checkpoints hold the whole model and optimizer state, and what single ranks
know (`_rank_states`). A model on the `meta` device gets its values when it is divided; Lightning
restores a checkpoint after that.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch.optim import Optimizer
from typing_extensions import override

from lightning_commfree.comm.channel import Channel
from lightning_commfree.domino import (
    Channels,
    OptimizerParts,
    ShardedModule,
    on_meta,
    refuse_nonfinite_weights,
)
from lightning_commfree.patches import Patches
from lightning_commfree.resume.exact import ExactResume
from lightning_commfree.resume.whole_files import FilePath
from lightning_commfree.strategies._phases import CountingStrategy
from lightning_commfree.strategies._rank_states import TensorRank
from lightning_commfree.strategies.signals import warn_unsaved


class ShardedStrategy(CountingStrategy):
    """A strategy whose ranks hold parts of one model.

    A subclass divides the module in `configure_ddp` and says how ranks are grouped and how random
    numbers are drawn (`_split_settings`).
    """

    def __init__(self, **ddp_kwargs: Any) -> None:
        super().__init__(**ddp_kwargs)
        self._channels: Channels | None = None
        self._sharded: ShardedModule | None = None
        self._left_in_parts: OptimizerParts | None = None  # by the latest fit
        self._resume = ExactResume(self, self)
        self._filled = False  # the model was on `meta`

    @property
    @abstractmethod
    def tensor_parallel_size(self) -> int:
        """Ranks that share one model."""

    @abstractmethod
    def _split_settings(self) -> dict[str, str]:
        """Return the settings that decide in which order random numbers are drawn."""

    @property
    def sharded(self) -> ShardedModule:
        """The divided model; from `setup` to `teardown` of a fit."""
        assert self._sharded is not None, "a model is divided while a fit runs"
        return self._sharded

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        """A model on `meta` has room for a checkpoint's values only once it is divided."""
        return self._filled or self._on_meta()

    # -- life cycle

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self._open_channels()
        # before the first loader is made
        self._resume.install(self._module.trainer)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            mine = self.global_rank, self.world_size, self.tensor_parallel_size
            self._resume.begin(
                trainer, TensorRank(self.sharded.models, *mine, self._split_settings())
            )

    @override
    def on_train_end(self) -> None:
        # all ranks are here for the last time
        self._resume.settle()
        super().on_train_end()

    @override
    def model_to_device(self) -> None:
        """Leave it to `configure_ddp` in a fit: a device need not hold the whole model."""
        if self._module.trainer.state.fn != TrainerFn.FITTING:
            self._check_values()
            super().model_to_device()

    @override
    def teardown(self) -> None:
        if self._sharded is not None:
            self._left_in_parts = None
            if self._module.trainer.state.status != TrainerStatus.INTERRUPTED:
                self._sharded.join()
                self._left_in_parts = self._sharded.optimizer_parts
            self._sharded = None
        self._filled = False
        self._resume.end()
        patches = Patches()
        if self._on_meta():  # an error came first, and moving it to the CPU would hide the text
            patches.put(self._module, "cpu", lambda: self._module)
        try:
            super().teardown()
        finally:
            patches.remove()
        self._close_channels()

    # -- checkpoints

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: FilePath, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint and the ranks' files beside it."""
        if self._stopped_by_hand():
            warn_unsaved()
            return
        write = super().save_checkpoint
        self._resume.save(checkpoint, filepath, lambda at: write(checkpoint, at, storage_options))

    @override
    def remove_checkpoint(self, filepath: FilePath) -> None:
        super().remove_checkpoint(filepath)
        self._resume.remove(filepath)

    @override
    def load_checkpoint(
        self, checkpoint_path: FilePath, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        # later releases of Lightning pass more arguments
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        if self.lightning_module is not None and self._module.trainer.state.fn == TrainerFn.FITTING:
            weights_only = kwargs.get("weights_only", args[0] if args else None)
            self._resume.read(checkpoint_path, checkpoint, weights_only)
        return checkpoint

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the whole module's state on rank 0, gathered one tensor at a time.

        Collective; on the other ranks the dictionary is empty.

        Raises:
            RuntimeError: some rank's weights are not finite; on all ranks.
        """
        if self._sharded is None:
            return super().lightning_module_state_dict()
        if self._stopped_by_hand():
            return {}
        steps, size = self._module.trainer.global_step, self.tensor_parallel_size
        refuse_nonfinite_weights(self._open.world, self._module, steps, size)
        return self._sharded.whole_state_dict(keep=self.is_global_zero)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the whole optimizer state on rank 0; collective, empty on the other ranks.

        After a fit as well, where each rank's optimizer holds its part, as in the fit.
        """
        parts = self._left_in_parts if self._sharded is None else self._sharded.optimizer_parts
        if parts is None:
            return super().optimizer_state(optimizer)
        if self._stopped_by_hand():
            return {}
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        with self._tensor_group() as channel:
            return parts.whole_state_dict(optimizer, channel, keep=self.is_global_zero)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._sharded is not None:
            parts = self._sharded.part_state_dict(checkpoint["state_dict"])
            checkpoint = {**checkpoint, "state_dict": parts}
        super().load_model_state_dict(checkpoint, strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = [
            self.sharded.part_optimizer_state(optimizer, state)
            for optimizer, state in zip(
                self.optimizers, checkpoint["optimizer_states"], strict=True
            )
        ]
        super().load_optimizer_state_dict({**checkpoint, "optimizer_states": states})

    # -- inside

    @property
    def _module(self) -> pl.LightningModule:
        assert self.lightning_module is not None, "the Trainer connects the module first"
        return self.lightning_module

    @property
    def _open(self) -> Channels:
        assert self._channels is not None, "they are open while a fit runs"
        return self._channels

    def _open_channels(self) -> None:
        if self._channels is None:
            size = self.tensor_parallel_size
            near = (self.ledger, self.backend, self.patience, self.root_device)
            self._channels = Channels.open(
                self.global_rank, self.world_size, size, *near, self.liveness
            )
            self._world_channel = self._channels.world

    def _close_channels(self) -> None:
        if self._channels is not None:
            self._channels.close()
        self._channels = self._world_channel = None

    @contextmanager
    def _tensor_group(self) -> Iterator[Channel]:
        """In the body there is a channel to the ranks of this model, in a fit or after it."""
        fits = self._channels is not None
        self._open_channels()
        try:
            yield self._open.tensor
        finally:
            if not fits:
                self._close_channels()

    def _on_meta(self) -> bool:
        return self.lightning_module is not None and bool(on_meta(self.lightning_module))

    def _check_values(self) -> None:
        without = on_meta(self._module)
        if without:
            raise ValueError(
                f"{len(without)} tensors, {without[0]!r} among them, are on the meta device and"
                f" hold no values. `{type(self).__name__}` gives them some in `fit` only: call it"
                " first, or build the model on the CPU."
            )
