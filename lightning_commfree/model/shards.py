"""Tensors of which each rank of a replica holds a part.

FSDP2's are `DTensor`s, divided by rows, and most of this file is about them. Tensor parallelism has
plain tensors, which say so themselves (`mark_part`).

`division.divide` makes them of a module's parameters. Whoever exchanges, saves or compares tensors
works on the rank's own memory (`own`). What others read, a checkpoint say, is whole (`whole`), and
a rank takes its part of it again (`part_like`).

Whole tensors out of the parts that the ranks of a replica hold: at once, or one at a time.

A checkpoint holds whole tensors. All of them together are, with AdamW's states, three times the
model, and a replica has several ranks because one cannot hold that. So where rank 0 writes a file
by itself it gets *stand-ins*, tensors on `meta` with a shape and without values:

1. All ranks make the stand-ins in the same order (`OneAtATime`).
2. Rank 0 comes to one of them while it writes (`values_of`). It says to the others which one, and
   they put that tensor together.
3. It drops the tensor, and goes on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer
from typing_extensions import override

from lightning_commfree.comm.channel import Channel

SAVE_TAG = "save"  # of the ledger
_WRITTEN = -1  # in place of a stand-in's number


class Divided(NamedTuple):
    """A tensor of which each rank of a replica holds a part.

    Attributes:
        shape: of the whole.
        dtype: the same.
        gather: puts it together; collective.
        part: what this rank holds, if it is a `DTensor`.
    """

    shape: Sequence[int]
    dtype: torch.dtype
    gather: Callable[[], Tensor]
    part: Tensor | None = None


class Wholes:
    """Puts tensors together at once, in host memory.

    Args:
        keep: whether this rank wants them; else it gets empty ones.
    """

    def __init__(self, keep: bool) -> None:
        self.keep = keep

    def __call__(self, divided: Divided) -> Tensor:
        """Return a whole tensor; collective over the ranks that hold its parts."""
        whole = divided.gather()
        return whole.cpu() if self.keep else whole.new_empty(0)

    def writing(self) -> AbstractContextManager[None]:
        """In the body the rank that keeps them writes what this object has returned."""
        return nullcontext()


class OneAtATime(Wholes):
    """Returns stand-ins, whose tensors are put together in the body of `writing`.

    Args:
        keep: this rank writes; the first one of the channel.
        channel: to the ranks that hold the parts.
    """

    def __init__(self, keep: bool, channel: Channel) -> None:
        super().__init__(keep)
        self._channel = channel
        self._gathers: list[Callable[[], Tensor]] = []

    @override
    def __call__(self, divided: Divided) -> Tensor:
        self._gathers.append(divided.gather)
        fetch = partial(self._fetch, len(self._gathers) - 1)
        return stand_in(divided.shape, divided.dtype, fetch)

    @override
    @contextmanager
    def writing(self) -> Iterator[None]:
        """In the body rank 0 asks for values; the others have answered it when theirs begins."""
        if not self.keep:
            while (number := self._agree(_WRITTEN)) != _WRITTEN:
                self._gathers[number]()
        try:
            yield
        finally:
            if self.keep:
                self._agree(_WRITTEN)

    def _fetch(self, number: int) -> Tensor:
        self._agree(number)
        return self._gathers[number]().cpu()

    def _agree(self, number: int) -> int:
        """Return the number that rank 0 says."""
        said = torch.tensor(number, device=self._channel.device)
        return int(self._channel.broadcast(said, SAVE_TAG).wait())


def stand_in(
    shape: Sequence[int],
    dtype: torch.dtype,
    fetch: Callable[[], Tensor],
    fill: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """Return a tensor on `meta` that stands for another one.

    Args:
        shape: of the other one.
        dtype: the same.
        fetch: returns it, in host memory.
        fill: writes its values into a tensor, or into a part of one: `DTensor`s.
    """
    made: Any = torch.empty(tuple(shape), dtype=dtype, device="meta")
    made.fetch_values, made.fill_values = fetch, fill
    return made  # type: ignore[no-any-return]


def is_stand_in(value: Any) -> bool:
    """Return whether it stands for a tensor that is put together, or read, later."""
    return hasattr(value, "fetch_values")


def has_stand_ins(state: Any) -> bool:
    """Return whether nested dictionaries, lists and tuples hold a stand-in."""
    if isinstance(state, dict):
        return any(map(has_stand_ins, state.values()))
    if isinstance(state, list | tuple):
        return any(map(has_stand_ins, state))
    return is_stand_in(state)


def values_of(standing: Any) -> Tensor:
    """Return the tensor that one stands for; if it is put together, in `writing` on rank 0."""
    return standing.fetch_values()  # type: ignore[no-any-return]


def filled(standing: Any, empty: Tensor) -> Tensor:
    """Return `empty`, as large as the tensor that one stands for, with values that were read."""
    standing.fill_values(empty)
    return empty


def with_values(state: Any) -> Any:
    """Return nested dictionaries, lists and tuples with values in place of stand-ins."""
    if not has_stand_ins(state):
        return state
    return mapped(state, lambda value, _: values_of(value) if is_stand_in(value) else value)


def mapped(value: Any, convert: Callable[[Any, str], Any], name: str = "") -> Any:
    """Return nested dictionaries, lists and tuples with other values.

    Args:
        value: of them.
        convert: gets a value and its name, and returns it or another one.
        name: of the value.
    """
    converted = convert(value, name)
    if converted is not value:
        return converted
    within = f"{name}." if name else ""
    if type(value) in (dict, OrderedDict):
        return type(value)(
            (key, mapped(child, convert, f"{within}{key}")) for key, child in value.items()
        )
    if type(value) in (list, tuple):
        return type(value)(
            mapped(child, convert, f"{within}{index}") for index, child in enumerate(value)
        )
    return value


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
        values: all of the tensor, on any device, or this rank's part of it, or what stands for a
            tensor in a folder.
        like: a tensor of the same shape.

    Raises:
        ValueError: they are neither.
    """
    if not isinstance(like, DTensor) or isinstance(values, DTensor):
        return with_values(values)  # type: ignore[no-any-return]

    if is_stand_in(values) and values.shape == like.shape:  # read no more than the part
        return filled(values, torch.empty_like(like.detach(), dtype=values.dtype))
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
        return wholes(Divided(value.shape, value.dtype, partial(whole, value), value))
    return value.cpu() if wholes.keep else value.new_empty(0)


class RowParts:
    """Whole states of a module that is divided by rows, and this rank's parts of such states.

    Args:
        module: the divided one.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def whole_state_dict(self, wholes: Wholes) -> dict[str, Any]:
        """Return the module's state as if it were not divided, in host memory.

        Collective, one tensor at a time; a tied weight, which stands under several names, once.

        Args:
            wholes: puts tensors together. Where this rank does not keep them the result is empty.
        """
        parameters = dict(self._module.named_parameters(remove_duplicate=False))
        found: dict[Any, Tensor] = {}
        result = {}
        for name, value in self._module.state_dict().items():
            key = parameters.get(name, name)
            if isinstance(value, Tensor) and key not in found:
                found[key] = whole_on_host(value, wholes)
            result[name] = found.get(key, value)
        return result if wholes.keep else {}

    def be_whole_from_here(self, wholes: Wholes) -> None:
        """Let the module's own `state_dict` return whole tensors, collective, from now on."""

        def make_whole(module: nn.Module, state: dict[str, Any], *_: Any) -> None:
            del module
            for name, value in state.items():
                if isinstance(value, Tensor):
                    state[name] = whole_on_host(value, wholes)

        self._module.register_state_dict_post_hook(make_whole)  # type: ignore[no-untyped-call]

    def part_state_dict(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a module's state, whole or this rank's, as the module holds it."""
        held = self._module.state_dict()
        return {
            name: part_like(value, held[name]) if name in held else value
            for name, value in state.items()
        }

    def whole_optimizer_state(self, optimizer: Optimizer, wholes: Wholes) -> dict[str, Any]:
        """Return an optimizer's state as `whole_state_dict` returns the module's."""

        def gathered(value: Tensor, parameter: Tensor) -> Tensor:
            return whole_on_host(part_like(value, parameter), wholes)

        return _mapped_state(optimizer, optimizer.state_dict(), gathered)

    def part_optimizer_state(
        self, optimizer: Optimizer, state: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return an optimizer's state, whole or this rank's, as the optimizer holds it."""
        return _mapped_state(optimizer, state, part_like)


def _mapped_state(
    optimizer: Optimizer, state: Mapping[str, Any], convert: Callable[[Tensor, Tensor], Tensor]
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
