"""Check that all ranks of a channel have the same settings before the first real exchange.

Between ranks with different settings, an exchange would hang or combine values that do not belong
together.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_commfree.comm.channel import Channel

TAG = "handshake"
_SHOWN = 5  # maximum number of differences listed in the error


def check_agreement(channel: Channel, fingerprint: Mapping[str, str]) -> None:
    """Raise a ValueError on all ranks unless `fingerprint` is the same on every rank; collective.

    `fingerprint` maps names to values that must be the same on all ranks, such as settings and
    parameter shapes. If they are the same, each rank sends only a 32-byte hash. Otherwise, the
    message lists differences from the first rank.
    """
    text = json.dumps(dict(fingerprint), sort_keys=True).encode()
    digests = _gather_bytes(channel, hashlib.sha256(text).digest())
    if all(digest == digests[0] for digest in digests):
        return
    texts = gather_texts(channel, text.decode())
    everybody: list[dict[str, str]] = [json.loads(text) for text in texts]
    reference, first = everybody[0], channel.ranks[0]
    differences = [
        f"{name} is {theirs.get(name, 'absent')} on rank {rank},"
        f" {reference.get(name, 'absent')} on rank {first}"
        for rank, theirs in zip(channel.ranks, everybody, strict=True)
        for name in sorted(reference.keys() | theirs.keys())
        if theirs.get(name) != reference.get(name)
    ]
    more = f"; and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
    raise ValueError(
        f"The ranks of this job do not agree: {'; '.join(differences[:_SHOWN])}{more}. Start every"
        " rank with the same settings, the same model and the same versions of the code."
    )


def common_entries(channel: Channel, entries: Sequence[str]) -> set[str]:
    """Return the entries that are in the lists of all ranks; collective.

    If the lists are the same, each rank sends only a 32-byte hash.
    """
    text = json.dumps(entries)
    digests = _gather_bytes(channel, hashlib.sha256(text.encode()).digest())
    if all(digest == digests[0] for digest in digests):
        return set(entries)
    return set.intersection(*(set(json.loads(one)) for one in gather_texts(channel, text)))


def gather_texts(channel: Channel, text: str) -> list[str]:
    """Gather a string from every rank, in rank order; collective."""
    raw = text.encode()
    # a gather needs equal sizes on all ranks: gather the lengths, then the padded texts
    lengths = [int(length) for length in _gather_bytes(channel, b"%16d" % len(raw))]
    rows = _gather_bytes(channel, raw.ljust(max(1, *lengths)))  # an empty tensor cannot be sent
    return [row[:length].decode() for row, length in zip(rows, lengths, strict=True)]


def _gather_bytes(channel: Channel, raw: bytes) -> list[bytes]:
    mine: Tensor = torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(channel.device)
    return [bytes(row.tolist()) for row in channel.all_gather(mine, TAG).wait().cpu()]
