"""Streaming DiLoCo in a training loop of your own, without a Trainer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.ledger import Ledger
from lightning_commfree.diloco.fragments import split_into_fragments
from lightning_commfree.diloco.settings import DiLoCoSettings
from lightning_commfree.diloco.streaming import StreamingDiLoCo
from lightning_commfree.diloco.transport import FixedTransport
from lightning_commfree.model.replication import broadcast_initial_weights

_ONLY_IN_TRAINER = ("replica_size", "inside", "evaluate")


@contextmanager
def streaming_diloco(
    module: nn.Module, *optimizers: Optimizer, **settings: Any
) -> Iterator[StreamingDiLoCo]:
    """Context manager around a training loop, in which each rank is a replica; collective.

    All ranks begin with rank 0's weights and, after the block, have the mean of all replicas'
    weights. They must take the same number of steps. In between, the module holds this replica's
    own weights; `diloco.weight_swap.outer_weights()` swaps in those on which all replicas agree.
    `diloco.step` is the number of steps, and `diloco.ledger` counts bytes. Checkpoints, resuming
    and stopping early are up to the loop.

    Args:
        module: the model, without DDP around it. Parameters that are frozen are not exchanged.
        *optimizers: the optimizers of the loop.
        **settings: arguments of `StreamingDiLoCoStrategy`, with the same defaults, except for
            `replica_size`, `inside` and `evaluate`.

    Raises:
        RuntimeError: there is no process group.
        ValueError: a setting is out of range, or settings or models differ between ranks.
        TypeError: a setting does not exist here.

    Example::

        dist.init_process_group("gloo")
        with streaming_diloco(model, optimizer) as diloco:
            for inputs, targets in loader:
                with diloco.stepping():
                    loss(model(inputs), targets).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                diloco.after_step()
    """
    if wrong := [name for name in _ONLY_IN_TRAINER if name in settings]:
        raise TypeError(
            f"`{wrong[0]}` is for a Trainer, with `StreamingDiLoCoStrategy`. In a loop of your own,"
            " every rank is a replica."
        )
    chosen = DiLoCoSettings(**settings)
    channel = Channel.of_all_ranks(Ledger())
    failed = True
    try:
        broadcast_initial_weights(channel, module, chosen.fingerprint())
        fragments = split_into_fragments(
            module, chosen.num_fragments, chosen.fragment_pattern, optimizers
        )
        transport = FixedTransport(channel, timed=chosen.is_auto)
        diloco = StreamingDiLoCo(module, fragments, chosen, transport)
        diloco.warm_up()
        diloco.optimizers = optimizers
        try:
            yield diloco
            diloco.finish()
        finally:
            diloco.close()
        failed = False
    finally:
        channel.close(failed)
