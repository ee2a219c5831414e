"""Lightning's own collectives, whose errors name the rank that is gone."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from lightning.pytorch.strategies import DDPStrategy
from typing_extensions import override

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.unshared import Unshared
from lightning_commfree.strategies._launching import OrderlyLauncher
from lightning_commfree.strategies._signals import stopped_by_hand

T = TypeVar("T")


class NamingStrategy(DDPStrategy):
    """A `DDPStrategy` that knows who is there, once `_world_channel` is open."""

    _world_channel: Channel | None = None  # to all ranks

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sockets = Unshared()

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if self._start_method != "popen":
            self._launcher = OrderlyLauncher(self, start_method=self._start_method)

    @override
    def on_exception(self, exception: BaseException) -> None:
        if isinstance(self._launcher, OrderlyLauncher):
            self._launcher.restore_callbacks()  # Lightning has called their hooks by now
        super().on_exception(exception)

    @override
    def setup_environment(self) -> None:
        with self._sockets.opening():  # a rank that is killed is gone, whoever it has forked off
            super().setup_environment()

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if self._stopped_by_hand():
            return
        with self._named("barrier"):
            super().barrier(*args, **kwargs)

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        if self._stopped_by_hand():
            return obj
        with self._named("broadcast"):
            return super().broadcast(obj, src)

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        with self._named("reduce"):
            return super().reduce(tensor, group, reduce_op)

    def _stopped_by_hand(self) -> bool:
        """Return whether this is after Ctrl-C, when the ranks no longer do the same."""
        module = self.lightning_module
        try:
            return module is not None and stopped_by_hand(module.trainer)
        except RuntimeError:  # no Trainer: it launched the ranks, which trained a copy, and is back
            return False

    def _named(self, what: str) -> AbstractContextManager[None]:
        """In the body, a collective of Lightning's that fails names the rank that is gone."""
        world = self._world_channel
        # a tensor on the wrong device fails here too, and is nobody's death
        return nullcontext() if world is None else world.naming_lost(what, computing=True)
