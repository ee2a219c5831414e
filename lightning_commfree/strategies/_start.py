"""How the ranks of a fit begin: they see that they mean the same, and take rank 0's weights."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.handshake import check_agreement

START_TAG = "start"
_DDP_KWARGS = (
    "accelerator",
    "parallel_devices",
    "cluster_environment",
    "checkpoint_io",
    "precision_plugin",
    "process_group_backend",
    "timeout",
    "start_method",
)


def common_start(channel: Channel, module: nn.Module, facts: Mapping[str, str]) -> None:
    """Compare settings and module over all ranks, then overwrite all with rank 0's weights.

    Args:
        channel: over the world.
        module: has the same parameters and buffers on all ranks.
        facts: what else must be equal.

    Raises:
        ValueError: the ranks do not agree; on all of them alike.
    """
    check_agreement(channel, {**facts, **_describe(module)})
    for tensor in [*module.parameters(), *module.buffers()]:
        if tensor.numel() and not tensor.is_meta:  # there are no values yet
            raw = tensor.detach().to(channel.device).contiguous().reshape(-1).view(torch.uint8)
            received = channel.broadcast(raw, START_TAG).wait()
            tensor.data.copy_(received.view(tensor.dtype).reshape(tensor.shape))


def check_ddp_kwargs(strategy: str, ddp_kwargs: Mapping[str, Any]) -> None:
    """Refuse what means nothing where there is no gradient synchronization by DDP.

    Raises:
        TypeError: an argument of that kind, or one that nobody knows.
    """
    for name in ddp_kwargs:
        if name not in _DDP_KWARGS:
            near = difflib.get_close_matches(name, _DDP_KWARGS, n=1)
            hint = f" Did you mean `{near[0]}`?" if near else ""
            raise TypeError(
                f"`{strategy}` got the argument `{name}`. It replaces DDP's gradient"
                " synchronization, so of `DDPStrategy` it takes only"
                f" {', '.join(f'`{legal}`' for legal in _DDP_KWARGS)}.{hint}"
            )


def _describe(module: nn.Module) -> dict[str, str]:
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return {
        name: f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        + (", trainable" if tensor.requires_grad else "")
        for name, tensor in tensors
    }
