"""What of a fragment's tensors a rank exchanges, and how it lies in one flat tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Share(NamedTuple):
    """Some values of one tensor, behind each other."""

    tensor: int  # its number
    start: int
    end: int


@dataclass(frozen=True)
class Layout:
    """Decided once, for a rank of a replica; see `of`.

    Attributes:
        shapes: of the tensors, as this rank holds them.
        sizes: the values in each of them.
        copies: the numbers of those that all ranks of the replica hold alike.
        copied: C, the values of these.
        shares: what this rank exchanges, in its order.
        lengths: values in each share.
        fill: zeros behind them, up to the size of the others' shard.
        numel: S, all values that this rank exchanges.
        parameter_numel: how many of them come first and are of parameters.
    """

    shapes: list[torch.Size]
    sizes: list[int]
    copies: list[int]
    copied: int
    shares: list[Share]
    lengths: list[int]
    fill: int
    numel: int
    parameter_numel: int

    @classmethod
    def of(
        cls,
        local: Sequence[Tensor],
        are_parts: Sequence[bool],
        num_parameters: int,
        rank: int,
        size: int,
    ) -> Layout:
        """Decide it.

        The ranks of a replica hold a tensor alike, or a *part* of it each (`comm.parts`). Of what
        they hold alike a rank exchanges one shard of ceil(C / k) values, for C values and k ranks;
        of the parts its own. Parameters come before buffers, and shards of copies before parts.

        Args:
            local: the tensors as this rank holds them, parameters before buffers.
            are_parts: which of them are parts.
            num_parameters: how many of them are parameters.
            rank: in the replica.
            size: k.
        """
        sizes = [tensor.numel() for tensor in local]
        copies = [i for i, is_part in enumerate(are_parts) if not is_part]
        parts = [Share(i, 0, sizes[i]) for i, is_part in enumerate(are_parts) if is_part]
        copied = sum(sizes[i] for i in copies)
        shard = -(-copied // size)
        mine = _cut(sizes, copies, rank * shard, shard, empty=size == 1)

        # stable: within both kinds the copies stay first
        shares = sorted([*mine, *parts], key=lambda share: share.tensor >= num_parameters)
        fill = shard - sum(share.end - share.start for share in mine)
        lengths = [share.end - share.start for share in shares]
        numel = parameter_numel = sum(lengths) + fill
        if num_parameters < len(local):
            trained = zip(shares, lengths, strict=True)
            parameter_numel = sum(n for share, n in trained if share.tensor < num_parameters)

        shapes = [tensor.shape for tensor in local]
        return cls(shapes, sizes, copies, copied, shares, lengths, fill, numel, parameter_numel)


def _cut(
    sizes: Sequence[int], copies: Sequence[int], start: int, shard: int, empty: bool
) -> list[Share]:
    """Return the values of the copies from `start` on that make up one shard.

    With `empty` a tensor without values has a share too.
    """
    shares, begin = [], 0
    for i in copies:
        low, high = max(begin, start), min(begin + sizes[i], start + shard)
        if low < high or empty:
            shares.append(Share(i, low - begin, high - begin))
        begin += sizes[i]
    return shares
