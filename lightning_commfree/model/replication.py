"""Keep what replicas share equal on all ranks: initial weights, buffers, skipped fp16 steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import Optimizer

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.digest import thorough_digest
from lightning_commfree.comm.handshake import check_agreement
from lightning_commfree.model.shards import is_part, own

START_TAG = "start"  # of the ledger: bytes before the first step


def common_start(
    channel: Channel,
    module: nn.Module,
    fingerprint: Mapping[str, str],
    between: Channel | None = None,
) -> None:
    """Compare settings and module over all ranks, then take rank 0's weights where they differ.

    Args:
        channel: over the world.
        module: has the same parameters and buffers on all ranks.
        fingerprint: what else must be equal.
        between: to the ranks that hold the same shards in other replicas, where ranks hold shards;
            they take the first replica's.

    Raises:
        ValueError: the ranks do not agree; the same error on all of them.
    """
    # first: tensors of different shapes would make the exchange below hang or mix them up
    check_agreement(channel, {**fingerprint, **_describe(module)})
    tensors = [*module.parameters(), *module.buffers()]
    take_first_rank(channel, (t for t in tensors if not is_part(t)), START_TAG)
    if between is not None:
        take_first_rank(between, (t for t in tensors if is_part(t)), START_TAG)


def take_first_rank(channel: Channel, tensors: Iterable[Tensor], tag: str) -> None:
    """Overwrite `tensors` with those of the channel's first rank; blocks.

    The ranks compare hashes, 8 bytes a tensor, and send only the tensors that differ. In a job that
    loads the same weights on every rank, there are none.

    Args:
        channel: to the ranks.
        tensors: of the same shapes, dtypes and order on all ranks. Those without values, empty or
            on `meta`, are left alone.
        tag: of the ledger.
    """
    held = [own(tensor) for tensor in tensors if not tensor.is_meta]
    held = [tensor for tensor in held if tensor.numel()]
    if not held or channel.size == 1:
        return
    digests = _digests_of_all(channel, held, tag)
    differs = (digests != digests[0]).any(dim=0).tolist()
    for tensor in (tensor for tensor, sent in zip(held, differs, strict=True) if sent):
        raw = tensor.to(channel.device).contiguous().view(-1).view(torch.uint8)
        received = channel.broadcast(raw, tag).wait()
        tensor.copy_(received.view(tensor.dtype).view(tensor.shape))


def differ_from_first(channel: Channel, tensors: Sequence[Tensor], tag: str) -> list[bool]:
    """Return which of these tensors are not what the channel's first rank has; collective.

    Args:
        channel: to the ranks.
        tensors: in the same order on all ranks; their sizes may differ.
        tag: of the ledger.
    """
    if not tensors or channel.size == 1:
        return [False] * len(tensors)
    digests = _digests_of_all(channel, [own(tensor) for tensor in tensors], tag)
    return (digests[channel.rank] != digests[0]).tolist()


def _digests_of_all(channel: Channel, tensors: Sequence[Tensor], tag: str) -> Tensor:
    """Return every rank's hashes of some tensors, shape (ranks, tensors)."""
    nothing = torch.zeros((), dtype=torch.int64, device=channel.device)
    digests = [
        thorough_digest(one.contiguous()).to(channel.device) if one.numel() else nothing
        for one in tensors
    ]
    return channel.all_gather(torch.stack(digests), tag).wait()


def share_random_state(channel: Channel, device: torch.device) -> None:
    """Give all ranks of a channel the first one's random states, of host and device."""
    state = torch.get_rng_state().to(channel.device)
    torch.set_rng_state(channel.broadcast(state, START_TAG).wait().cpu())
    if device.type == "cuda":
        own = torch.cuda.get_rng_state(device).to(channel.device)
        torch.cuda.set_rng_state(channel.broadcast(own, START_TAG).wait().cpu(), device)


def _describe(module: nn.Module) -> dict[str, str]:
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return {
        name: f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        + (", trainable" if tensor.requires_grad else "")
        for name, tensor in tensors
    }


def averaged_buffers(
    module: nn.Module, channel: Channel, tag: str
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield a module's floating-point buffers of a checkpoint with their means over the ranks.

    The sums run in the order of the ranks, in fp32 at least, so the means are bit-identical on all
    of them. A value that is the same on all ranks is its own mean, to the last bit and where the
    sum would overflow.
    """
    kept = module.state_dict(keep_vars=True)
    buffers = [
        buffer
        for name, buffer in module.named_buffers()
        if buffer.is_floating_point() and buffer.numel() and name in kept
    ]
    if not buffers:
        return

    # `cat` promotes to the widest dtype, and this is the least: a sum in bf16 would lose bits
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
    """Refuse SyncBatchNorm, whose layers exchange statistics in every forward.

    Raises:
        ValueError: the module has such a layer.
    """
    if any(isinstance(child, nn.SyncBatchNorm) for child in module.modules()):
        raise ValueError(
            f"`{strategy}` does not support SyncBatchNorm, which exchanges statistics in every"
            " forward. Leave out `sync_batchnorm=True`: the strategy averages the statistics of"
            " ordinary BatchNorm layers when it needs them."
        )


class CommonGradScaler(ShardedGradScaler):  # type: ignore[misc]
    """torch's scaler whose ranks skip a step together, with errors that name a lost rank.

    A plain scaler looks at a rank's own gradients: one rank would skip its step, and the others
    would wait for its messages in that step.

    Args:
        scaler: to replace, with its scale and settings.
        device: the type of the gradients' device.
        channel: to the ranks.
    """

    def __init__(self, scaler: torch.amp.GradScaler, device: str, channel: Channel) -> None:
        super().__init__(
            device,
            init_scale=scaler.get_scale(),
            growth_factor=scaler.get_growth_factor(),
            backoff_factor=scaler.get_backoff_factor(),
            growth_interval=scaler.get_growth_interval(),
            process_group=channel.group,
        )
        self._channel = channel

    def unscale_(self, optimizer: Optimizer) -> None:
        """Unscale the gradients, and agree on whether any rank has found NaN or Inf."""
        with self._channel.naming_lost("overflow"):
            super().unscale_(optimizer)
