"""Tensors of which each rank of a replica holds a part.

FSDP2's are `DTensor`s, divided by rows, and most of this file is about them. Tensor parallelism has
plain tensors, which say so themselves (`mark_part`).

`divide` makes them of a module's parameters. Whoever exchanges, saves or compares tensors works on
the rank's own memory (`own`). What others read, a checkpoint say, is whole (`whole`), and a rank
takes its part of it again (`part_like`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_commfree.comm.blocks import block_names
from lightning_commfree.comm.ledger import all_gather_bytes
from lightning_commfree.comm.materialize import Materializer
from lightning_commfree.comm.wholes import Wholes

# methods of a module that compute, beside `forward`
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def why_not_divided() -> str | None:
    """Return why this release of torch cannot divide a module; None where it can.

    Older ones leave the outermost unit whole after a forward, whatever they are told, and do not
    run on CPUs.
    """
    if inspect.signature(fully_shard).parameters["reshard_after_forward"].default is None:
        return None
    return (
        f"the `fully_shard` of torch {torch.__version__} is too old; 2.13 has been tried. Install a"
        " newer torch"
    )


def divide(
    module: nn.Module,
    groups: Sequence[Sequence[int]],
    rank: int,
    device: torch.device,
    materializer: Materializer | None = None,
) -> None:
    """Divide a module's parameters among the ranks of a replica; collective over the job.

    Every block is a unit, and what stands in no block is one more: its parameters are gathered for
    its forward and its backward, where its gradients become their mean over the replica; see
    `step_bytes`. The module cannot be made whole again, and its group of ranks lives as long.

    Args:
        module: plain, on any device; the same on all ranks of a replica.
        groups: the ranks of every replica.
        rank: of this process.
        device: to which every unit moves, before it is divided.
        materializer: gives values to a module on `meta`, a unit at a time: no rank ever holds all.
    """
    ties = _ties(module)
    made = {tuple(ranks): dist.new_group(list(ranks)) for ranks in groups}
    (group,) = (group for ranks, group in made.items() if rank in ranks)
    # said aloud, or the outermost unit stays whole after a forward without a backward: the weights
    # of a validation would serve the next training step
    how: dict[str, Any] = {
        "mesh": DeviceMesh.from_group(group, device.type),
        "reshard_after_forward": True,
    }
    for name in list(block_names(module)):
        block = module.get_submodule(name)
        if materializer is not None:
            materializer.materialize(block)
        if next(block.parameters(), None) is not None:
            fully_shard(block, **how)

    if materializer is not None:
        materializer.materialize_rest()
        for first, *others in ties:
            for owner, name in others:
                setattr(owner, name, getattr(*first))
    fully_shard(module, **how)
    for step in _STEPS:
        if hasattr(module, step):
            register_fsdp_forward_method(module, step)


def _ties(module: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Return where the same parameter stands several times: modules and names in them."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(parameter, []).append((owner, name))
    return [found for found in places.values() if len(found) > 1]


def step_bytes(module: nn.Module) -> tuple[int, int]:
    """Return what this rank sends for a forward and its backward, by FSDP2's formulas.

    Of a parameter with r rows n ranks hold ceil(r / n) each, the last ones padded. A unit's are
    gathered twice, for forward and backward; gradients of those that are trained are reduced and
    scattered once. Either sends a rank's rows to n - 1 others. Frozen units that no gradient passes
    are gathered once, and counted twice.

    Args:
        module: that `divide` has divided.

    Returns:
        Bytes to gather, bytes to reduce and scatter.
    """
    gathered = scattered = 0
    for parameter in module.parameters():
        assert isinstance(parameter, DTensor), "`divide` has made it one"
        rows, size = parameter.shape[0], parameter.device_mesh.size()
        numbers = -(-rows // size) * (parameter.numel() // max(rows, 1))
        sent = all_gather_bytes(numbers * parameter.element_size(), size)
        gathered += 2 * sent
        scattered += sent * parameter.requires_grad
    return gathered, scattered


@contextmanager
def accumulating(module: nn.Module) -> Iterator[None]:
    """In the body gradients stay on this rank, as large as the model, until a backward after it."""
    assert isinstance(module, FSDPModule), "`divide` has made it one"
    module.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        module.set_requires_gradient_sync(True)


def own(tensor: Tensor) -> Tensor:
    """Return this rank's own memory of a tensor, without its history: all of it, or its part."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def mark_part(parameter: nn.Parameter, is_part: bool) -> None:
    """Let a parameter say whether the other ranks of the replica hold other parts of it."""
    parameter.is_part_of_replica = is_part  # type: ignore[attr-defined]


def is_part(tensor: Tensor) -> bool:
    """Return whether the other ranks of the replica hold other parts of the tensor."""
    return isinstance(tensor, DTensor) or getattr(tensor, "is_part_of_replica", False)


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor; collective over the ranks that hold its parts."""
    detached = tensor.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached


def part_like(values: Tensor, like: Tensor) -> Tensor:
    """Return values as `like` is held: a part of them where that is one.

    Args:
        values: all of the tensor, on any device, or this rank's part of it.
        like: a tensor of the same shape.

    Raises:
        ValueError: they are neither.
    """
    if not isinstance(like, DTensor) or isinstance(values, DTensor):
        return values

    mine, mesh, (placement,) = like.to_local(), like.device_mesh, like.placements
    assert isinstance(placement, Shard), "FSDP divides by rows"
    if values.shape != mine.shape:
        if values.shape != like.shape:
            raise ValueError(
                f"A tensor of shape {list(values.shape)} was found for one of {list(like.shape)},"
                f" of which this rank holds {list(mine.shape)}: it must be one of the two."
            )
        rows = values.shape[placement.dim]
        start = min(mesh.get_local_rank() * -(-rows // mesh.size()), rows)
        values = values.narrow(placement.dim, start, mine.shape[placement.dim])

    values = values.to(mine.device).contiguous()
    shape, stride = like.shape, like.stride()
    part: Tensor = DTensor.from_local(
        values, mesh, like.placements, run_check=False, shape=shape, stride=stride
    )
    return part


def whole_on_host(value: Tensor, wholes: Wholes) -> Tensor:
    """Return all of a tensor, as `wholes` puts it together; collective as `whole`."""
    if isinstance(value, DTensor):
        return wholes(value.shape, value.dtype, partial(whole, value))
    return value.cpu() if wholes.keep else value.new_empty(0)


def whole_state(module: nn.Module, state: Mapping[str, Any], wholes: Wholes) -> dict[str, Any]:
    """Return a module's state as if it were not divided, in host memory.

    Collective, one tensor at a time; a tied weight, which stands under several names, once.

    Args:
        module: whose it is.
        state: as the module returned it.
        wholes: puts tensors together. Where this rank does not keep them the result is empty.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    found: dict[Any, Tensor] = {}
    result = {}
    for name, value in state.items():
        key = parameters.get(name, name)
        if isinstance(value, Tensor) and key not in found:
            found[key] = whole_on_host(value, wholes)
        result[name] = found.get(key, value)
    return result if wholes.keep else {}


def part_state(module: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a module's state, whole or this rank's, as the module holds it."""
    held = module.state_dict()
    return {
        name: part_like(value, held[name]) if name in held else value
        for name, value in state.items()
    }


def mapped_state(
    optimizer: Optimizer, state: dict[str, Any], convert: Callable[[Tensor, Tensor], Tensor]
) -> dict[str, Any]:
    """Return an optimizer's `state_dict` with other tensors.

    Args:
        optimizer: whose it is.
        state: as it was returned, or is to be loaded.
        convert: gets a tensor of the state that has a dimension, and its parameter.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    saved = [index for group in state["param_groups"] for index in group["params"]]
    # a state of another model is refused by whoever loads it
    parameter_of = dict(zip(saved, parameters, strict=False))

    def of(index: int, value: Any) -> Any:
        has_rows = isinstance(value, Tensor) and value.dim() > 0
        return convert(value, parameter_of[index]) if has_rows else value

    own_states = {
        index: {key: of(index, value) for key, value in own_state.items()}
        for index, own_state in state["state"].items()
        if index in parameter_of
    }
    return {**state, "state": own_states}


def refuse_wrapped(strategy: str, module: nn.Module) -> None:
    """See that a model that is to be divided is the plain one.

    Args:
        strategy: for the message.
        module: has the model.

    Raises:
        ValueError: a part of it is compiled, or wrapped for DDP or FSDP.
    """
    for name, child in module.named_modules():
        kind = type(child).__name__
        wrapped = isinstance(child, DistributedDataParallel) or "FSDP" in kind
        compiled = kind == "OptimizedModule" or child._compiled_call_impl is not None
        if wrapped or compiled:
            what = f"'{name}'" if name else "The module"
            raise ValueError(
                f"{what} is {'compiled' if compiled else 'wrapped'} already, as"
                f" `{kind}`, and `{strategy}` has to divide the model before that."
                " Give it the plain model."
            )


def check_optimizers(optimizers: Iterable[Optimizer], lost: Set[nn.Parameter]) -> None:
    """See that what is optimized is what this rank trains.

    Args:
        optimizers: of the fit.
        lost: parameters that the module had before it was divided, and has no more.

    Raises:
        ValueError: one of them is in an optimizer.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    count = sum(parameter in lost for group in groups for parameter in group["params"])
    if count:
        raise ValueError(
            f"The optimizer holds {count} parameters of the undivided model, which are trained no"
            " more: it, or its list of parameters, was made before the fit. Make both in"
            " `configure_optimizers`, from `self.parameters()`."
        )
