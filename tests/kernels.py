"""Kernels of a walk without a device: what each one reads and writes, how many, and their bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Accesses(NamedTuple):
    """Tensors that an operation reads and writes; one that is updated in place is in both."""

    reads: list[Tensor]
    writes: list[Tensor]

    @property
    def on_device(self) -> bool:
        """Whether it runs on the device, a copy from or to it included."""
        return any(tensor.device.type == "cuda" for tensor in (*self.reads, *self.writes))


def accesses(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> Accesses:
    """Return what an operation reads and writes; nothing for a view or an allocation."""
    schema = func._schema
    is_view = any(r.alias_info and not r.alias_info.is_write for r in schema.returns)
    if is_view or "empty" in func.name() or func.namespace == "prim":
        return Accesses([], [])

    reads, writes = [], list(tensors_in(result))
    for argument, value in _given(schema, args, kwargs):
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        # `copy_(self, src)`, `fill_` and `out=` overwrite what they are given
        overwritten = argument.is_out or schema.name in ("aten::copy_", "aten::fill_")
        if is_written:
            writes += tensors_in(value)
        if not (is_written and (overwritten or schema.name == "aten::zero_")):
            reads += tensors_in(value)
    return Accesses(_distinct(reads), _distinct(writes))


def _given(schema: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Yield every argument that is given, with its value."""
    yield from zip(schema.arguments, args, strict=False)
    for argument in schema.arguments[len(args) :]:
        if argument.name in kwargs:
            yield argument, kwargs[argument.name]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples and dictionaries."""
    return (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))


def _distinct(tensors: list[Tensor]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())


class KernelCount(TorchDispatchMode):
    """In its body, inside a walk, kernels are counted; a copy from or to the device is one.

    Attributes:
        kernels: by operation.
        num_bytes: read and written, by operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.num_bytes: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        found = accesses(func, args, kwargs or {}, result)
        if found.on_device:
            self.kernels[func.name()] += 1
            self.num_bytes[func.name()] += sum(map(_size, (*found.reads, *found.writes)))
        return result


def _size(tensor: Tensor) -> int:
    """Return the bytes behind a tensor: one value, where it is expanded."""
    is_expanded = tensor.dim() > 0 and 0 in tensor.stride()
    return tensor.element_size() if is_expanded else tensor.nbytes
