"""Computation of one worker: cast its ballot before the vote, take its step after it.

    c <- b1 m + (1 - b1) g       the direction, with the old momentum; its sign is the vote
    m <- b2 m + (1 - b2) g       from the worker's own gradient
    x <- x (1 - lr wd) - lr Delta

The arithmetic is in fp32 (fp64 for fp64 parameters) for any gradient dtype, and every operation
rounds once: there is no fused multiply-add, so the result does not depend on device or layout. CPUs
work in chunks that fit into the cache.

Momenta are never exchanged and drift apart, unless `average_momenta` (after arXiv:2411.16462)
averages them from time to time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from lightning_commfree.comm.bits import pack_bits_part
from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.exchange import Route, View, ordered_sum
from lightning_commfree.lion.ballot import HAS_GRADIENT, NONFINITE, header_bytes, write_header
from lightning_commfree.lion.buckets import Bucket
from lightning_commfree.lion.vote import PackedDelta
from lightning_commfree.model.shards import local_tensor

_DEVICE_CHUNK = 1 << 25  # values: few kernel launches, but bounded memory during backward
_CHUNK = 1 << 18  # values: a few buffers of this size fit into a core's cache

State = dict[str, Any]  # optimizer state of one parameter


class LionParam(NamedTuple):
    """Parameter with its optimizer state and its parameter group."""

    parameter: nn.Parameter
    state: State  # "momentum", and "master" if the parameter has less than 32 bits
    group: dict[str, Any]  # "lr", "betas" and "weight_decay", which may change between steps


def fill_state(state: State, local: Tensor) -> State:
    """Add what is missing to the state of a parameter; `local` is this rank's full or shard."""
    dtype = torch.promote_types(local.dtype, torch.float32)
    zeros = partial(torch.zeros_like, dtype=dtype, memory_format=torch.contiguous_format)
    if "momentum" not in state:
        state["momentum"] = zeros(local)
    if dtype != local.dtype and "master" not in state:
        state["master"] = zeros(local).copy_(local)
    return state


def copy_state(state: State, saved: State, device: torch.device) -> None:
    """Copy a saved state's tensors without changing their dtypes."""
    for key, value in saved.items():
        if isinstance(value, Tensor):
            state[key] = local_tensor(value).to(device, copy=True)


def update_master(state: State, local: Tensor) -> None:
    """Update the master copy, if any, of a parameter that was written to."""
    master = state.get("master")
    if master is not None:
        # values that were not written to keep their full precision
        same = master.to(local.dtype) == local
        master.copy_(torch.where(same, master, local.to(master.dtype)))


def hyperparameters(members: list[LionParam]) -> list[str]:
    """Format the hyperparameters that must be equal on all workers, one text per group."""
    groups = {id(member.group): member.group for member in members}.values()
    return [
        f"lr {float(group['lr'])}, betas {tuple(map(float, group['betas']))},"
        f" weight_decay {float(group['weight_decay'])}"
        for group in groups
    ]


def cast_ballot(
    bucket: Bucket, members: list[LionParam], valid: Tensor, flags: int, digest: Tensor | int
) -> Tensor:
    """Compute a worker's ballot on one bucket; changes no state.

    Args:
        bucket: the bucket.
        members: the bucket's parameters, in its order.
        valid: uint8, shape (bucket.plane_bytes,): bits that are not padding.
        flags: as in `write_header`.
        digest: as in `write_header`.

    Returns:
        Header, plane c > 0 and plane c != 0 in one buffer, uint8, on the parameters' device.

    Raises:
        TypeError: a gradient is sparse.
    """
    count = len(bucket.parameters)
    head = header_bytes(count)
    buffer = valid.new_zeros(head + 2 * bucket.plane_bytes)
    plus, nonzero = buffer[head:].view(2, -1)
    marks = valid.new_zeros(count)
    signs = _Signs(valid.device)

    for i, member in enumerate(members):
        gradient = member.parameter.grad
        if gradient is None:
            continue
        if gradient.is_sparse:
            raise TypeError(
                f"The gradient of {bucket.names[i]!r} is sparse, but votes require dense gradients."
                " Use `sparse=False` in its `nn.Embedding`."
            )
        signs.begin_parameter()
        for offset, direction in _directions(member, gradient):
            pack_bits_part(signs.positive(direction), bucket.starts[i] + offset, plus)
        marks[i] = HAS_GRADIENT + NONFINITE * signs.nonfinite

    zeros, abstains = bucket.numel - signs.voters, (marks & NONFINITE).any()
    if valid.device.type != "cpu" or zeros:  # on a GPU, reading `zeros` would make the host wait
        # compute the directions again: keeping them would take 4 bytes per parameter
        for i, member in enumerate(members):
            if member.parameter.grad is not None:
                for offset, direction in _directions(member, member.parameter.grad):
                    pack_bits_part(direction != 0, bucket.starts[i] + offset, nonzero)
    else:
        nonzero.copy_(valid)

    write_header(buffer[:head], flags, zeros, abstains, digest, marks)
    return buffer


class _Signs:
    """Signs of directions, and statistics of them, computed in few passes over memory.

    Attributes:
        voters: int64, 0-d: number of nonzero directions so far.
        nonfinite: bool, 0-d: whether a direction was NaN or Inf since `begin_parameter`.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cpu = device.type == "cpu"
        self.voters = torch.zeros((), dtype=torch.int64, device=device)
        self.nonfinite = torch.zeros((), dtype=torch.bool, device=device)
        self._signs = torch.empty(0, device=device)
        self._codes = torch.empty(0, dtype=torch.int8, device=device)

    def begin_parameter(self) -> None:
        """Reset `nonfinite`."""
        self.nonfinite = torch.zeros_like(self.nonfinite)

    def positive(self, direction: Tensor) -> Tensor:
        """Return direction > 0, bool; valid until the next call."""
        if not self._on_cpu:
            self.voters += torch.count_nonzero(direction)
            self.nonfinite |= ~torch.stack(torch.aminmax(direction)).isfinite().all()
            return direction > 0

        # on a CPU, torch vectorizes `sign` and `dot`, but not comparisons
        size = direction.numel()
        if self._codes.numel() < size or self._signs.dtype != direction.dtype:
            self._signs, self._codes = torch.empty_like(direction), self._codes.new_empty(size)

        # a finite sum proves that all values are finite, without another pass
        if not math.isfinite(float(direction.sum())) and not bool(direction.isfinite().all()):
            self.nonfinite = torch.ones_like(self.nonfinite)
            self.voters += torch.count_nonzero(direction)
            return direction > 0

        signs = torch.sign(direction, out=self._signs[:size])
        self.voters += int(torch.dot(signs, signs))  # exact: a chunk has fewer than 2^24 values
        return self._codes[:size].copy_(signs).relu_().view(torch.bool)


def take_step(
    bucket: Bucket,
    members: list[LionParam],
    delta: PackedDelta,
    with_gradient: tuple[bool, ...],
    abstained: bool,
) -> None:
    """Update the parameters of a bucket and this worker's momenta.

    Args:
        bucket: the bucket.
        members: the bucket's parameters, in its order.
        delta: result of the vote, on the parameters' device.
        with_gradient: per parameter, whether any worker has a gradient; if not, it is not updated.
        abstained: whether this worker abstained.
    """
    for start, member, has_gradient in zip(bucket.starts, members, with_gradient, strict=True):
        if has_gradient:
            _update_parameter(member, delta, start)
        # the gradient of a worker that abstained has NaN or Inf, which must not reach the momentum
        if member.parameter.grad is not None and not abstained:
            _update_momentum(member, member.parameter.grad)


def _update_parameter(member: LionParam, delta: PackedDelta, start: int) -> None:
    lr, decay = float(member.group["lr"]), float(member.group["weight_decay"])
    parameter = member.parameter.detach()
    values = flat(member.state.get("master", parameter))
    size = min(_chunk_size(values), values.numel())
    workspace = torch.empty(2, size, dtype=torch.uint8, device=values.device)
    deltas = values.new_empty(size)

    for offset, chunk in _chunks(values):
        signs = delta.read(start + offset, deltas[: chunk.numel()], workspace)
        if lr * decay:
            chunk.mul_(1 - lr * decay)
        if delta.offset == 1:  # lr times -1, 0 or 1 is exact, so fusing does not change the result
            chunk.sub_(signs, alpha=lr)
        else:
            chunk.sub_(signs.mul_(lr))

    if values.data_ptr() != parameter.data_ptr():  # a master copy, or a non-contiguous parameter
        parameter.copy_(values.view(parameter.shape))


def _update_momentum(member: LionParam, gradient: Tensor) -> None:
    beta = member.group["betas"][1]
    gradients = flat(gradient)
    scaled = member.state["momentum"].new_empty(min(_chunk_size(gradients), gradients.numel()))

    for offset, momentum in _chunks(member.state["momentum"].view(-1)):
        share = scaled[: momentum.numel()]
        _scale(gradients[offset : offset + momentum.numel()], 1 - beta, share)
        momentum.mul_(beta).add_(share)


def _directions(member: LionParam, gradient: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield (index of the first value, direction c) per chunk; its tensor is reused."""
    beta = member.group["betas"][0]
    momenta, gradients = member.state["momentum"].view(-1), flat(gradient)
    size = min(_chunk_size(gradients), gradients.numel())
    directions, scaled = momenta.new_empty(2, size).unbind(0)

    for offset, momentum in _chunks(momenta):
        count = momentum.numel()
        direction = torch.mul(momentum, beta, out=directions[:count])
        share = _scale(gradients[offset : offset + count], 1 - beta, scaled[:count])
        yield offset, direction.add_(share)


def _scale(values: Tensor, factor: float, out: Tensor) -> Tensor:
    """Write `values` times `factor` to `out`, computed in the precision of `out`."""
    if values.dtype == out.dtype:
        return torch.mul(values, factor, out=out)
    return out.copy_(values).mul_(factor)


def flat(tensor: Tensor) -> Tensor:
    """Return the values in 1-d, as a view if the tensor is contiguous."""
    return tensor.detach().contiguous().view(-1)


def _chunks(values: Tensor) -> Iterator[tuple[int, Tensor]]:
    size = _chunk_size(values)
    for offset in range(0, values.numel(), size):
        yield offset, values[offset : offset + size]


def _chunk_size(values: Tensor) -> int:
    return _CHUNK if values.device.type == "cpu" else _DEVICE_CHUNK


MOMENTUM_TAG = "momentum"


def average_momenta(members: Sequence[LionParam], view: View, node: Channel | None = None) -> None:
    """Replace the momenta of some parameters by their mean over the workers; blocks.

    If the ranks of `node` hold the same momenta, each of them averages a slice.
    """
    momenta = [member.state["momentum"].view(-1) for member in members]
    values = torch.cat([momentum.to(view.channel.device) for momentum in momenta])

    slices, own_slice = (node.size, node.rank) if node else (1, 0)
    shards = view.size * slices
    padded = pad(values, (0, -values.numel() % shards)).view(slices, view.size, -1)
    # two phases, in worker order: as many bytes as a ring all-reduce, but the same bits everywhere
    route = Route(view, two_phase=True)
    total = ordered_sum(route.up(padded[own_slice], MOMENTUM_TAG).wait())
    mean = route.down(total / view.size, MOMENTUM_TAG).wait().flatten()
    if node is not None:
        mean = node.all_gather(mean.to(node.device), MOMENTUM_TAG).wait()

    sizes = [momentum.numel() for momentum in momenta]
    means = torch.split(mean.flatten()[: values.numel()], sizes)
    for momentum, new in zip(momenta, means, strict=True):
        momentum.copy_(new)


def momentum_bytes(members: Sequence[LionParam], view: View, node: Channel | None = None) -> int:
    """Compute the bytes that this rank sends to other workers in `average_momenta`."""
    slices = node.size if node else 1
    numel = sum(member.parameter.numel() for member in members)
    widest = max(member.state["momentum"].element_size() for member in members)
    shard_bytes = -(-numel // (view.size * slices)) * widest
    route = Route(view, two_phase=True)
    return route.bytes_up(shard_bytes) + route.bytes_down(shard_bytes)


def mean_momenta(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a copy of the first optimizer state with the mean of all momenta."""
    first = {**states[0], "state": dict(states[0]["state"])}

    for index, state in first["state"].items():
        total = sum(other["state"][index]["momentum"] for other in states)
        first["state"][index] = {**state, "momentum": total / len(states)}
    return first


def check_momenta(state: Mapping[int, Any], parameters: Mapping[int, nn.Parameter]) -> None:
    """Check that a saved state holds a momentum of the right shape and dtype per parameter.

    Args:
        state: "state" of a `DistributedLion.state_dict()`, by parameter index.
        parameters: the parameters to load it for, by index.

    Raises:
        ValueError: an entry has no such momentum.
    """
    for index, parameter in parameters.items():
        own = state.get(index)
        if not own:  # never stepped
            continue

        momentum = own.get("momentum")
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        if not isinstance(momentum, Tensor):
            found = f"only {', '.join(map(repr, own))}"
        elif momentum.shape != parameter.shape or momentum.dtype != dtype:
            found = f"{momentum.dtype} of shape {list(momentum.shape)}"
        else:
            continue

        raise ValueError(
            "The optimizer state was not saved by `DistributedLion` for this model: parameter"
            f" {index} needs a momentum buffer ({dtype} of shape {list(parameter.shape)}), but the"
            f" state has {found}. Resume with the model, precision and optimizer that the"
            " checkpoint was saved with, or load only the weights: call `load_state_dict` or"
            " `load_from_checkpoint`, then `fit` without `ckpt_path`."
        )
