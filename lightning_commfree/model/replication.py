"""Keep what replicas share equal on all ranks: initial weights, buffers, skipped fp16 steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.digest import thorough_digest
from lightning_commfree.comm.handshake import check_agreement
from lightning_commfree.model.shards import is_part, own

START_TAG = "start"  # of the ledger: what travels before the first step


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
        between: to the ranks that hold the same parts of parameters in other replicas, where ranks
            hold parts; they take the first replica's.

    Raises:
        ValueError: the ranks do not agree; on all of them alike.
    """
    check_agreement(channel, {**fingerprint, **_describe(module)})
    tensors = [*module.parameters(), *module.buffers()]
    take_first_rank(channel, (t for t in tensors if not is_part(t)), START_TAG)
    if between is not None:
        take_first_rank(between, (t for t in tensors if is_part(t)), START_TAG)


def take_first_rank(channel: Channel, tensors: Iterable[Tensor], tag: str) -> None:
    """Overwrite `tensors` with those of the channel's first rank; blocks.

    The ranks compare hashes, 8 bytes a tensor, which each tensor's own device computes, and then
    send those that are not the same on all of them. In a job that loads the same weights on every
    rank, these are none.

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
    return (digests[channel.rank] != digests[0]).tolist()  # type: ignore[no-any-return]


def _digests_of_all(channel: Channel, tensors: Sequence[Tensor], tag: str) -> Tensor:
    """Return every rank's hashes of some tensors, shape (ranks, tensors)."""
    nothing = torch.zeros((), dtype=torch.int64, device=channel.device)
    digests = [
        thorough_digest(one.contiguous()).to(channel.device) if one.numel() else nothing
        for one in tensors
    ]
    return channel.all_gather(torch.stack(digests), tag).wait()


def share_random_state(channel: Channel, device: torch.device) -> None:
    """Let all ranks of a channel draw the same numbers from here on, on the host and the device."""
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


OVERFLOW_TAG = "overflow"


class AgreedGradScaler(torch.amp.GradScaler):
    """A scaler whose ranks skip a step together.

    torch's looks at a rank's own gradients: one rank would skip its step, and the others would wait
    for what it sends in that step.

    Args:
        scaler: whose place it takes, with its scale and settings.
        channel: over the ranks.
    """

    def __init__(self, scaler: torch.amp.GradScaler, channel: Channel) -> None:
        super().__init__(
            scaler._device,
            init_scale=scaler.get_scale(),
            growth_factor=scaler.get_growth_factor(),
            backoff_factor=scaler.get_backoff_factor(),
            growth_interval=scaler.get_growth_interval(),
        )
        self._channel = channel

    def unscale_(self, optimizer: Optimizer) -> None:
        """Unscale the gradients, and agree on whether some rank has found NaN or Inf."""
        super().unscale_(optimizer)

        found_by_device = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        for found in found_by_device.values():
            total = self._channel.all_reduce(
                found.to(self._channel.device, copy=True), OVERFLOW_TAG
            )
            found.copy_(total.wait())
