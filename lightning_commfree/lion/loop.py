"""Distributed Lion in a training loop of your own, without a Trainer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.job import ReplicaChannels
from lightning_commfree.comm.ledger import Ledger
from lightning_commfree.lion.algorithm import LionVotes
from lightning_commfree.lion.optimizer import DistributedLion
from lightning_commfree.lion.settings import LionSettings
from lightning_commfree.model.replication import broadcast_initial_weights

_ONLY_IN_TRAINER = ("node_size", "inside")


@contextmanager
def distributed_lion(
    module: nn.Module, optimizer: DistributedLion, overlap: bool = False, **settings: Any
) -> Iterator[LionVotes]:
    """Context manager around a training loop, whose ranks vote; yields `LionVotes`; collective.

    All ranks begin with rank 0's weights, and parameters remain equal on all of them. Buffers, such
    as BatchNorm's statistics, are averaged after the block; call `votes.average_buffers()` on all
    ranks before a validation. All ranks must take the same number of steps. Checkpoints, resuming
    and stopping early are up to the loop.

    Args:
        module: the model, without DDP around it.
        optimizer: holds the module's parameters.
        overlap: whether to start votes in the backward. Then nothing may change gradients between
            the backward and the step, such as clipping or loss scaling: it would have no effect.
        **settings: arguments of `DistributedLionStrategy`, with the same defaults, except for
            `node_size` and `inside`.

    Raises:
        RuntimeError: there is no process group.
        ValueError: a setting is out of range, or settings or models differ between ranks.
        TypeError: a setting does not exist here, or the optimizer is another one.

    Example::

        dist.init_process_group("gloo")
        with distributed_lion(model, optimizer) as votes:
            for inputs, targets in loader:
                with votes.stepping():
                    loss(model(inputs), targets).backward()
                    optimizer.step()
                    optimizer.zero_grad()
    """
    if wrong := [name for name in _ONLY_IN_TRAINER if name in settings]:
        raise TypeError(
            f"`{wrong[0]}` is for a Trainer, with `DistributedLionStrategy`. In a loop of your own,"
            " every rank is a worker."
        )
    if not isinstance(optimizer, DistributedLion):
        raise TypeError(
            f"`distributed_lion` requires `DistributedLion`, not `{type(optimizer).__name__}`:"
            " use `lightning_commfree.DistributedLion(model.parameters(), lr=1e-4)`."
        )
    chosen, ledger = LionSettings(**settings), Ledger()
    channel = Channel.of_all_ranks(ledger)
    failed = True
    try:
        broadcast_initial_weights(channel, module, chosen.fingerprint())
        alone = Channel([channel.rank], channel.rank, Ledger())
        channels = ReplicaChannels(channel, channel, alone)
        votes = LionVotes(module, optimizer, chosen, channels, overlap)
        try:
            yield votes
            votes.average_buffers()
        finally:
            votes.close()
        failed = False
    finally:
        channel.close(failed)
