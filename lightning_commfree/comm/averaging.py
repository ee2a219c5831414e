"""The mean of a module's buffers over ranks; layers that exchange their own are refused."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from lightning_commfree.comm.channel import Channel


def averaged_buffers(
    module: nn.Module, channel: Channel, tag: str
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield a module's floating-point buffers of a checkpoint with their means over the ranks.

    The sums run in the order of the ranks, in fp32 at least, so the means are bit-identical on all
    of them. What all ranks hold is its own mean, to the last bit and where a sum would overflow.
    """
    kept = module.state_dict(keep_vars=True)
    buffers = [
        buffer
        for name, buffer in module.named_buffers()
        if buffer.is_floating_point() and buffer.numel() and name in kept
    ]
    if not buffers:
        return

    least = torch.zeros(0, dtype=torch.float32, device=channel.device)
    flat = torch.cat([least, *(b.detach().reshape(-1).to(channel.device) for b in buffers)])
    rows = channel.all_gather(flat, tag).wait()
    total = rows[0].clone()
    for row in rows[1:]:
        total += row

    sizes = [buffer.numel() for buffer in buffers]
    same = (rows == rows[0]).all(dim=0)
    means = torch.split(torch.where(same, rows[0], total / channel.size), sizes)

    for buffer, mean in zip(buffers, means, strict=True):
        yield buffer, mean.view(buffer.shape)


def refuse_sync_batchnorm(strategy: str, module: nn.Module) -> None:
    """Refuse layers that exchange their statistics: replicas train apart, and average them.

    Raises:
        ValueError: a layer exchanges them.
    """
    if any(isinstance(child, nn.SyncBatchNorm) for child in module.modules()):
        raise ValueError(
            f"`{strategy}` does not support SyncBatchNorm, which exchanges statistics in every"
            " forward. Leave out `sync_batchnorm=True`: the strategy averages the statistics of"
            " ordinary BatchNorm layers when it needs them."
        )
