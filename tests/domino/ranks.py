"""Run a step of a sharded model on one rank, and gather its gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.ledger import Ledger
from lightning_commfree.domino import DominoSettings, ParallelModel
from tests.domino.models import Case, Outcome, batch_for, exact_loss, make_for, step


def divide(model: nn.Module, channel: Any, case: Case, seed: int = 0) -> ParallelModel:
    """Shard a model with the settings of `case`."""
    return ParallelModel(model, channel, DominoSettings(None, case.split, case.parts), seed)


def whole(parallel: ParallelModel, parameter: nn.Parameter, value: Tensor) -> Tensor:
    """Gather a full gradient, summing shards that several ranks hold; collective."""
    spec = parallel.sharding.specs.get(parameter)
    channel = parallel.group.channel
    if spec is None:
        return value.clone()
    if not spec.overlapping:
        return spec.join(list(channel.all_gather(value.contiguous(), "test").wait()))
    total = value.new_zeros(spec.size, *value.shape[1:])
    start, stop = spec.ranges[channel.rank]
    total[start:stop] = value
    return channel.all_reduce(total, "test").wait()


def whole_gradients(parallel: ParallelModel) -> dict[str, Tensor | None]:
    """Gather the gradients of the full model, by name; collective."""
    return {
        name: None if p.grad is None else whole(parallel, p, p.grad)
        for name, p in parallel.sharding.model.named_parameters()
    }


def play(channel: Any, case: Case, gather: Any = None) -> Outcome:
    """Run one step of the case.

    Args:
        channel: for the model.
        case: model, batch, schedule.
        gather: a channel to put gradients together with, if not the same.
    """
    model = make_for(case)
    parallel = divide(model, channel, case)
    if not parallel.sharding.sublayers:  # the loss is transformers' own, which is in float32
        model.loss_function = exact_loss
    batch = batch_for(case)
    loss, logits = step(model, case, batch)
    parallel.group.channel = gather or channel
    embeds = batch["inputs_embeds"].grad if case.embeds else None
    return Outcome(loss, whole_gradients(parallel), logits, embeds)


def with_channel(
    rank: int, size: int, function: Callable[..., Any], arguments: Sequence[Any] = ()
) -> Any:
    """Return `function(channel, *arguments)`; for `run_ranks`."""
    torch.set_num_threads(1)
    channel = Channel.open([list(range(size))], rank, Ledger())
    try:
        return function(channel, *arguments)
    finally:
        channel.close()


def play_all(channel: Any, cases: Sequence[Case]) -> list[Outcome]:
    """Run one case after the other."""
    return [play(channel, case) for case in cases]
