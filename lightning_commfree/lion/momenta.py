"""The mean of the workers' momenta; without it they stay private and drift apart.

After arXiv:2411.16462.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.ledger import all_gather_bytes, all_to_all_bytes
from lightning_commfree.lion.worker import Member

TAG = "momentum"


def average_momenta(
    members: Sequence[Member], channel: Channel, node: Channel | None = None
) -> None:
    """Replace the momenta of some parameters by their mean over the workers; blocks.

    Every worker averages one shard, in the order of the workers, and sends it to all: as many bytes
    as a ring all-reduce, and the same bits on all workers.

    Args:
        members: the parameters; the same on all workers.
        channel: to the other workers: CPU tensors.
        node: to the ranks that form one worker with this one and share its momenta; each averages
            its part.
    """
    momenta = [member.state["momentum"].view(-1) for member in members]
    values = torch.cat([momentum.to(channel.device) for momentum in momenta])

    parts, mine = (node.size, node.rank) if node else (1, 0)
    shards = channel.size * parts
    padded = pad(values, (0, -values.numel() % shards)).view(parts, channel.size, -1)
    mean = _mean(padded[mine], channel)
    if node is not None:
        mean = node.all_gather(mean.to(node.device), TAG).wait()

    sizes = [momentum.numel() for momentum in momenta]
    means = torch.split(mean.flatten()[: values.numel()], sizes)
    for momentum, new in zip(momenta, means, strict=True):
        momentum.copy_(new)


def momentum_bytes(members: Sequence[Member], channel: Channel, node: Channel | None = None) -> int:
    """Return the bytes that this rank sends to other workers in `average_momenta`."""
    parts = node.size if node else 1
    numel = sum(member.parameter.numel() for member in members)
    widest = max(member.state["momentum"].element_size() for member in members)
    shard_bytes = -(-numel // (channel.size * parts)) * widest
    up_bytes = all_to_all_bytes(channel.size * shard_bytes, channel.size)
    return up_bytes + all_gather_bytes(shard_bytes, channel.size)


def mean_momenta(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the first of several `DistributedLion.state_dict()`s with the mean of all momenta."""
    first = {**states[0], "state": dict(states[0]["state"])}

    for index, state in first["state"].items():
        total = sum(other["state"][index]["momentum"] for other in states)
        first["state"][index] = {**state, "momentum": total / len(states)}
    return first


def check_momenta(state: Mapping[int, Any], parameters: Mapping[int, nn.Parameter]) -> None:
    """See that what a saved optimizer state has of parameters are momenta for them.

    Args:
        state: of a `DistributedLion.state_dict()`, by the parameter's number. It has nothing of
            parameters with which no step has been taken.
        parameters: that it is to be loaded for, by their numbers.

    Raises:
        ValueError: one is something else, or of another shape or dtype.
    """
    for index, parameter in parameters.items():
        own = state.get(index)
        if not own:
            continue

        momentum = own.get("momentum")
        exact = torch.promote_types(parameter.dtype, torch.float32)
        wanted = f"{exact} of shape {list(parameter.shape)}"
        if not isinstance(momentum, Tensor):
            found = f"it has {', '.join(map(repr, own))}"
        elif momentum.shape != parameter.shape or momentum.dtype != exact:
            found = f"it has {momentum.dtype} of shape {list(momentum.shape)}"
        else:
            continue

        raise ValueError(
            f"The optimizer state is not one of `DistributedLion` for this model: parameter {index}"
            f" needs a momentum, {wanted}, and {found}. Resume with the model, the precision and"
            " the optimizer of the save, or load the weights alone: `fit` without `ckpt_path`,"
            " after `load_state_dict` or `load_from_checkpoint`."
        )


def _mean(values_WS: Tensor, channel: Channel) -> Tensor:
    """Return the mean of all workers' values, shape (W * S,)."""
    rows = channel.all_to_all(values_WS, TAG).wait()
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return channel.all_gather(total / channel.size, TAG).wait().flatten()
