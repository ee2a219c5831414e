"""Computation on one worker: cast its ballot before the vote, and take its step afterwards.

    c <- b1 m + (1 - b1) g       the direction, from the old momentum; its sign is the vote
    m <- b2 m + (1 - b2) g       with the worker's own gradient
    x <- x (1 - lr wd) - lr Delta

The arithmetic is in fp32 (fp64 for fp64 parameters) for any gradient dtype, and every operation
rounds once: no fused multiply-add is used, so the result does not depend on device or layout.

On a GPU, three Triton kernels (`worker_triton`) process each parameter; without Triton, a few torch
operations process all parameters in a bucket at once. On a CPU, the compiled loops in
`worker_numba` are used if numba is installed; otherwise, the same torch operations run on chunks
that fit into the cache.

For a matrix in a group with "ns_steps" above 0, the vote is the sign of its Newton-Schulz direction
instead of c (SignMuon, arXiv:2605.16311). This direction takes matrix products, which are in bf16
on a GPU, so it differs between devices. Parameters stay identical, because only the result of the
vote moves them.

Momentum buffers are not exchanged and drift apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_commfree.comm.bits import pack_bits_part
from lightning_commfree.comm.compiled import load_kernels, load_loops
from lightning_commfree.lion.ballot import (
    HAS_GRADIENT,
    NONFINITE,
    header_bytes,
    marks_of,
    write_header,
)
from lightning_commfree.lion.buckets import Bucket
from lightning_commfree.lion.vote import PackedDelta
from lightning_commfree.model.shards import local_tensor

_DEVICE_CHUNK = 1 << 25  # values: few kernel launches, but bounded memory during backward
_CHUNK = 1 << 18  # values: a few buffers of this size fit into a core's cache

State = dict[str, Any]  # optimizer state of one parameter


class LionParam(NamedTuple):
    """A parameter with its optimizer state and its parameter group."""

    parameter: nn.Parameter
    state: State  # "momentum", and "master" if the parameter has fewer than 32 bits
    group: dict[str, Any]  # "lr", "betas", "weight_decay", "ns_steps": may change between steps

    @property
    def ns_steps(self) -> int:
        """Number of Newton-Schulz iterations before a vote; 0 if the parameter is not a matrix."""
        # checkpoints saved by earlier versions do not have this key
        return self.group.get("ns_steps", 0) if self.parameter.ndim == 2 else 0


def fill_state(state: State, local: Tensor) -> State:
    """Create the missing entries of a parameter's state; `local` is this rank's tensor or shard."""
    dtype = torch.promote_types(local.dtype, torch.float32)
    zeros = partial(torch.zeros_like, dtype=dtype, memory_format=torch.contiguous_format)
    if "momentum" not in state:
        state["momentum"] = zeros(local)
    if dtype != local.dtype and "master" not in state:
        state["master"] = zeros(local).copy_(local)
    return state


def copy_state(state: State, saved: State, device: torch.device) -> None:
    """Copy the tensors in `saved` into `state` on `device`, keeping their dtypes."""
    for key, value in saved.items():
        if isinstance(value, Tensor):
            state[key] = local_tensor(value).to(device, copy=True)


@torch.no_grad()
def update_masters(states: Sequence[State], tensors: Sequence[Tensor]) -> None:
    """Update the master copies of tensors or shards that other code may have modified."""
    pairs = [(s["master"], p) for s, p in zip(states, tensors, strict=True) if "master" in s]
    loops = _loops(pairs[0][0]) if pairs else None
    in_bf16 = all(p.dtype == torch.bfloat16 for _, p in pairs)
    if loops is not None and hasattr(loops, "follow") and in_bf16:
        for master, p in pairs:
            loops.follow(master.view(-1), flat(p))
        return
    for dtype in {p.dtype for _, p in pairs}:  # a few kernels, whatever the number of parameters
        masters = [master for master, p in pairs if p.dtype == dtype]
        now = torch.cat([flat(p) for _, p in pairs if p.dtype == dtype])
        kept = torch.cat([flat(master) for master in masters])
        # unmodified values keep their full precision
        merged = torch.where(kept.to(dtype) == now, kept, now.to(kept.dtype))
        parts = torch.split(merged, [master.numel() for master in masters])
        shaped = [part.view(m.shape) for part, m in zip(parts, masters, strict=True)]
        torch._foreach_copy_(masters, shaped)


def hyperparameters(members: list[LionParam]) -> list[str]:
    """Describe the hyperparameters that must be equal on all workers, one string per group."""
    groups = {id(member.group): member.group for member in members}.values()
    return [
        f"lr {float(group['lr'])}, betas {tuple(map(float, group['betas']))},"
        f" weight_decay {float(group['weight_decay'])}"
        + (f", ns_steps {group['ns_steps']}" if group.get("ns_steps") else "")
        for group in groups
    ]


class FlatMomenta:
    """All momentum buffers of a bucket in one flat tensor, for processing in one operation.

    Optimizer states contain views of this tensor, so checkpoints have one buffer per parameter.
    """

    def __init__(self) -> None:
        self._flat: Tensor | None = None
        self._views: list[Tensor] = []

    def of(self, members: list[LionParam]) -> Tensor | None:
        """Make the momentum buffers views of one flat tensor, shape (N,), and return it, or None.

        Return None if compiled loops process this bucket, or if the buffers' dtypes differ.
        """
        held = [member.state["momentum"] for member in members]
        if _loops(held[0]) or len({momentum.dtype for momentum in held}) > 1:
            return None
        if [*map(id, held)] != [*map(id, self._views)]:  # first call, or states were loaded
            self._flat = torch.cat([momentum.view(-1) for momentum in held])
            parts = torch.split(self._flat, [momentum.numel() for momentum in held])
            shapes = [momentum.shape for momentum in held]
            self._views = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
            for member, view in zip(members, self._views, strict=True):
                member.state["momentum"] = view
        return self._flat


def cast_ballot(
    bucket: Bucket,
    members: list[LionParam],  # in the bucket's order
    valid_bits: Tensor,  # uint8, shape (bucket.plane_bytes,): bits that are not padding
    requests: int,
    digest: Tensor | int,  # both as in `write_header`
    momenta: Tensor | None = None,  # from `FlatMomenta.of`
) -> Tensor:
    """Return a worker's ballot for one bucket as one tensor, without changing any state.

    It is uint8 on the parameters' device: the header, the plane c > 0 and the plane c != 0.
    Raises a `TypeError` if a gradient is sparse.
    """
    head = header_bytes(len(members))
    buffer = valid_bits.new_zeros(head + 2 * bucket.plane_bytes)
    header, planes = buffer[:head], buffer[head:].view(2, -1)
    marks = marks_of(header, len(members))
    nonzeros: list[Tensor | int] = []  # counts of nonzero directions
    # results of the compiled loops: the count of nonzero directions, then one entry per parameter,
    # which is 1 if a direction is not finite
    totals: Tensor | None = None

    values = [
        _orthogonalized(member, gradient) if gradient is not None and member.ns_steps else gradient
        for member, gradient in zip(members, _flat_gradients(bucket, members), strict=True)
    ]
    for run in _runs(members, values, bucket.starts):
        of_run = marks[run[0].position : run[-1].position + 1]
        # a Newton-Schulz direction already contains the momentum
        betas = [0.0 if members[part.position].ns_steps else part.group["betas"][0] for part in run]
        if loops := _loops(run[0].momentum):
            if totals is None:
                totals = torch.zeros(1 + len(members), dtype=torch.int64, device=valid_bits.device)
            for part, beta in zip(run, betas, strict=True):
                nonfinite = totals[1 + part.position :][:1]
                place = planes, part.start
                loops.cast(part.momentum, part.values, beta, *place, totals[:1], nonfinite)
            of_run.bitwise_or_(HAS_GRADIENT)
            continue

        directions, by_part = _directions(run, betas, momenta)
        signs = _positive_and_nonzero(directions)
        pack_bits_part(signs, run[0].start, planes)
        nonzeros.append(signs[1].sum())

        finite = torch.stack(_largest(by_part)) < math.inf  # False for NaN
        both = HAS_GRADIENT + NONFINITE  # the latter is subtracted where the values are finite
        of_run.bitwise_or_(torch.rsub(finite.view(torch.uint8), both, alpha=NONFINITE))

    if totals is not None:
        nonzeros.append(totals[0])
        marks.add_(totals[1:], alpha=NONFINITE)
    write_header(header, requests, bucket.numel, nonzeros, digest)
    return buffer


def _orthogonalized(member: LionParam, gradient: Tensor) -> Tensor:
    """Orthogonalize the update direction of a matrix parameter; return it flattened to 1-d."""
    momentum, beta = member.state["momentum"], member.group["betas"][0]
    weighted = gradient.view(momentum.shape).to(momentum.dtype) * (1 - beta)
    return flat(newton_schulz(momentum * beta + weighted, member.ns_steps))


_QUINTIC = (3.4445, -4.7750, 2.0315)  # Muon's coefficients


def newton_schulz(matrix: Tensor, steps: int) -> Tensor:
    """Orthogonalize a matrix U S V^T approximately, to U V^T, by Newton-Schulz iterations.

    Five steps of Muon's quintic iteration bring every singular value to between 0.7 and 1.2
    (arXiv:2502.16982, section 2.1). On a GPU, an fp32 matrix is iterated in bf16, as in Muon.
    """
    tall = matrix.shape[0] > matrix.shape[1]
    x: Tensor = matrix.T if tall else matrix  # for a smaller product x @ x.T
    x = x / x.norm().clamp(min=1e-7)
    if x.device.type == "cuda" and x.dtype == torch.float32:
        x = _newton_schulz_in_bf16(x, steps)
    else:
        a, b, c = _QUINTIC
        for _ in range(steps):
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


def _newton_schulz_in_bf16(x: Tensor, steps: int) -> Tensor:
    a, b, c = _QUINTIC
    found = x.bfloat16()
    for _ in range(steps):
        gram = found @ found.T
        # `addmm` rounds once. Sums of two bf16 matrices would cancel to exact zeros, which are
        # votes of 0: they cost traffic, and an odd number of workers could tie.
        factor = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        found = torch.addmm(found, factor, found, beta=a)
    return found.to(x.dtype)


def _directions(
    run: list[_Part], betas: list[float], momenta: Tensor | None
) -> tuple[Tensor, list[Tensor]]:
    """Compute b1 m + (1 - b1) g, with a b1 per part, in 1-d; return it and a view per part."""
    if momenta is None or len({*betas}) > 1:
        directions, by_part = _weighted_gradients(run, betas)
        torch._foreach_add_(by_part, torch._foreach_mul([part.momentum for part in run], betas))
        return directions, by_part

    sizes = [part.values.numel() for part in run]
    directions = momenta[run[0].start : run[0].start + sum(sizes)] * betas[0]
    by_part = [*torch.split(directions, sizes)]
    torch._foreach_add_(by_part, _gradient_parts(run, betas))
    return directions, by_part


def _positive_and_nonzero(directions: Tensor) -> Tensor:
    """Return the flags c > 0 and c != 0 of n directions c: bool, shape (2, n)."""
    if directions.device.type == "cpu":  # torch vectorizes `sign` there, but not comparisons
        signs = torch.sign(directions).to(torch.int8)
        return torch.stack([signs.relu(), signs.abs()]).view(torch.bool)
    flags = torch.empty(2, directions.numel(), dtype=torch.bool, device=directions.device)
    torch.gt(directions, 0, out=flags[0])
    torch.ne(directions, 0, out=flags[1])
    return flags


def _largest(tensors: list[Tensor]) -> list[Tensor]:
    """Return the largest magnitude in each tensor, 0-d; NaN if the tensor contains NaN."""
    if tensors[0].device.type == "cpu":  # `_foreach_norm` is ten times slower there
        return [tensor.abs().max() for tensor in tensors]
    return list(torch._foreach_norm(tensors, math.inf))


def take_step(
    bucket: Bucket,
    members: list[LionParam],  # in the bucket's order
    delta: PackedDelta,  # on the parameters' device
    with_gradient: tuple[bool, ...],  # per parameter, on any worker; without, it stays
    abstained: bool,  # whether this worker did
) -> None:
    """Apply a vote's result to a bucket's parameters; update this worker's momentum buffers."""
    # a hook may have changed parameters since the last step
    update_masters([member.state for member in members], [member.parameter for member in members])
    moved = [
        flat(member.state.get("master", member.parameter)) if has_gradient else None
        for member, has_gradient in zip(members, with_gradient, strict=True)
    ]
    for run in _runs(members, moved, bucket.starts):
        _update_values(run, delta)

    # copy values to parameters that were not updated in place: those with a master copy, and
    # non-contiguous ones
    elsewhere = [
        (member.parameter.detach(), x.view(member.parameter.shape))
        for member, x in zip(members, moved, strict=True)
        if x is not None and x.data_ptr() != member.parameter.data_ptr()
    ]
    if elsewhere:
        torch._foreach_copy_([p for p, _ in elsewhere], [x for _, x in elsewhere])

    # if this worker abstained, its gradient has NaN or Inf, which must not reach the momentum
    if not abstained:
        for run in _runs(members, _flat_gradients(bucket, members), bucket.starts):
            _update_momenta(run)


def _update_values(run: list[_Part], delta: PackedDelta) -> None:
    """Apply weight decay and Delta to the values of a run, in place."""
    rates = [float(part.group["lr"]) for part in run]
    kept = [1 - lr * float(part.group["weight_decay"]) for part, lr in zip(run, rates, strict=True)]
    if loops := _loops(run[0].momentum):
        for part, lr, keep in zip(run, rates, kept, strict=True):
            loops.update_values(part.values, *delta, part.start, keep, lr)
        return

    values = [part.values for part in run]
    sizes = [chunk.numel() for chunk in values]
    common = rates[0] if len({*rates}) == 1 else 1.0  # applied in the pass that reads Delta
    scaled = delta.read(run[0].start, values[0].new_empty(sum(sizes)), common)
    by_part = torch.split(scaled, sizes)
    torch._foreach_mul_(values, kept)
    if len({*rates}) > 1:
        torch._foreach_mul_(by_part, rates)
    torch._foreach_sub_(values, by_part)


def _update_momenta(run: list[_Part]) -> None:
    """Update the momentum buffers of a run in place; its values are gradients."""
    betas = [part.group["betas"][1] for part in run]
    if loops := _loops(run[0].momentum):
        for part, beta in zip(run, betas, strict=True):
            loops.update_momentum(part.momentum, part.values, beta)
        return

    momenta = [part.momentum for part in run]
    torch._foreach_mul_(momenta, betas)
    torch._foreach_add_(momenta, _gradient_parts(run, betas))


def _gradient_parts(run: list[_Part], betas: list[float]) -> list[Tensor]:
    """Return (1 - b) g in the momentum's dtype, one tensor per part; `betas` has one b per part."""
    gradients = [part.values for part in run]
    if all(gradient.dtype == run[0].momentum.dtype for gradient in gradients):
        return [*torch._foreach_mul(gradients, [1 - beta for beta in betas])]
    # convert first, because the product must not be rounded to the gradient's dtype
    return _weighted_gradients(run, betas)[1]


def _weighted_gradients(run: list[_Part], betas: list[float]) -> tuple[Tensor, list[Tensor]]:
    """Compute (1 - b) g, with a b per part, in 1-d; return it and a view per part."""
    weighted = torch.cat([part.values for part in run]).to(run[0].momentum.dtype)
    by_part = [*torch.split(weighted, [part.values.numel() for part in run])]
    torch._foreach_mul_(by_part, [1 - beta for beta in betas])
    return weighted, by_part


def _flat_gradients(bucket: Bucket, members: list[LionParam]) -> list[Tensor | None]:
    """Return gradients as 1-d tensors, or None; raise a `TypeError` if one is sparse."""
    gradients = [member.parameter.grad for member in members]
    for name, gradient in zip(bucket.names, gradients, strict=True):
        if gradient is not None and gradient.is_sparse:
            raise TypeError(
                f"The gradient of {name!r} is sparse, but votes require dense gradients. Use"
                " `sparse=False` in its `nn.Embedding`."
            )
    return [None if gradient is None else flat(gradient) for gradient in gradients]


def flat(tensor: Tensor) -> Tensor:
    """Return the values as a 1-d tensor, which is a view if `tensor` is contiguous."""
    return tensor.detach().contiguous().view(-1)


class _Part(NamedTuple):
    """Consecutive values of one parameter, or of its gradient, with their momentum."""

    position: int  # index of the parameter in its bucket
    start: int  # index of the first value in the bucket
    values: Tensor  # slice of a tensor that was passed to `_runs`
    momentum: Tensor
    group: dict[str, Any]


def _runs(
    members: list[LionParam],
    tensors: Sequence[Tensor | None],  # flat, one per parameter; None skips the parameter
    starts: Sequence[int],  # index of each parameter's first value in the bucket
) -> Iterator[list[_Part]]:
    """Split parameters into parts, and yield lists of parts to process together.

    The parts in a list belong to consecutive parameters whose momentum buffers have the same dtype.
    Together, they have at most `_CHUNK` values on a CPU, and `_DEVICE_CHUNK` on other devices.
    """
    run: list[_Part] = []
    for i, (member, tensor) in enumerate(zip(members, tensors, strict=True)):
        if tensor is None:
            continue
        momentum, numel = member.state["momentum"].view(-1), tensor.numel()
        size = _CHUNK if momentum.device.type == "cpu" else _DEVICE_CHUNK

        for offset in range(0, numel, size):
            place = slice(offset, min(offset + size, numel))
            part = _Part(i, starts[i] + offset, tensor[place], momentum[place], member.group)
            if run and not _can_extend(run, part, size):
                yield run
                run = []
            run.append(part)
    if run:
        yield run


def _can_extend(run: list[_Part], part: _Part, max_numel: int) -> bool:
    fits = part.start + part.values.numel() - run[0].start <= max_numel
    same_dtype = part.momentum.dtype == run[0].momentum.dtype
    return fits and same_dtype and part.position == run[-1].position + 1


def warm_up(parameters: Iterable[Tensor]) -> None:
    """Load the compiled loops or kernels, so that this does not delay the first backward pass."""
    for dtype, device in {(p.dtype, p.device) for p in parameters}:
        _loops(torch.empty(0, dtype=torch.promote_types(dtype, torch.float32), device=device))


def _loops(momentum: Tensor) -> ModuleType | None:
    """Return numba's loops (CPU) or Triton's kernels (CUDA) for this momentum buffer, or None."""
    if momentum.dtype == torch.float32 and momentum.device.type == "cpu":
        return load_loops("lightning_commfree.lion.worker_numba", "Lion's steps")
    if momentum.dtype == torch.float32 and momentum.device.type == "cuda":
        return load_kernels("lightning_commfree.lion.worker_triton", "Lion's steps")
    return None


def mean_momenta(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a copy of the first optimizer state with the mean of all momentum buffers."""
    first = {**states[0], "state": dict(states[0]["state"])}

    for index, state in first["state"].items():
        total = sum(other["state"][index]["momentum"] for other in states)
        first["state"][index] = {**state, "momentum": total / len(states)}
    return first


def check_momenta(
    state: Mapping[int, Any],  # "state" in `DistributedLion.state_dict()`, by parameter index
    parameters: Mapping[int, nn.Parameter],
) -> None:
    """Check saved momentum buffers' shapes and dtypes; raise a `ValueError` if one does not fit."""
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
