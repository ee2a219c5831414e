"""Keep replicas consistent: initial weights, buffers, and steps that a gradient scaler skips."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.digest import thorough_digest
from lightning_commfree.comm.exchange import ordered_sum
from lightning_commfree.comm.handshake import check_agreement
from lightning_commfree.model.shards import is_shard, local_tensor

START_TAG = "start"  # ledger tag of traffic before the first step


def broadcast_initial_weights(
    channel: Channel,
    module: nn.Module,
    fingerprint: Mapping[str, str],
    shard_channel: Channel | None = None,
) -> None:
    """Check that all ranks have the same settings and model, then broadcast the initial weights.

    `channel` connects all ranks. If the model is sharded, `shard_channel` connects the ranks that
    hold the same shards in different replicas, and shards are copied from the first replica. If
    settings, or the model's names, shapes or dtypes, differ between ranks, all ranks raise the same
    ValueError.
    """
    # check first: with different shapes, the broadcasts would hang or mix up tensors
    check_agreement(channel, {**fingerprint, **_describe(module)})
    tensors = [*module.parameters(), *module.buffers()]
    take_first_rank(channel, (t for t in tensors if not is_shard(t)), START_TAG)
    if shard_channel is not None:
        take_first_rank(shard_channel, (t for t in tensors if is_shard(t)), START_TAG)


def take_first_rank(channel: Channel, tensors: Iterable[Tensor], tag: str) -> None:
    """Copy the first rank's tensors to all other ranks of a channel, in place; collective.

    The tensors must have the same shapes, dtypes and order on all ranks; empty tensors and tensors
    on `meta` are skipped. The ranks compare an 8-byte hash of each tensor and send only the tensors
    that differ, so none are sent if all ranks have loaded the same weights.
    """
    held = [local_tensor(tensor) for tensor in tensors if not tensor.is_meta]
    held = [tensor for tensor in held if tensor.numel()]
    if not held or channel.size == 1:
        return
    digests = digests_of_all(channel, held, tag)
    differs = (digests != digests[0]).any(dim=0).tolist()
    for tensor in (tensor for tensor, sent in zip(held, differs, strict=True) if sent):
        raw = tensor.to(channel.device).contiguous().view(-1).view(torch.uint8)
        received = channel.broadcast(raw, tag).wait()
        tensor.copy_(received.view(tensor.dtype).view(tensor.shape))


def differ_from_first(channel: Channel, tensors: Sequence[Tensor], tag: str) -> list[bool]:
    """Return, for each tensor, whether it differs from the first rank's tensor; collective.

    All ranks must have the same number of tensors, in the same order; their sizes may differ.
    """
    if not tensors or channel.size == 1:
        return [False] * len(tensors)
    digests = digests_of_all(channel, tensors, tag)
    return (digests[channel.rank] != digests[0]).tolist()


def digests_of_all(
    channel: Channel,
    tensors: Sequence[Tensor],
    tag: str,
    hash_tensor: Callable[[Tensor], Tensor] = thorough_digest,
) -> Tensor:
    """Return the hashes of every rank's tensors; collective.

    The result is int64, shape (ranks, tensors), and the same on all ranks. A sharded tensor is
    hashed by its local shard, and an empty tensor hashes to 0.
    """
    nothing = torch.zeros((), dtype=torch.int64, device=channel.device)
    if not tensors:
        return nothing.expand(channel.size, 0)
    digests = [
        hash_tensor(one.contiguous()).to(channel.device) if one.numel() else nothing
        for one in map(local_tensor, tensors)
    ]
    return channel.all_gather(torch.stack(digests), tag).wait()


def share_random_state(channel: Channel, device: torch.device) -> None:
    """Copy the first rank's RNG states (CPU and CUDA) to all ranks of a channel; collective."""
    state = torch.get_rng_state().to(channel.device)
    torch.set_rng_state(channel.broadcast(state, START_TAG).wait().cpu())
    if device.type == "cuda":
        state = torch.cuda.get_rng_state(device).to(channel.device)
        torch.cuda.set_rng_state(channel.broadcast(state, START_TAG).wait().cpu(), device)


def _describe(module: nn.Module) -> dict[str, str]:
    """Describe each parameter and buffer by name: dtype, shape, and whether it is trainable."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return {
        name: f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        + (", trainable" if tensor.requires_grad else "")
        for name, tensor in tensors
    }


def persistent_buffers(module: nn.Module, remove_duplicate: bool = True) -> dict[str, Tensor]:
    """Return a module's persistent buffers by name, like `named_buffers`.

    It does not call `module.state_dict`, which users override, often without arguments, to leave
    tensors out of checkpoints.
    """
    owners = dict(module.named_modules(remove_duplicate=remove_duplicate))
    found = {}
    for name, buffer in module.named_buffers(remove_duplicate=remove_duplicate):
        owner, _, own_name = name.rpartition(".")
        if own_name not in getattr(owners[owner], "_non_persistent_buffers_set", ()):
            found[name] = buffer
    return found


class AveragedBuffers:
    """Persistent floating-point buffers that replicas average: `names`, or by default all.

    The set is fixed when this object is created, so that all messages have the same size on all
    ranks; names, shapes and dtypes must be the same on all ranks. A module may later replace a
    buffer by one of another shape or dtype (a memory bank that grows) or remove it, perhaps on one
    rank only. Such a buffer is no longer averaged: every rank keeps its own, as under DDP, and a
    *stand-in* with its last averaged values takes its place. `own` has the names of these buffers,
    as agreed by all ranks.
    """

    def __init__(self, module: nn.Module, names: Iterable[str] | None = None) -> None:
        self._module = module
        found = persistent_buffers(module)
        if names is None:
            names = [name for name, buffer in found.items() if buffer.is_floating_point()]
        self._last = {name: found[name].detach() for name in names}
        self.own: set[str] = set()

    @property
    def averaged(self) -> list[str]:
        """Names of the buffers that are still averaged."""
        return [name for name in self._last if name not in self.own]

    def tensors(self, names: Iterable[str] | None = None) -> list[Tensor]:
        """Return the named buffers, by default all; a replaced one's last values stand in for it.

        Their shapes never change.
        """
        chosen = list(self._last if names is None else names)
        for name in chosen:
            # not cached: a module may replace a buffer by one of the same shape
            if name not in self.own and (current := self._current(name)) is not None:
                self._last[name] = current
        return [self._last[name] for name in chosen]

    def describe(self) -> str:
        """Return a text with the buffers' names, original shapes and dtypes."""
        return ", ".join(f"{n} {list(b.shape)} {b.dtype}" for n, b in self._last.items())

    def replaced(self) -> list[bool]:
        """Return, for each buffer, whether it is no longer averaged, or is gone or changed here."""
        return [name in self.own or self._current(name) is None for name in self._last]

    def keep_own(self, names: Iterable[str]) -> None:
        """Stop averaging buffers; the module keeps its own."""
        for name in self._last.keys() & set(names):
            self._last[name] = self._last[name].clone()  # the module's own may still be unchanged
            self.own.add(name)

    def agree_on_replaced(self, gather: Callable[[Sequence[int]], list[list[int]]]) -> str:
        """Stop averaging buffers that any rank has replaced; return a warning, or ""; collective.

        `gather` takes one integer per buffer and returns the lists of all ranks. The warning is for
        the user; it is empty if no rank has replaced another buffer since the last call.
        """
        if not self._last:
            return ""
        rows = gather([int(one) for one in self.replaced()])
        found = {
            name: [rank for rank, row in enumerate(rows) if row[i]]
            for i, name in enumerate(self._last)
            if name not in self.own and any(row[i] for row in rows)
        }
        self.keep_own(found)
        if not found:
            return ""
        where = [f"{name!r} (on rank {', '.join(map(str, r))})" for name, r in found.items()]
        return (
            f"These buffers changed their shape or dtype during the fit: {', '.join(where)}. From"
            " now on, they are not averaged over the ranks: each rank keeps its own, and a"
            " checkpoint's `state_dict` contains rank 0's, as under DDP. If they need no averaging,"
            " register them with `persistent=False`."
        )

    def _current(self, name: str) -> Tensor | None:
        """Return the module's buffer if it still has its original shape and dtype, else None."""
        owner, _, own_name = name.rpartition(".")
        buffer = getattr(self._module.get_submodule(owner), own_name, None)
        last = self._last[name]
        if isinstance(buffer, Tensor) and (buffer.shape, buffer.dtype) == (last.shape, last.dtype):
            return buffer.detach()
        return None


def means_of(
    buffers: Sequence[Tensor], channel: Channel, tag: str
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (buffer, mean over the ranks) for each of the floating-point `buffers`; collective.

    Shapes and dtypes must be the same on all ranks. Values are summed in rank order, in fp32 or
    wider, so the means are bit-identical on all ranks. A value that is the same on all ranks is
    yielded unchanged, even if the sum would overflow.
    """
    if not sum(buffer.numel() for buffer in buffers):
        return

    # `cat` promotes to the widest dtype; this empty fp32 tensor makes that at least fp32
    fp32 = torch.zeros(0, dtype=torch.float32, device=channel.device)
    flat = torch.cat([fp32, *(b.detach().reshape(-1).to(channel.device) for b in buffers)])
    rows = channel.all_gather(flat, tag).wait()
    total = ordered_sum(rows)

    sizes = [buffer.numel() for buffer in buffers]
    same = (rows == rows[0]).all(dim=0)
    means = torch.split(torch.where(same, rows[0], total / channel.size), sizes)

    for buffer, mean in zip(buffers, means, strict=True):
        yield buffer, mean.view(buffer.shape)


class BucketOrder:
    """Records and restores the order in which DDP assigns gradients to buckets, for exact resume.

    After the first backward pass, DDP reassigns gradients to buckets in the order in which they
    became ready. With three or more ranks, rounding in an all-reduce depends on a value's position
    in its bucket, so a resumed fit must start with the same order. Create this object before the
    first backward pass; until then, `names`, the parameters' names in that order, is empty.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.names: list[str] = []
        self._ddp = ddp
        self._trained = {n: p for n, p in ddp.module.named_parameters() if p.requires_grad}
        self._hooks = [
            p.register_post_accumulate_grad_hook(partial(self._ready, name))
            for name, p in self._trained.items()
        ]

    def restore(self, names: Sequence[str]) -> None:
        """Restore a saved bucket order by running backward with zero gradients; collective.

        Do nothing if `names` was saved before the first backward pass.
        """
        if set(names) != self._trained.keys():  # saved before the first backward
            return
        self._ddp.require_forward_param_sync = False  # do not broadcast buffers
        own = vars(self._ddp.module)
        before = own.get("forward")  # present on a compiled module
        # autograd starts with the tensor that was computed last
        own["forward"] = lambda _: [self._trained[n].flatten()[:0].sum() for n in reversed(names)]
        try:
            with torch.enable_grad():
                sums = self._ddp(torch.zeros(()))
                torch.autograd.backward(sums, [torch.ones_like(one) for one in sums])
        finally:
            del own["forward"]
            if before is not None:
                own["forward"] = before
        for p in self._trained.values():
            p.grad = None

    def _ready(self, name: str, _: Tensor) -> None:
        """Record that a parameter's gradient is ready; stop recording after the last parameter."""
        if self._ddp.require_backward_grad_sync and name not in self.names:
            self.names.append(name)
        if len(self.names) == len(self._trained):
            self.close()

    def close(self) -> None:
        """Stop recording: remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def refuse_sync_batchnorm(strategy: str, module: nn.Module) -> None:
    """Raise a `ValueError` if the module has a SyncBatchNorm layer."""
    if any(isinstance(child, nn.SyncBatchNorm) for child in module.modules()):
        raise ValueError(
            f"`{strategy}` does not support SyncBatchNorm, which exchanges statistics in every"
            " forward pass. Use ordinary BatchNorm layers, without `sync_batchnorm=True`: the"
            " strategy averages their statistics across replicas."
        )


class CommonGradScaler(ShardedGradScaler):  # type: ignore[misc]
    """Gradient scaler that makes all ranks skip the same steps; its errors name lost ranks.

    A plain scaler checks only its own rank's gradients, so one rank could skip a step while other
    ranks wait for its messages. This scaler takes over the scale and settings of `scaler`.
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
        """Unscale the gradients, and check whether any rank's gradients contain NaN or Inf."""
        with self._channel.peers.naming_lost("overflow"):
            super().unscale_(optimizer)
