"""Values by blocks, each with a scale of its own, and by chunks, which are worked on together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

BLOCK = 256  # values
_CPU_CHUNK = 2**19  # values; 4 MB of workspace: smaller chunks pay more for torch's calls
_DEVICE_CHUNK = 2**25  # few launches; the workspace takes 8 bytes a value


class Chunk(NamedTuple):
    """Values that are worked on together: whole blocks, or the last one where it is shorter."""

    values: slice
    blocks: slice

    @property
    def numel(self) -> int:
        """How many values it has."""
        return int(self.values.stop - self.values.start)

    @property
    def shape(self) -> tuple[int, int]:
        """How its values are seen as blocks."""
        num_blocks = int(self.blocks.stop - self.blocks.start)
        return num_blocks, self.numel // num_blocks


def num_blocks(numel: int) -> int:
    """Return how many blocks `numel` values make."""
    return -(-numel // BLOCK)


def chunks(numel: int, device: torch.device) -> Iterator[Chunk]:
    """Cut `numel` values into chunks of a size that suits the device, in ascending order."""
    step = _CPU_CHUNK if device.type == "cpu" else _DEVICE_CHUNK
    whole = numel // BLOCK * BLOCK
    for start in range(0, whole, step):
        stop = min(start + step, whole)
        yield Chunk(slice(start, stop), slice(start // BLOCK, stop // BLOCK))
    if whole < numel:
        yield Chunk(slice(whole, numel), slice(whole // BLOCK, whole // BLOCK + 1))
