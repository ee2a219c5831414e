"""How a tensor is divided among the ranks of a tensor group, and put together again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ShardSpec:
    """Each rank holds a range of one dimension, out of every one of several equal blocks.

    A packed q, k, v weight has three blocks and each rank a part of each. Ranges may overlap: a key
    head that several ranks need is held by all of them.

    Attributes:
        dim: the dimension that is divided.
        ranges: first and behind-last index within a block, for every rank.
        size: length of the whole dimension.
        blocks: equal parts of it.
        padded: length to which a whole tensor is padded with zeros before it is divided.
    """

    dim: int
    ranges: tuple[tuple[int, int], ...]
    size: int
    blocks: int = 1
    padded: int | None = None

    @classmethod
    def even(cls, dim: int, size: int, ranks: int, blocks: int = 1) -> ShardSpec:
        """Divide each block of a dimension evenly; a single block may be padded."""
        block = size // blocks
        part = -(-block // ranks)
        ranges = tuple((rank * part, (rank + 1) * part) for rank in range(ranks))
        padded = part * ranks
        assert blocks == 1 or padded == block, "only a single block is padded"
        return cls(dim, ranges, size, blocks, padded if padded > block else None)

    @property
    def overlapping(self) -> bool:
        """Whether some part is held by several ranks."""
        return len(set(self.ranges)) < len(self.ranges)

    def part(self, whole: Tensor, rank: int) -> Tensor:
        """Return a copy of what `rank` holds of `whole`."""
        if self.padded is not None:
            shape = list(whole.shape)
            shape[self.dim] = self.padded - self.size
            whole = torch.cat([whole, whole.new_zeros(shape)], self.dim)

        start, stop = self.ranges[rank]
        block = whole.shape[self.dim] // self.blocks
        firsts = [b * block + start for b in range(self.blocks)]
        return torch.cat([whole.narrow(self.dim, f, stop - start) for f in firsts], self.dim)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Put the parts of all ranks together again, without the padding."""
        shape = list(parts[0].shape)
        shape[self.dim] = self.padded or self.size
        whole = parts[0].new_empty(shape)

        block = shape[self.dim] // self.blocks
        for (start, stop), part in zip(self.ranges, parts, strict=True):
            for b, values in enumerate(part.chunk(self.blocks, self.dim)):
                whole.narrow(self.dim, b * block + start, stop - start).copy_(values)

        return whole.narrow(self.dim, 0, self.size).contiguous()
