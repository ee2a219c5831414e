"""Settings for Domino, validated on creation."""

from __future__ import annotations

from dataclasses import dataclass, fields

from lightning_commfree.comm.settings import check_choice, check_count

AUTO = "auto"
SPLITS = (AUTO, "batch", "token", "weight", "hybrid", "none")


@dataclass(frozen=True)
class DominoSettings:
    """Settings for Domino.

    Args:
        tensor_parallel_size: number of ranks that share a model; if None, all ranks of a node. With
            `inside=`, it is the size of a replica.
        split: how to split a batch into micro-batches (`splits`); "auto" picks the fastest split by
            timing.
        num_micro_batches: number of micro-batches, 2 or more.

    Raises:
        ValueError: a value is out of range.
        TypeError: a value has the wrong type.
    """

    # if None, `TensorParallel.size` is 1 until the Trainer has its devices
    tensor_parallel_size: int | None = None
    split: str = AUTO
    num_micro_batches: int = 2

    def __post_init__(self) -> None:
        check_choice("split", self.split, SPLITS)
        if self.tensor_parallel_size is not None:
            check_count("tensor_parallel_size", self.tensor_parallel_size, 1)
        check_count("num_micro_batches", self.num_micro_batches, 2)

    def fingerprint(self) -> dict[str, str]:
        """Return the settings as strings, to compare across ranks."""
        return {field.name: repr(getattr(self, field.name)) for field in fields(self)}
