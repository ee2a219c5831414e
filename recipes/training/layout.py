"""Read from a configuration how the ranks of a replica hold the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hydra.utils import get_class

from lightning_commfree import FSDPSettings


def inside_of(strategy: Mapping[str, Any]) -> str:
    """Return "ddp", "fsdp" or "domino".

    Args:
        strategy: section of the configuration; `inside` is a name or a section with a `_target_`.
    """
    inside: Any = strategy.get("inside", "ddp")
    if not isinstance(inside, Mapping):
        return str(inside)
    return "fsdp" if issubclass(get_class(inside["_target_"]), FSDPSettings) else "domino"
