"""Settings for Distributed Lion, validated on creation."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from lightning_commfree.comm.settings import check_choice, check_count

_CHOICES = {
    "vote": ("majority", "average"),
    "ties": ("zero", "random"),
    "nonfinite": ("raise", "abstain"),
}


@dataclass(frozen=True)
class LionSettings:
    """Settings for Distributed Lion, documented in `DistributedLionStrategy`.

    Raises:
        ValueError: a value is out of range.
        TypeError: a value has the wrong type.
    """

    vote: str = "majority"
    ties: str = "zero"
    nonfinite: str = "raise"
    node_size: int = 1
    # how the ranks of a worker hold the model; only "ddp" if `node_size` is 1
    inside: Any = "ddp"  # a name, or Domino settings (`lion` must not import their class)
    check_drift_every: int = 100

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            check_choice(name, getattr(self, name), choices)
        check_count("node_size", self.node_size, 1)
        check_count("check_drift_every", self.check_drift_every, 0, ", where 0 means never")
        if self.vote == "average" and self.ties != "zero":
            raise ValueError(
                f"`ties={self.ties!r}` has no effect with `vote='average'`, where a tie averages to"
                " 0. Leave `ties` at 'zero', or use `vote='majority'`."
            )

    def fingerprint(self) -> dict[str, str]:
        """Return all settings as strings, to compare across ranks."""
        return {field.name: repr(getattr(self, field.name)) for field in fields(self)}
