"""Sharded tensors: this rank's own memory, full tensors, and shards of full tensors.

The ranks of a replica may each hold a shard of a tensor. FSDP2's are `DTensor`s, sharded by rows;
Domino's are plain tensors that say so themselves (`mark_part`). Code that exchanges, saves or
compares tensors works on the rank's own memory (`own`). Checkpoints hold full tensors
(`full_tensors`), of which each rank takes its shard again (`shard_like`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer


def own(tensor: Tensor) -> Tensor:
    """Return this rank's own memory of a tensor, detached: all of it, or its shard."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def mark_part(parameter: nn.Parameter, is_part: bool) -> None:
    """Let a plain parameter say whether the other ranks of the replica hold other shards of it."""
    parameter.is_part_of_replica = is_part  # type: ignore[attr-defined]


def is_part(tensor: Tensor) -> bool:
    """Return whether the other ranks of the replica hold other shards of the tensor."""
    return isinstance(tensor, DTensor) or getattr(tensor, "is_part_of_replica", False)


def whole(tensor: Tensor) -> Tensor:
    """Return the full tensor; collective over the ranks that hold its shards."""
    detached = tensor.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached


def map_nested(value: Any, convert: Callable[[Any, str], Any], name: str = "") -> Any:
    """Return nested dictionaries, lists and tuples with some values replaced.

    Args:
        value: the outermost container.
        convert: gets a value and its dotted name, and returns it or another one. It gets containers
            too, whose values are converted unless it replaces the container.
        name: of the value.
    """
    converted = convert(value, name)
    if converted is not value:
        return converted
    prefix = f"{name}." if name else ""
    if isinstance(value, dict):
        result = copy(value)  # keeps the class, and `_metadata` of a module's state
        for key, child in value.items():
            result[key] = map_nested(child, convert, f"{prefix}{key}")
        return result
    if type(value) in (list, tuple):
        return type(value)(
            map_nested(child, convert, f"{prefix}{index}") for index, child in enumerate(value)
        )
    return value


def full_tensors(state: Any, keep: bool) -> Any:
    """Return nested containers with full tensors in host memory in place of shards.

    Collective over the ranks that hold the shards, in the order of the containers.

    torch's `get_model_state_dict` would store a tied weight under each of its names, and its twin
    for optimizers takes an optimizer step to fill an empty state: `DistributedLion` would vote.

    Args:
        state: nested containers; a tensor that is in it twice is gathered once.
        keep: whether this rank wants the result; the others get empty tensors.
    """
    gathered: dict[int, Tensor] = {}  # by the id of a shard, which `state` keeps alive

    def gather(value: Any, _: str) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in gathered:
            full = whole(value)  # on all ranks: a gather needs each of them
            gathered[id(value)] = full.cpu() if keep else full.new_empty(0)
        return gathered[id(value)]

    return map_nested(state, gather)


def shard_like(values: Tensor, like: Tensor) -> Tensor:
    """Return a tensor as `like` is held: a shard of it where that is one.

    Args:
        values: the full tensor, on any device, or this rank's shard of it.
        like: a tensor of the full shape.

    Raises:
        ValueError: `values` is neither.
    """
    if not isinstance(like, DTensor) or isinstance(values, DTensor):
        return values
    mine, mesh, (placement,) = like.to_local(), like.device_mesh, like.placements
    assert isinstance(placement, Shard), "FSDP shards by rows"
    if values.shape != mine.shape:
        if values.shape != like.shape:
            raise ValueError(
                f"A tensor of shape {list(values.shape)} was found for one of {list(like.shape)},"
                f" of which this rank holds {list(mine.shape)}: it must be one of the two."
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
    """Full states of a module that FSDP has sharded, and this rank's shards of such states.

    Args:
        module: the sharded one.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def sharded_state_dict(self) -> dict[str, Any]:
        """Return the module's state, with `DTensor`s; a tied weight is one object."""
        parameters = dict(self._module.named_parameters(remove_duplicate=False))
        found: dict[Any, Any] = {}
        return {
            name: found.setdefault(parameters.get(name, name), value)
            for name, value in self._module.state_dict().items()
        }

    def whole_state_dict(self, keep: bool) -> dict[str, Any]:
        """Return the module's full state in host memory, {} where `keep` is False; collective."""
        state = full_tensors(self.sharded_state_dict(), keep)
        return state if keep else {}

    def gather_from_here(self, keep: bool) -> None:
        """Let the module's own `state_dict` gather full tensors from now on."""
        # a launcher of forked ranks calls it by itself, without asking the strategy

        def gather(module: nn.Module, state: dict[str, Any], *_: Any) -> None:
            del module
            state.update(full_tensors({**state}, keep))

        self._module.register_state_dict_post_hook(gather)  # type: ignore[no-untyped-call]

    def part_state_dict(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a module's state, full or this rank's, as the module holds it."""
        held = self._module.state_dict()
        return {
            name: shard_like(value, held[name]) if name in held else value
            for name, value in state.items()
        }

    def sharded_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state, with `DTensor`s for all tensors that are sharded.

        `DistributedLion` keeps a plain tensor for a shard.
        """
        return _map_optimizer_state(optimizer, optimizer.state_dict(), shard_like)

    def whole_optimizer_state(self, optimizer: Optimizer, keep: bool) -> dict[str, Any]:
        """Return an optimizer's full state as `whole_state_dict` returns the module's."""
        state: dict[str, Any] = full_tensors(self.sharded_optimizer_state(optimizer), keep)
        return state if keep else {}

    def part_optimizer_state(
        self, optimizer: Optimizer, state: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return an optimizer's state, full or this rank's, as the optimizer holds it."""
        return _map_optimizer_state(optimizer, state, shard_like)


def _map_optimizer_state(
    optimizer: Optimizer, state: Mapping[str, Any], convert: Callable[[Tensor, Tensor], Tensor]
) -> dict[str, Any]:
    """Return an optimizer's `state_dict` with its tensors converted.

    Args:
        optimizer: whose state it is.
        state: as it was returned, or is to be loaded.
        convert: gets a tensor of the state that has a dimension, and its parameter.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    saved = [index for group in state["param_groups"] for index in group["params"]]
    # the optimizer itself refuses the state of another model
    parameter_of = dict(zip(saved, parameters, strict=False))
    return {
        **state,
        "state": {
            index: {
                key: convert(value, parameter_of[index])
                if isinstance(value, Tensor) and value.dim() > 0
                else value
                for key, value in own_state.items()
            }
            for index, own_state in state["state"].items()
            if index in parameter_of
        },
    }
