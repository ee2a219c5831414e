"""Directions in, Delta out: one bucket through ballot and exchange, and by the formulas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_commfree.comm.exchange import Route, View
from lightning_commfree.comm.requests import STOP
from lightning_commfree.lion.ballot import (
    Ballot,
    BallotExchange,
    VoteHeaders,
    VoteResult,
    header_bytes,
)
from lightning_commfree.lion.buckets import Bucket, split_into_buckets
from lightning_commfree.lion.vote import Average, Majority, Rule
from lightning_commfree.lion.worker import LionParam, cast_ballot
from tests.lion import serial
from tests.lion.threads import ThreadChannel, in_threads
from tests.planes import pack_bits

RULES: dict[str, type] = {"majority": Majority, "average": Average}


class Outcome(NamedTuple):
    """What one worker has at the end of an exchange."""

    summary: VoteHeaders
    delta: Tensor | None  # (N,); None: refused
    sent: dict[str, int]


def bucket_of(sizes: Sequence[int], workers: int) -> Bucket:
    """Return one bucket of parameters of these sizes, in this order."""
    parameters = [(f"p{i}", nn.Parameter(torch.zeros(size))) for i, size in enumerate(sizes)]
    (bucket,) = split_into_buckets(parameters[::-1], workers, min_numel=sum(sizes) + 1)
    return bucket


def valid_of(bucket: Bucket) -> Tensor:
    """Return the plane of the bits that are no padding, by the packing of padded flags."""
    flags = torch.zeros(8 * bucket.plane_bytes, dtype=torch.bool)
    flags[: bucket.numel] = True
    return pack_bits(flags)


def ballot_of(
    bucket: Bucket, gradients: Sequence[Tensor | None], requests: int, digest: int
) -> Ballot:
    """Return the ballot of a worker whose directions are these: b1 is 0, so c is the gradient."""
    members = []
    for parameter, gradient in zip(bucket.parameters, gradients, strict=True):
        own = nn.Parameter(parameter.detach().clone())
        own.grad = gradient
        state = {"momentum": torch.zeros_like(parameter)}
        members.append(
            LionParam(own, state, {"lr": 1.0, "betas": (0.0, 0.99), "weight_decay": 0.0})
        )
    raw = cast_ballot(bucket, members, valid_of(bucket), requests, digest)
    cut = header_bytes(len(bucket.parameters))
    return Ballot(raw[:cut], *raw[cut:].view(2, -1))


def exchange_of(way: str, channel: Any, bucket: Bucket, rule: Rule) -> BallotExchange:
    route = Route(View.of(channel), two_phase=way == "shards")
    bucket_of = bucket.plane_bytes, len(bucket.parameters), valid_of(bucket)
    return BallotExchange(route, *bucket_of, rule)


def play(
    way: str,
    rule: Rule,
    sizes: Sequence[int],
    gradients: Sequence[Sequence[Tensor | None]],
    refuse_faults: bool = False,
    stops: Sequence[int] = (),
    digests: Sequence[int] | None = None,
) -> list[Outcome]:
    """Vote once; `gradients` by worker and parameter. Return what every worker gets to know."""
    bucket = bucket_of(sizes, len(gradients))

    def worker(channel: ThreadChannel) -> Outcome:
        rank = channel.rank
        digest = 0 if digests is None else digests[rank]
        ballot = ballot_of(bucket, gradients[rank], STOP * (rank in stops), digest)
        exchange = exchange_of(way, channel, bucket, rule)
        result = exchange.run(ballot, refuse_faults)
        return Outcome(result.summary, read(result, bucket.numel), dict(channel.sent))

    return in_threads(len(gradients), worker)


def read(result: VoteResult, numel: int) -> Tensor | None:
    """Return Delta of a whole bucket, in two chunks where it is long enough."""
    if result.delta is None:
        return None
    delta, cut = torch.full((numel,), torch.nan), numel // 3
    for chunk, start in ((delta[:cut], 0), (delta[cut:], cut)):
        result.delta.read(start, chunk)
    return delta


def formula(
    vote: str, gradients: Sequence[Sequence[Tensor | None]], sizes: Sequence[int]
) -> Tensor:
    """Return Delta by the formulas: a worker with NaN or Inf, or without a gradient, votes 0."""
    directions = []
    for mine in gradients:
        sick = any(g is not None and not g.isfinite().all() for g in mine)
        directions.append(
            torch.cat(
                [
                    torch.zeros(size) if sick or g is None else g
                    for size, g in zip(sizes, mine, strict=True)
                ]
            )
        )
    return serial.delta(directions, vote)
