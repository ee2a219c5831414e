"""The user's settings of tensor parallelism, validated on construction."""

from __future__ import annotations

from dataclasses import dataclass, fields

AUTO = "auto"
SPLITS = (AUTO, "batch", "token", "weight", "hybrid", "none")


@dataclass(frozen=True)
class DominoSettings:
    """Settings of Domino; `DominoTPStrategy` documents each.

    Raises:
        ValueError: a value is outside its range.
        TypeError: a value has the wrong type.
    """

    tensor_parallel_size: int | None = None
    split: str = AUTO
    num_micro_batches: int = 2

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise ValueError(
                f"`split={self.split!r}` is unknown. Choose one of {', '.join(map(repr, SPLITS))}."
            )
        for name, least in (("tensor_parallel_size", 1), ("num_micro_batches", 2)):
            value = getattr(self, name)
            if value is None and name == "tensor_parallel_size":
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(
                    f"`{name}={value!r}` must be a whole number, but it is a"
                    f" {type(value).__name__}. Give an int."
                )
            if value < least:
                raise ValueError(f"`{name}={value}` must be at least {least}.")

    def fingerprint(self) -> dict[str, str]:
        """Return the settings as text; they must be equal on all ranks."""
        return {field.name: repr(getattr(self, field.name)) for field in fields(self)}
