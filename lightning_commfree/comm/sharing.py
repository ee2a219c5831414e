"""One rank's tensors for all: only what differs travels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.digest import thorough_digest
from lightning_commfree.comm.handshake import check_agreement
from lightning_commfree.comm.parts import is_part, own

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
    hashes = [thorough_digest(tensor.contiguous()).to(channel.device) for tensor in held]
    gathered = channel.all_gather(torch.stack(hashes), tag).wait()
    differs = (gathered != gathered[0]).any(dim=0).tolist()
    for tensor in (tensor for tensor, sent in zip(held, differs, strict=True) if sent):
        raw = tensor.to(channel.device).contiguous().view(-1).view(torch.uint8)
        received = channel.broadcast(raw, tag).wait()
        tensor.copy_(received.view(tensor.dtype).view(tensor.shape))


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
