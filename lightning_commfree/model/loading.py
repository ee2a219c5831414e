"""Notice weights that `load_state_dict` replaces in the middle of a fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class LoadWatch:
    """Tells whether `load_state_dict` has changed the weights of a module or its submodules.

    A load that is undone by another one does not count: a callback may load averaged weights, use
    them, and load the previous ones again. `hashes` may return None to ignore a call.
    """

    def __init__(self, module: nn.Module, hashes: Callable[[], list[int] | None]) -> None:
        self._hashes = hashes
        self._before: list[int] | None = None
        hook = _Hook(self._hash_before_load)
        self._handles = [
            one.register_load_state_dict_pre_hook(hook)  # type: ignore[no-untyped-call]
            for one in module.modules()
        ]

    def _hash_before_load(self) -> None:
        """Hash the weights, unless that has been done since the last `take`."""
        if self._before is None:
            self._before = self._hashes()

    def take(self) -> bool:
        """Return whether weights have changed by loading since the last call."""
        before, self._before = self._before, None
        return before is not None and before != self._hashes()

    def close(self) -> None:
        """Remove the hooks from the module."""
        for handle in self._handles:
            handle.remove()


class _Hook:
    """Calls a function when weights are loaded; a copy of the module gets a hook that does not."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __call__(self, *_: Any) -> None:
        self._call()

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _make_empty_hook, ()  # used by `deepcopy` and pickle


def _make_empty_hook() -> Callable[..., None]:
    return _empty_hook


def _empty_hook(*_: Any) -> None:
    """Do nothing: what a `_Hook` becomes in a copy of its module."""
