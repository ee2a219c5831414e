"""Methods put in place of those of a Trainer's own objects, and taken away again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Shadows:
    """Functions that stand before the methods of single objects, from `put` to `remove`.

    They must be put in the process that trains: what is shadowed does not pickle.
    """

    def __init__(self) -> None:
        self._put: list[tuple[Any, str]] = []

    def put(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Let `owner.name` be `function`; on other objects of its class nothing changes."""
        assert callable(getattr(owner, name)), f"{owner} has no method {name}"
        setattr(owner, name, function)
        self._put.append((owner, name))

    def remove(self) -> None:
        """Give the objects their own methods back."""
        for owner, name in self._put:
            vars(owner).pop(name, None)
        self._put = []
