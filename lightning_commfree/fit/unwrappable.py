"""Proxy for a LightningModule, used as `trainer.model` when DDP does not wrap the module."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any


class Unwrappable:
    """Proxy for a LightningModule that adds an attribute `module`, the LightningModule itself.

    Scripts for the `ddp` strategy read `trainer.model.module`. A LightningModule that had itself as
    an attribute would break scripts that unwrap in a loop (`while hasattr(model, "module")`), so
    `trainer.model` is this object. All other attributes, `isinstance`, calls, `==`, copies and
    pickles behave as if `trainer.model` were the LightningModule. Only special methods that its
    class defines (`__len__`, `__getitem__`) need `.module`.
    """

    __slots__ = ("__weakref__", "module")

    def __init__(self, module: Any) -> None:
        object.__setattr__(self, "module", module)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # read by `isinstance`
        return type(self.module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.module, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.module, name)

    @property
    def __call__(self) -> Any:
        """The module's own `__call__`, which `torch.compile` can trace."""
        return self.module.__call__

    def __eq__(self, other: object) -> bool:
        # Lightning compares `strategy.model` with the LightningModule before it redirects a step
        return other is self or other is self.module

    def __hash__(self) -> int:
        return hash(self.module)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context manager that does nothing.

        Scripts that accumulate gradients by hand call DDP's, which leaves out the all-reduce at the
        end of backward. Here, there is none.
        """
        own = getattr(self.module, "no_sync", nullcontext)
        context: AbstractContextManager[None] = own()
        return context

    def __repr__(self) -> str:
        return repr(self.module)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.module.__reduce_ex__(protocol)
