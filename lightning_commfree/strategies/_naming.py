"""Lightning's own collectives, whose errors name the rank that is gone."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from lightning.pytorch.strategies import DDPStrategy
from typing_extensions import override

from lightning_commfree.comm.channel import Channel

T = TypeVar("T")


class NamingStrategy(DDPStrategy):
    """A `DDPStrategy` that knows who is there, once `_world_channel` is open."""

    _world_channel: Channel | None = None  # to all ranks

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        with self._named("barrier"):
            super().barrier(*args, **kwargs)

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        with self._named("broadcast"):
            return super().broadcast(obj, src)

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        with self._named("reduce"):
            return super().reduce(tensor, group, reduce_op)

    def _named(self, what: str) -> AbstractContextManager[None]:
        """In the body, a collective of Lightning's that fails names the rank that is gone."""
        world = self._world_channel
        return nullcontext() if world is None else world.naming_lost(what)
