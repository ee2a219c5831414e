"""The module holds the outer weights for a while, and gets its local copy back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from lightning_commfree.comm.digest import digest
from lightning_commfree.diloco.outer import OuterFragment

ADVICE = (
    "It holds them during a validation and where a checkpoint is written. Callbacks that put"
    " weights of their own in for a validation cannot work here, but for Lightning's"
    " `WeightAveraging`: remove them, or average `outer_weights()` yourself."
)


class WeightSwap:
    """Puts the global copies into the module and the local copy aside.

    Args:
        fragments: all of the model.

    Attributes:
        is_in: the module holds the outer weights.
    """

    def __init__(self, fragments: Sequence[OuterFragment]) -> None:
        self._fragments = fragments
        self._aside: list[Tensor] = []  # the local copy
        self._held: list[Tensor] = []  # hashes of what the module got in its place
        self.is_in = False

    @property
    def in_module(self) -> list[Tensor]:
        """What the module holds now, in the order of `local`."""
        return [tensor for fragment in self._fragments for tensor in fragment.local]

    @property
    def local(self) -> list[Tensor]:
        """The local copy, wherever it is: fragment by fragment, parameters before buffers."""
        return self._aside if self.is_in else self.in_module

    def outer_tensors(self) -> dict[str, Tensor]:
        """Return the outer weights and averaged buffers by name; not to be written to.

        In the dtypes of the module's tensors, where the global copy is. Collective within a
        replica.
        """
        return {
            name: tensor
            for outer in self._fragments
            for name, tensor in zip(
                (*outer.fragment.parameters, *outer.fragment.buffers), outer.outer(), strict=True
            )
        }

    @contextmanager
    def outer_weights(self, shown: Sequence[Tensor] | None = None) -> Iterator[None]:
        """Let the module hold outer weights and averaged buffers in the body; may be nested.

        `shown` as `put_in` takes it; nothing changes in the inner one.
        """
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
        """Put the outer weights and averaged buffers into the module, if they are not there.

        Args:
            shown: what it gets in their place: for every fragment values in the global copy's
                shape.
        """
        if not self.is_in:
            self._aside = [tensor.clone() for tensor in self.in_module]
            for p, fragment in enumerate(self._fragments):
                fragment.merge(mix=0.0, shown=None if shown is None else shown[p])
            self._held = self._hashes()
            self.is_in = True

    @torch.no_grad()
    def put_back(self, check: bool = True) -> None:
        """Put the local copy back, bit for bit, if it is not there.

        A buffer that was written to meanwhile keeps what was written: a module may count in it
        during a validation.

        Args:
            check: refuse parameters that were written to.

        Raises:
            RuntimeError: a parameter was written to meanwhile. The local copy is back then too.
        """
        if not self.is_in:
            return
        names = [
            (name, name in f.fragment.parameters)
            for f in self._fragments
            for name in (*f.fragment.parameters, *f.fragment.buffers)
        ]
        same = torch.stack(self._hashes()).eq(torch.stack(self._held)).tolist()
        written = []
        for (name, trained), tensor, kept, is_same in zip(
            names, self.in_module, self._aside, same, strict=True
        ):
            if trained and not is_same:
                written.append(name)
            if trained or is_same:
                tensor.copy_(kept)
        self._aside, self._held, self.is_in = [], [], False
        if written and check:
            raise RuntimeError(
                f"The parameters {written[:3]}{' and others' if written[3:] else ''} were written"
                f" to while the module held the outer weights. {ADVICE}"
            )

    def _hashes(self) -> list[Tensor]:
        return [digest(tensor.contiguous()) for tensor in self.in_module]
