"""Put the weights that replicas share into the module for a while, and the local ones back.

Replicas that train apart have weights of their own between two exchanges. Validations and
checkpoints use the weights that they share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_commfree.comm.digest import digest

ADVICE = (
    "It holds them during a validation and where a checkpoint is written. Callbacks that put"
    " weights of their own in for a validation cannot work here, but for Lightning's"
    " `WeightAveraging`: remove them, or average `outer_weights()` yourself."
)


class SharedPart(Protocol):
    """Some tensors of a module, and the shared values for them."""

    @property
    def names(self) -> tuple[Sequence[str], Sequence[str]]:
        """The names of the parameters, and of the buffers."""
        ...

    @property
    def local(self) -> list[Tensor]:
        """The module's own tensors, parameters before buffers."""
        ...

    def outer(self) -> list[Tensor]:
        """Return the shared values, as tensors like `local`."""
        ...

    def show(self, shown: Tensor | None = None) -> None:
        """Copy the shared values, or `shown` in their place, into the module."""
        ...

    def is_local(self, buffers: bool = True) -> bool:
        """Return whether the module holds the shared values; buffers on demand."""
        ...

    def take_local(self) -> None:
        """Make the module's values the shared ones."""
        ...


class SharedCopy:
    """A copy of the whole model as one part: trained parameters and floating-point buffers.

    Args:
        module: the model; all replicas hold the same weights now.

    Attributes:
        names: of the trained parameters, and of the buffers that a checkpoint has.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        kept = module.state_dict()
        self.names = (
            [name for name, p in module.named_parameters() if p.requires_grad],
            [n for n, b in module.named_buffers() if b.is_floating_point() and n in kept],
        )
        self._shared = [tensor.clone() for tensor in self.local]

    @property
    def local(self) -> list[Tensor]:
        """The module's own tensors, parameters before buffers."""
        parameters = map(self._module.get_parameter, self.names[0])
        buffers = map(self._module.get_buffer, self.names[1])
        return [tensor.detach() for tensor in (*parameters, *buffers)]

    def outer(self) -> list[Tensor]:
        """Return the shared values in the order of `local`; not to be written to."""
        return self._shared

    def show(self, shown: Tensor | None = None) -> None:
        """Copy the shared values into the module, or `shown`, flat, in their place."""
        parts = self._shared
        if shown is not None:
            sizes = [tensor.numel() for tensor in parts]
            split = torch.split(shown, sizes)
            parts = [part.view(own.shape) for part, own in zip(split, parts, strict=True)]
        for tensor, part in zip(self.local, parts, strict=True):
            tensor.copy_(part)

    def load(self, shared: Sequence[Tensor]) -> None:
        """Make these the shared values, in the order of `outer`."""
        for own, value in zip(self._shared, shared, strict=True):
            own.copy_(value)

    def is_local(self, buffers: bool = True) -> bool:
        """Return whether the module holds the shared values; buffers on demand."""
        count = None if buffers else len(self.names[0])
        return all(map(torch.equal, self.local[:count], self._shared[:count]))

    def take_local(self) -> None:
        """Make the module's values the shared ones."""
        self.load(self.local)


class WeightSwap:
    """Puts the shared weights into the module and keeps the local ones.

    Args:
        parts: of the model, all of them; the list may grow.

    Attributes:
        is_in: the module holds the shared weights.
    """

    def __init__(self, parts: Sequence[SharedPart]) -> None:
        self._parts = parts
        self._aside: list[Tensor] = []  # the local weights
        self._held: list[Tensor] = []  # hashes of the values that replaced them in the module
        self.is_in = False

    @property
    def in_module(self) -> list[Tensor]:
        """The module's tensors now, in the order of `local`."""
        return [tensor for part in self._parts for tensor in part.local]

    @property
    def local(self) -> list[Tensor]:
        """The local weights, wherever they are: part by part, parameters before buffers."""
        return self._aside if self.is_in else self.in_module

    @torch.no_grad()
    def load_local(self, saved: Sequence[Tensor]) -> None:
        """Restore the local weights."""
        for tensor, value in zip(self.local, saved, strict=True):
            tensor.copy_(value)

    @torch.no_grad()
    def is_local(self, buffers: bool = True) -> bool:
        """Return whether the module holds the shared weights; averaged buffers on demand."""
        return all(part.is_local(buffers) for part in self._parts)

    @torch.no_grad()
    def take_local(self) -> None:
        """Make the module's values the shared ones, before the first step."""
        for part in self._parts:
            part.take_local()

    def outer_tensors(self) -> dict[str, Tensor]:
        """Return the shared weights and averaged buffers by name; not to be written to.

        In the dtypes of the module's tensors, on the device of the shared copy. Collective within a
        replica.
        """
        return {
            name: tensor
            for part in self._parts
            for name, tensor in zip(chain(*part.names), part.outer(), strict=True)
        }

    @contextmanager
    def local_weights(self) -> Iterator[None]:
        """Let the module hold the local weights in the body."""
        swapped = self.is_in
        self.put_back()
        yield
        if swapped:
            self.put_in()

    @contextmanager
    def outer_weights(self, shown: Sequence[Tensor] | None = None) -> Iterator[None]:
        """Let the module hold the shared weights in the body; a nested use changes nothing."""
        if self.is_in:
            yield
            return
        self.put_in(shown)
        try:
            yield
        finally:
            self.put_back()

    @torch.no_grad()
    def put_in(self, shown: Sequence[Tensor] | None = None) -> None:
        """Put the shared weights and averaged buffers into the module, if they are not there.

        Args:
            shown: values for the module in their place: for every part as its `show` takes them.
        """
        if not self.is_in:
            self._aside = [tensor.clone() for tensor in self.in_module]
            for p, part in enumerate(self._parts):
                part.show(None if shown is None else shown[p])
            # Hashes and not versions: callbacks write through `parameter.data`, which has its own.
            self._held = self._hashes()
            self.is_in = True

    @torch.no_grad()
    def put_back(self, check: bool = True) -> None:
        """Put the local weights back, bit for bit, if they are not there.

        A buffer that was written to in between keeps the new values: a module may count in it
        during a validation.

        Args:
            check: refuse parameters that were written to.

        Raises:
            RuntimeError: a parameter was written to in between. The local weights are back then
                too.
        """
        if not self.is_in:
            return
        names = [
            (name, name in part.names[0]) for part in self._parts for name in chain(*part.names)
        ]
        same = torch.stack(self._hashes()).eq(torch.stack(self._held)).tolist()
        written = []
        for (name, trained), tensor, kept, is_same in zip(
            names, self.in_module, self._aside, same, strict=True
        ):
            if trained and not is_same:
                written.append(name)
            if trained or is_same:  # parameters always: training continues with the local ones
                tensor.copy_(kept)
        self._aside, self._held, self.is_in = [], [], False
        if written and check:
            raise RuntimeError(
                f"The parameters {written[:3]}{' and others' if written[3:] else ''} were written"
                f" to while the module held the outer weights. {ADVICE}"
            )

    def _hashes(self) -> list[Tensor]:
        return [digest(tensor.contiguous()) for tensor in self.in_module]


class OuterView:
    """A view of a module in which the shared weights replace the exchanged tensors.

    Args:
        module: the module.
        swap: has its shared weights, which are asked for once.
    """

    def __init__(self, module: nn.Module, swap: WeightSwap) -> None:
        self._module, self._swap = module, swap

    def parameters(self) -> Iterator[Tensor]:
        """Yield the parameters, shared ones where there are; not to be written to."""
        return (self._values.get(name, own) for name, own in self._module.named_parameters())

    def buffers(self) -> Iterator[Tensor]:
        """Yield the buffers, shared ones where there are; not to be written to."""
        return (self._values.get(name, own) for name, own in self._module.named_buffers())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    @cached_property
    def _values(self) -> dict[str, Tensor]:
        return self._swap.outer_tensors()
