"""Helpers for sharded tensors: get a rank's shard, gather the full tensor, shard a full tensor.

The ranks of a replica may each hold a shard of a tensor. FSDP2's shards are `DTensor`s, split by
rows; Domino's are plain tensors tagged by `mark_shard`. Code that exchanges, saves or compares
tensors operates on the rank's local storage (`local_tensor`). Checkpoints contain full tensors
(`full_tensors`), from which each rank takes its shard on load (`shard_like`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_commfree.model.blocks import is_compiled_submodule


def refuse_wrapped(strategy: str, module: nn.Module) -> None:
    """Raise a ValueError if a module to be sharded is compiled or wrapped by DDP or FSDP.

    Its submodules are checked too.
    """
    for name, child in module.named_modules():
        kind = type(child).__name__
        wrapped = isinstance(child, DistributedDataParallel) or "FSDP" in kind
        compiled = is_compiled_submodule(child)
        if wrapped or compiled:
            what = f"'{name}'" if name else "The module"
            raise ValueError(
                f"{what} is already {'compiled' if compiled else 'wrapped'} (in `{kind}`), but"
                f" `{strategy}` has to shard the model first. Pass the plain model."
            )


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, detached: the full tensor or the local shard."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def mark_shard(parameter: nn.Parameter, is_shard: bool) -> None:
    """Tag a plain parameter as a shard of a larger tensor, or as a full tensor."""
    parameter.is_shard_of_replica = is_shard  # type: ignore[attr-defined]


def is_shard(tensor: Tensor) -> bool:
    """Return whether a tensor is sharded across the ranks of the replica."""
    return isinstance(tensor, DTensor) or getattr(tensor, "is_shard_of_replica", False)


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a `DTensor`, collective over its ranks; return any other tensor as it is, detached."""
    detached = tensor.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached


def map_nested(value: Any, convert: Callable[[Any, str], Any], name: str = "") -> Any:
    """Return a copy of nested containers with `convert(value, name)` in place of each value.

    `name` is the value's dotted name. Containers are dictionaries, lists and tuples. `convert` is
    called for them too; if it replaces a container, the container's items are not visited.
    """
    converted = convert(value, name)
    if converted is not value:
        return converted
    prefix = f"{name}." if name else ""
    if isinstance(value, dict):
        result = copy(value)  # keeps the class, and the `_metadata` of a module's state
        for key, child in value.items():
            result[key] = map_nested(child, convert, f"{prefix}{key}")
        return result
    if type(value) in (list, tuple):
        return type(value)(
            map_nested(child, convert, f"{prefix}{index}") for index, child in enumerate(value)
        )
    return value


def full_tensors(state: Any, keep: bool) -> Any:
    """Copy nested containers, with tensors gathered to the host if `keep`, else empty; collective.

    A tensor that occurs more than once is gathered once. Ranks with `keep=False` take part too.
    """
    # torch's `get_model_state_dict` would store a tied weight once per name, and its
    # `get_optimizer_state_dict` fills an empty state by taking an optimizer step, in which
    # `DistributedLion` would vote
    gathered: dict[int, Tensor] = {}  # by the shard's id; `state` keeps the shards alive

    def gather(value: Any, _: str) -> Any:
        """Return a tensor on the host, or an empty one without `keep`; other values unchanged."""
        if not isinstance(value, Tensor):
            return value
        if id(value) not in gathered:
            full = full_tensor(value)  # collective, so also needed without `keep`
            gathered[id(value)] = full.cpu() if keep else full.new_empty(0)
        return gathered[id(value)]

    return map_nested(state, gather)


def local_tensors(state: Any) -> Any:
    """Return a copy of nested containers, with each tensor replaced by this rank's local part."""
    return map_nested(
        state, lambda value, _: local_tensor(value) if isinstance(value, Tensor) else value
    )


def copy_to_cpu(state: Any, only: Sequence[Tensor] | None = None) -> Any:
    """Return nested containers with copies of their tensors in CPU memory.

    If `only` is given, copy only tensors that share memory with a tensor in `only`.
    """
    shared = None if only is None else {one.untyped_storage().data_ptr() for one in only}
    copies: dict[Any, Tensor] = {}  # tied tensors are copied, and later written, once

    def to_cpu(value: Any, _: str) -> Any:
        """Return a CPU copy of a tensor that is to be copied; otherwise return the value itself."""
        if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_meta:
            return value
        local = local_tensor(value)
        if shared is not None and local.untyped_storage().data_ptr() not in shared:
            return value
        key: Any = id(value)
        if local.numel():  # two tensor objects may share the same memory
            key = local.data_ptr(), local.dtype, local.shape, local.stride()
        if key not in copies:
            copies[key] = value.detach().to("cpu", copy=True)
        return copies[key]

    return map_nested(state, to_cpu)


def shard_like(values: Tensor, like: Tensor) -> Tensor:
    """Return `values`, a full tensor or this rank's shard, as a `DTensor` sharded like `like`.

    This sends nothing. Raise a ValueError if `values` has the shape of neither. If `like` is not
    sharded, return `values` unchanged.
    """
    if not isinstance(like, DTensor) or isinstance(values, DTensor):
        return values
    mine, mesh, (placement,) = like.to_local(), like.device_mesh, like.placements
    assert isinstance(placement, Shard), "FSDP shards by rows"
    if values.shape != mine.shape:
        if values.shape != like.shape:
            raise ValueError(
                f"A saved tensor has shape {list(values.shape)}, but the model needs shape"
                f" {list(like.shape)}, or {list(mine.shape)} for this rank's shard. The checkpoint"
                " is from a different model. Load one that was saved from this model."
            )
        # FSDP gives each rank ceil(rows / ranks) rows, and the last ranks fewer or none
        rows = values.shape[placement.dim]
        start = min(mesh.get_local_rank() * -(-rows // mesh.size()), rows)
        values = values.narrow(placement.dim, start, mine.shape[placement.dim])

    values = values.to(mine.device).contiguous()
    shape, stride = like.shape, like.stride()
    shard: Tensor = DTensor.from_local(
        values, mesh, like.placements, run_check=False, shape=shape, stride=stride
    )
    return shard


class RowShards:
    """Converts the states of an FSDP2 module and its optimizers to full tensors and back."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def sharded_state_dict(self) -> dict[str, Any]:
        """Return the module's state as `DTensor`s; a tied weight is a single object."""
        parameters = dict(self._module.named_parameters(remove_duplicate=False))
        found: dict[Any, Any] = {}
        return {
            name: found.setdefault(parameters.get(name, name), value)
            for name, value in self._module.state_dict().items()
        }

    def full_state_dict(self, keep: bool) -> dict[str, Any]:
        """Return the module's full state in host memory, or {} if `keep` is False; collective."""
        state = full_tensors(self.sharded_state_dict(), keep)
        return state if keep else {}

    def gather_in_state_dict(self, keep: bool) -> None:
        """Make the module's own `state_dict` gather full tensors from now on.

        Calls to it are then collective. With `keep=False`, this rank gets empty tensors.
        """
        # Lightning's fork launcher calls `state_dict` without going through the strategy

        def gather(module: nn.Module, state: dict[str, Any], *_: Any) -> None:
            del module
            state.update(full_tensors({**state}, keep))

        self._module.register_state_dict_post_hook(gather)  # type: ignore[no-untyped-call]

    def shard_state_dict(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Convert a module's state, full or already sharded, to this rank's shards."""
        held = self._module.state_dict()
        return {
            name: shard_like(value, held[name]) if name in held else value
            for name, value in state.items()
        }

    def sharded_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state as `DTensor`s; plain local shards are converted."""
        return _map_optimizer_state(optimizer, optimizer.state_dict(), shard_like)

    def full_optimizer_state(self, optimizer: Optimizer, keep: bool) -> dict[str, Any]:
        """Return an optimizer's full state in host memory, or {} if `keep` is False; collective."""
        state: dict[str, Any] = full_tensors(self.sharded_optimizer_state(optimizer), keep)
        return state if keep else {}

    def shard_optimizer_state(
        self, optimizer: Optimizer, state: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Convert an optimizer's state, full or already sharded, to this rank's shards."""
        return _map_optimizer_state(optimizer, state, shard_like)


def _map_optimizer_state(
    optimizer: Optimizer, state: Mapping[str, Any], convert: Callable[[Tensor, Tensor], Tensor]
) -> dict[str, Any]:
    """Return an optimizer's `state_dict` with its tensors converted, except scalars.

    `convert` takes a tensor and the parameter that it belongs to.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    saved = [index for group in state["param_groups"] for index in group["params"]]
    # not strict: the optimizer itself rejects a state from another model
    parameter_of = dict(zip(saved, parameters, strict=False))
    converted: dict[Any, dict[str, Any]] = {}
    for index, own in state["state"].items():
        if index in parameter_of:
            converted[index] = {
                key: convert(value, parameter_of[index])
                if isinstance(value, Tensor) and value.dim() > 0
                else value
                for key, value in own.items()
            }
    return {**state, "state": converted}
