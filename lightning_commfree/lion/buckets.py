"""Group parameters into buckets. All votes on a bucket are sent in one exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

_MAX_NUMEL = 1 << 22  # parameters: 512 KiB per bit plane, 42 ms at 100 Mbit/s
_MIN_NUMEL = 1 << 18  # parameters: with fewer, latency dominates an exchange
_TARGET_BUCKETS = 16  # enough that little is left to send when backward ends


@dataclass(frozen=True)
class Bucket:
    """Parameters that are voted on together; values of parameter i start at offset `starts[i]`."""

    index: int
    parameters: tuple[nn.Parameter, ...]
    names: tuple[str, ...]
    starts: tuple[int, ...]
    numel: int
    plane_bytes: int  # size of a plane (one bit per value), including padding


def split_into_buckets(
    named_parameters: Sequence[tuple[str, nn.Parameter]],  # in the order in which forward uses them
    num_shards: int,  # per bit plane
    min_numel: int | None = None,  # of a full bucket; if None, chosen from the model's size
) -> list[Bucket]:
    """Group parameters into buckets in the order in which backward completes them.

    A parameter is never split, and all parameters in a bucket are on the same device.
    """
    total = sum(p.numel() for _, p in named_parameters)
    chosen = min(max(total // _TARGET_BUCKETS, _MIN_NUMEL), _MAX_NUMEL)
    full = chosen if min_numel is None else min_numel
    buckets: list[Bucket] = []
    filling: list[tuple[str, nn.Parameter]] = []
    size = 0

    def append_bucket() -> None:
        starts = [0]
        for _, parameter in filling:
            starts.append(starts[-1] + parameter.numel())
        values = starts.pop()
        names, members = zip(*filling, strict=True)
        # pad so that every shard of a plane is a whole number of 8-byte words
        plane_bytes = max(-(-values // (64 * num_shards)), 1) * 8 * num_shards
        buckets.append(Bucket(len(buckets), members, names, tuple(starts), values, plane_bytes))

    # reverse order of use, so that the first bucket is sent while backward computes other gradients
    for name, parameter in reversed(named_parameters):
        same_device = not filling or filling[0][1].device == parameter.device
        if filling and (size >= full or not same_device):
            append_bucket()
            filling, size = [], 0
        filling.append((name, parameter))
        size += parameter.numel()

    if filling:
        append_bucket()
    return buckets
