"""Split parameters into buckets: a bucket is voted on in one exchange.

Buckets are filled in reverse order of use, so that during backward the first one is complete while
the gradients of the others are still to come. A parameter is never cut in two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

_MOST = 1 << 22  # parameters: 512 KiB a plane, 42 ms at 100 Mbit/s
_LEAST = 1 << 18  # below it an exchange takes its latency and not its bytes
_WANTED = 16  # buckets, so that little is left to send when backward ends


@dataclass(frozen=True)
class Bucket:
    """Parameters that are voted on together: parameter i begins at value `starts[i]`."""

    index: int
    parameters: tuple[nn.Parameter, ...]
    names: tuple[str, ...]
    starts: tuple[int, ...]
    numel: int
    plane_bytes: int  # of one bit per value, padding included


def split_into_buckets(
    parameters: Sequence[tuple[str, nn.Parameter]], shards: int, numel: int | None = None
) -> list[Bucket]:
    """Return the buckets in the order in which backward completes them.

    Args:
        parameters: names and parameters, in order of use in forward.
        shards: number of shards, of whole 8-byte words, that a bucket's planes are cut into.
        numel: values from which on a bucket is full; None: by the size of the model.
    """
    total = sum(p.numel() for _, p in parameters)
    full = min(max(total // _WANTED, _LEAST), _MOST) if numel is None else numel
    buckets: list[Bucket] = []
    filling: list[tuple[str, nn.Parameter]] = []
    size = 0

    def close() -> None:
        starts = [0]
        for _, parameter in filling:
            starts.append(starts[-1] + parameter.numel())
        values = starts.pop()
        names, members = zip(*filling, strict=True)
        plane_bytes = max(-(-values // (64 * shards)), 1) * 8 * shards
        buckets.append(Bucket(len(buckets), members, names, tuple(starts), values, plane_bytes))

    for name, parameter in reversed(parameters):
        alike = not filling or filling[0][1].device == parameter.device
        if filling and (size >= full or not alike):
            close()
            filling, size = [], 0
        filling.append((name, parameter))
        size += parameter.numel()

    if filling:
        close()
    return buckets
