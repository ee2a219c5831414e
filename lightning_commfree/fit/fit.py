"""What the parts of a strategy (layouts, checks) know of the Trainer's run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_commfree.comm.job import ReplicaChannels
from lightning_commfree.fit.ranks import Ranks
from lightning_commfree.host import CheckpointIO, Precision, pl
from lightning_commfree.lightning_internals import Patches


@dataclass(frozen=True)
class Fit:
    """One run of a Trainer (`fit`, `validate`, `test` or `predict`): its objects and settings.

    The strategy makes it when the ranks have joined, before checkpoints are read.
    """

    strategy: str  # name of the strategy's class, for error messages
    trainer: pl.Trainer
    module: pl.LightningModule
    ranks: Ranks
    patches: Patches
    precision: Precision
    checkpoint_io: CheckpointIO
    device: torch.device
    fingerprint: Mapping[str, str]  # settings that must be the same on all ranks
    ddp_kwargs: Mapping[str, Any]  # arguments of `DDPStrategy` that differ from its defaults
    optimizers: Callable[[], Sequence[Optimizer]]  # the current ones: hooks may replace them
    wrap_in_ddp: Callable[[], DistributedDataParallel]  # averages gradients within this replica
    returns_weights: bool  # a launching process takes the weights from the module's `state_dict`

    @property
    def channels(self) -> ReplicaChannels:
        """The channels between all ranks, between replicas and within this replica."""
        return self.ranks.channels
