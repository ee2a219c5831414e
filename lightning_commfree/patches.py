"""Functions that stand before the methods of single objects for a while."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Patches:
    """Functions that stand before the methods of single objects, from `put` to `remove`.

    They must be put in the process that trains: what is patched does not pickle.
    """

    def __init__(self) -> None:
        self._put: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Let `owner.name` be `function`; on other objects of its class nothing changes."""
        assert callable(getattr(owner, name)), f"{owner} has no method {name}"
        self._put.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, function)

    def remove(self) -> None:
        """Give the objects their own methods back."""
        for owner, name, before in reversed(self._put):
            vars(owner).pop(name, None)
            if before is not None:  # one that stood there already
                setattr(owner, name, before)
        self._put = []
