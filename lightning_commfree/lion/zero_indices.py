"""Where the zeros of a ballot are, as a list: shorter than a plane while they are few."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_commfree.comm.channel import Channel


def zero_indices_bytes(most: int) -> int:
    """Return the size of a list with room for `most` places."""
    return 4 * most


def gather_zero_indices(
    nonzero: Tensor, valid: Tensor, most: int, channel: Channel, tag: str
) -> Tensor:
    """Exchange the indices of zeros; return the planes of c != 0 of all workers, uint8, (W, B).

    Args:
        nonzero: this worker's plane, uint8, shape (B,).
        valid: the bits that are no padding, uint8, shape (B,).
        most: room in the list, the same on all workers. A worker with more zeros abstains, and
            what is made of its list is not used.
        channel: to the other workers.
        tag: what for.
    """
    bytes_ = valid.numel()
    zero = nonzero ^ valid
    (touched,) = zero.nonzero(as_tuple=True)
    bits = (zero[touched].unsqueeze(1) >> torch.arange(8, device=zero.device)) & 1
    row, bit = bits.nonzero(as_tuple=True)
    places = (touched[row] + bytes_ * bit)[:most]
    mine = torch.full((most,), -1, dtype=torch.int32, device=zero.device)
    mine[: places.numel()] = places
    planes_WB = valid.repeat(channel.size, 1)
    for plane, some in zip(planes_WB, channel.all_gather(mine, tag).wait(), strict=True):
        known = some[some >= 0].long()
        flags = (1 << known // bytes_).to(torch.uint8)
        # places differ, so the bits of one byte add up as they would be or-ed
        absent = torch.zeros_like(plane).index_put_((known % bytes_,), flags, accumulate=True)
        plane ^= absent
    return planes_WB
