"""The settings of Distributed Lion, validated when they are made."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

_CHOICES = {
    "vote": ("majority", "average"),
    "ties": ("zero", "random"),
    "nonfinite": ("raise", "abstain"),
}


@dataclass(frozen=True)
class LionSettings:
    """The settings of the vote; `DistributedLionStrategy` documents each.

    Raises:
        ValueError: a value is outside its range.
        TypeError: a value has another type.
    """

    vote: str = "majority"
    ties: str = "zero"
    momentum_sync_every: int = 0
    nonfinite: str = "raise"
    node_size: int = 1
    inside: Any = "ddp"  # a name, or a value of Domino's settings, which this package cannot import
    check_drift_every: int = 100

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(
                    f"`{name}={value!r}` is unknown. Choose one of {', '.join(map(repr, choices))}."
                )

        for name, least in (("momentum_sync_every", 0), ("node_size", 1), ("check_drift_every", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(
                    f"`{name}={value!r}` must be a whole number, but it is a"
                    f" {type(value).__name__}. Give an int."
                )
            if value < least:
                raise ValueError(
                    f"`{name}={value}` must be at least {least}"
                    f"{', where 0 means never' if least == 0 else ''}."
                )

        if self.vote == "average" and self.ties != "zero":
            raise ValueError(
                f"`ties={self.ties!r}` means nothing with `vote='average'`, whose mean of a tie is"
                " 0. Leave `ties` at 'zero', or vote by 'majority'."
            )

    def fingerprint(self) -> dict[str, str]:
        """Return the settings that must be equal on all ranks, as text."""
        return {field.name: repr(getattr(self, field.name)) for field in fields(self)}
