"""Temporarily swap weights that all replicas share into the module, then restore the local weights.

Replicas that train independently have different *local* weights between exchanges. The *shared*
weights are the same on all replicas. Validation and checkpoints use them or, as under Streaming
DiLoCo by default, the mean of the local weights, which is passed in as `shown`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_commfree.comm.digest import digest
from lightning_commfree.model.replication import AveragedBuffers


class SharedPart(Protocol):
    """Interface to a subset of a module's tensors, and to their values shared by all replicas."""

    @property
    def names(self) -> tuple[Sequence[str], Sequence[str]]:
        """A pair of sequences: names of the parameters, and names of the buffers."""

    @property
    def local(self) -> list[Tensor]:
        """The module's own tensors, parameters before buffers."""

    def outer(self) -> list[Tensor]:
        """Return the shared values, in the order and with the shapes of `local`."""

    def show(self, shown: Tensor | None = None) -> None:
        """Copy the shared values, or the flat tensor `shown` if given, into the module."""

    def local_equals_shared(self, with_buffers: bool = True) -> bool:
        """Return whether this rank's local parameters equal the shared ones.

        If `with_buffers` is True, compare buffers as well.
        """

    def take_local(self) -> None:
        """Overwrite the shared values with the module's own values."""


class SharedCopy:
    """Copy of the weights shared by all replicas: trained parameters and averaged buffers.

    Create it while all replicas hold the same weights, which become the shared values.

    Attributes:
        names: a pair of lists: names of the trained parameters, and names of the persistent
            floating-point buffers.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._buffers = AveragedBuffers(module)
        trained = [name for name, p in module.named_parameters() if p.requires_grad]
        self.names = trained, self._buffers.averaged
        self._shared = [tensor.clone() for tensor in self.local]

    @property
    def local(self) -> list[Tensor]:
        """The module's own tensors, parameters before buffers."""
        parameters = map(self._module.get_parameter, self.names[0])
        return [tensor.detach() for tensor in (*parameters, *self._buffers.tensors())]

    def outer(self) -> list[Tensor]:
        """Return the shared values in the order of `local`; do not modify them."""
        return self._shared

    def show(self, shown: Tensor | None = None) -> None:
        """Copy the shared values, or the flat tensor `shown` if given, into the module."""
        parts = self._shared
        if shown is not None:
            sizes = [tensor.numel() for tensor in parts]
            split = torch.split(shown, sizes)
            parts = [part.view(own.shape) for part, own in zip(split, parts, strict=True)]
        for tensor, part in zip(self.local, parts, strict=True):
            tensor.copy_(part)

    def load(self, shared: Sequence[Tensor]) -> None:
        """Overwrite the shared values with `shared`, which has the order of `outer`."""
        for own, value in zip(self._shared, shared, strict=True):
            own.copy_(value)

    def local_equals_shared(self, with_buffers: bool = True) -> bool:
        """Return whether this rank's local parameters equal the shared ones.

        If `with_buffers` is True, compare buffers as well.
        """
        count = None if with_buffers else len(self.names[0])
        return all(map(torch.equal, self.local[:count], self._shared[:count]))

    def take_local(self) -> None:
        """Overwrite the shared values with the module's own values."""
        self.load(self.local)


class WeightSwap:
    """Switches a module between its local weights and the shared weights, or values shown instead.

    `parts` contains all exchanged tensors of the module; parts may be added to the list later.
    """

    def __init__(self, parts: Sequence[SharedPart]) -> None:
        self._parts = parts
        self._stashed: list[Tensor] = []  # the local weights
        self._shared_hashes: list[Tensor] = []  # hashes of the swapped-in weights
        self.swapped_in = False  # whether the module contains the shared weights or `shown`
        # parameters that a forward pass changes, as `nn.Embedding(max_norm=...)` does
        self.self_changing: Collection[str] = ()

    @property
    def names(self) -> set[str]:
        """Names of the exchanged parameters and buffers."""
        return {name for part in self._parts for names in part.names for name in names}

    @property
    def in_module(self) -> list[Tensor]:
        """The module's current tensors: for each part, its parameters, then its buffers."""
        return [tensor for part in self._parts for tensor in part.local]

    @property
    def local(self) -> list[Tensor]:
        """The local weights, in the module or stashed by `swap_in`, in the order of `in_module`."""
        return self._stashed if self.swapped_in else self.in_module

    @torch.no_grad()
    def load_local(self, saved: Sequence[Tensor]) -> None:
        """Overwrite the local weights with `saved`, which has the order of `local`."""
        for tensor, value in zip(self.local, saved, strict=True):
            tensor.copy_(value)

    @torch.no_grad()
    def local_equals_shared(self, with_buffers: bool = True) -> bool:
        """Return whether this rank's local parameters equal the shared ones.

        If `with_buffers` is True, compare buffers as well.
        """
        return all(part.local_equals_shared(with_buffers) for part in self._parts)

    @torch.no_grad()
    def take_local(self) -> None:
        """Overwrite the shared weights with the module's own, which all replicas must share."""
        for part in self._parts:
            part.take_local()

    def outer_tensors(self) -> dict[str, Tensor]:
        """Return shared weights and buffers by name, shards as in the module; collective.

        Collective within a replica. The tensors have the module's dtypes and are on the device of
        the shared copy. Do not modify them.
        """
        return {
            name: tensor
            for part in self._parts
            for name, tensor in zip(chain(*part.names), part.outer(), strict=True)
        }

    @contextmanager
    def local_weights(self) -> Iterator[None]:
        """Context manager inside which the module holds the local weights."""
        swapped = self.swapped_in
        self.swap_out()
        yield
        if swapped:
            self.swap_in()

    @contextmanager
    def outer_weights(self, shown: Sequence[Tensor] | None = None) -> Iterator[None]:
        """Context manager inside which the module holds the shared weights or `shown`.

        It has no effect if weights are swapped in already. For `shown` and errors, see `swap_in`
        and `swap_out`.
        """
        if self.swapped_in:
            yield
            return
        self.swap_in(shown)
        try:
            yield
        finally:
            self.swap_out()

    @torch.no_grad()
    def swap_in(self, shown: Sequence[Tensor] | None = None) -> None:
        """Stash the local weights, and put the shared ones (or `shown`) into the module.

        Buffers are swapped too. `shown` has one entry per part (see `SharedPart.show`). Do nothing
        if weights are swapped in already.
        """
        if not self.swapped_in:
            self._stashed = [tensor.clone() for tensor in self.in_module]
            for p, part in enumerate(self._parts):
                part.show(None if shown is None else shown[p])
            # use hashes, because writing through `parameter.data` does not change the version
            self._shared_hashes = self._hashes()
            self.swapped_in = True

    @torch.no_grad()
    def swap_out(self, check: bool = True) -> None:
        """Restore the stashed local weights, bit for bit; raise if a parameter has been modified.

        Do nothing if the module holds the local weights. Buffers that were modified since `swap_in`
        keep their new values.

        Raises:
            RuntimeError: `check` is True, and a parameter was modified since `swap_in`. The local
                weights are restored anyway.
        """
        if not self.swapped_in:
            return
        names = [
            (name, name in part.names[0]) for part in self._parts for name in chain(*part.names)
        ]
        same = torch.stack(self._hashes()).eq(torch.stack(self._shared_hashes)).tolist()
        written = []
        for (name, trained), tensor, kept, is_same in zip(
            names, self.in_module, self._stashed, same, strict=True
        ):
            if trained and not is_same and name not in self.self_changing:
                written.append(name)
            # A modified buffer keeps its new value: it may count validations. A modified parameter
            # does not: training continues from the local weights.
            if trained or is_same:
                tensor.copy_(kept)
        self._stashed, self._shared_hashes, self.swapped_in = [], [], False
        if written and check:
            raise RuntimeError(
                f"The parameters {written[:3]}{' and others' if written[3:] else ''} were modified"
                " while the module held the outer weights, during validation or a checkpoint save."
                " The change would be lost, because training continues from each replica's local"
                " weights. Change weights in a training hook, such as `on_train_batch_end`. To"
                " validate other weights, put them into the module in `on_validation_start` and"
                " restore the previous ones, bit for bit, in `on_validation_end`."
            )

    def _hashes(self) -> list[Tensor]:
        return [digest(tensor.contiguous()) for tensor in self.in_module]


class OuterView:
    """View of a module in which the shared weights replace the module's own weights.

    The shared weights are gathered on first use. Other attributes are the module's own.
    """

    def __init__(self, module: nn.Module, swap: WeightSwap) -> None:
        self._module, self._swap = module, swap

    def parameters(self) -> Iterator[Tensor]:
        """Yield the parameters, with shared values where they exist; do not modify them."""
        return (self._values.get(name, own) for name, own in self._module.named_parameters())

    def buffers(self) -> Iterator[Tensor]:
        """Yield the buffers, with shared values where they exist; do not modify them."""
        for name, own in self._module.named_buffers():
            shared = self._values.get(name, own)
            yield shared if shared.shape == own.shape else own  # see `AveragedBuffers`

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    @cached_property
    def _values(self) -> dict[str, Tensor]:
        return self._swap.outer_tensors()
