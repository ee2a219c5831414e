"""Whole tensors out of the parts that the ranks of a replica hold: at once, or one at a time.

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
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
