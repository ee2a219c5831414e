"""Exchange the workers' ballots on one bucket of parameters, and compute Delta from them.

A ballot has a header and two bit planes: c > 0 and c != 0. The header is two int64 words and one
byte per parameter. The first word contains flags and the number of zeros. The second word contains
hashes of values that must be equal on all workers: hyperparameters in its upper half, parameters in
its lower half. Every worker sees all headers, so all of them decide the same.

`comm.exchange` describes the two routes; each bucket takes the one that sends fewer bytes. With N
parameters, n workers and D bits per parameter in the result (`vote`):

=========  ==============================================================  =======================
route      what travels                                                    a worker sends
=========  ==============================================================  =======================
gather     every ballot to every worker; each counts all of it             N (n - 1) / 8
two-phase  shard i of every ballot to worker i, which counts it and sends  N (1 + D) (n - 1) / 8 n
           the result to all
=========  ==============================================================  =======================

1. Up: the header and the plane c > 0, one bit per parameter.
2. Up, if some worker has an exact zero (the headers contain the numbers of zeros): the plane
   c != 0, or a list of the zeros' indices if that is shorter. A worker that abstains needs neither.
3. Down: the planes of the result. A majority has a second plane if some sum is zero, sent as
   another message.

All workers can tell from earlier messages whether an optional one follows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.exchange import Route, View, routes
from lightning_commfree.lion.vote import PackedDelta, Rule, Shard

# Flags in a header's first word, below the number of zeros. STOP: the worker wants all workers to
# stop. STREAM_ENDS: its data stream, of unknown length, ends with this step.
STOP, _ABSTAINS, STREAM_ENDS = 1, 2, 4
_COUNT_FROM = 8
HAS_GRADIENT, NONFINITE = 1, 2  # bits of a parameter's byte in a header
_WORDS_BYTES, DIGEST_BYTES = 16, 8
_DIGEST_BITS = 32  # of the parameters' hash; the hyperparameters' hash is above it


class Ballot(NamedTuple):
    """One worker's ballot on one bucket, on the channel's device."""

    header: Tensor  # (header_bytes(parameters),), uint8
    plus: Tensor  # (B,), uint8: c > 0, padding 0
    nonzero: Tensor  # (B,), uint8: c != 0, padding 0


class HeaderSummary(NamedTuple):
    """Combined headers of all workers; the same on all of them."""

    stop: bool  # any worker wants all to stop
    stream_ends: bool  # any worker's data stream ends with this step
    zeros: int  # maximum number of zero votes of a worker that does not abstain
    abstaining: tuple[int, ...]  # indices of workers
    faults: tuple[tuple[int, int], ...]  # (worker, parameter) pairs with NaN or Inf
    with_gradient: tuple[bool, ...]  # per parameter: any worker has a gradient
    parameters_differ: bool
    hyperparameters_differ: bool

    def refuses(self, faults: bool) -> bool:
        """Return whether the step must be refused; with `faults`, NaN or Inf is a reason."""
        differ = self.parameters_differ or self.hyperparameters_differ
        return differ or (faults and bool(self.faults))


# -- headers


def header_bytes(parameters: int) -> int:
    """Return the size of a header: two words and a byte per parameter, padded to whole words."""
    return _WORDS_BYTES + -(-parameters // 8) * 8


def join_digests(hyperparameters: int, parameters: Tensor | int) -> Tensor | int:
    """Pack two hashes into a header's second word; int64 like `parameters`."""
    # keep the sign bit clear: torch has no unsigned int64
    upper = (hyperparameters % (1 << (_DIGEST_BITS - 1))) << _DIGEST_BITS
    return (parameters & ((1 << _DIGEST_BITS) - 1)) | upper


def write_header(
    out: Tensor, flags: int, zeros: Tensor, abstains: Tensor, digest: Tensor | int, marks: Tensor
) -> None:
    """Write a header; the host does not wait for the device.

    Args:
        out: uint8, shape (header_bytes(parameters),).
        flags: `STOP`, `STREAM_ENDS`, their sum, or 0.
        zeros: int64, 0-d: number of zero votes.
        abstains: bool, 0-d: the worker abstains on this bucket.
        digest: int64, result of `join_digests`; 0: not compared.
        marks: uint8, shape (parameters,): `HAS_GRADIENT` and `NONFINITE`.
    """
    words = out[:_WORDS_BYTES].view(torch.int64)
    words[0] = flags + abstains * _ABSTAINS + (zeros << _COUNT_FROM)
    words[1] = digest

    out[_WORDS_BYTES:].zero_()
    out[_WORDS_BYTES : _WORDS_BYTES + marks.numel()] = marks


def summarize_headers(headers: Tensor, parameters: int) -> HeaderSummary:
    """Combine all workers' headers; uint8, shape (workers, bytes)."""
    words = [[int(w) for w in row[:_WORDS_BYTES].view(torch.int64)] for row in headers]
    marks = headers[:, _WORDS_BYTES : _WORDS_BYTES + parameters]

    abstaining = tuple(w for w, (flags, _) in enumerate(words) if flags & _ABSTAINS)
    parameters_differ, hyperparameters_differ = differing([digest for _, digest in words])

    return HeaderSummary(
        stop=any(flags & STOP for flags, _ in words),
        stream_ends=any(flags & STREAM_ENDS for flags, _ in words),
        zeros=max([flags >> _COUNT_FROM for flags, _ in words if not flags & _ABSTAINS] or [0]),
        abstaining=abstaining,
        faults=tuple((int(w), int(p)) for w, p in (marks & NONFINITE).nonzero()),
        with_gradient=tuple((marks & HAS_GRADIENT).bool().any(0).tolist()),
        parameters_differ=parameters_differ,
        hyperparameters_differ=hyperparameters_differ,
    )


def digest_of(header: Tensor) -> Tensor:
    """Return a header's hashes as bytes: uint8, shape (DIGEST_BYTES,)."""
    return header[_WORDS_BYTES - DIGEST_BYTES : _WORDS_BYTES]


def differing(digests: Collection[int]) -> tuple[bool, bool]:
    """Return (whether parameters differ, whether hyperparameters differ), from digests."""
    of_parameters = {digest % (1 << _DIGEST_BITS) for digest in digests}
    of_hyperparameters = {digest >> _DIGEST_BITS for digest in digests}
    return len(of_parameters) > 1, len(of_hyperparameters) > 1


# -- lists of zeros


def zero_indices(nonzero: Tensor, valid: Tensor, most: int) -> Tensor:
    """Return the indices of a worker's zero votes.

    Args:
        nonzero: this worker's plane, uint8, shape (B,).
        valid: bits that are not padding, uint8, shape (B,).
        most: length of the list, the same on all workers. A worker with more zeros abstains: its
            list is truncated, and no worker reads it.

    Returns:
        int32, shape (most,): bit b of byte i has the index i + b B; padded with -1.
    """
    zero = nonzero ^ valid
    (touched,) = zero.nonzero(as_tuple=True)
    bits = (zero[touched].unsqueeze(1) >> torch.arange(8, device=zero.device)) & 1
    row, bit = bits.nonzero(as_tuple=True)

    found = (touched[row] + valid.numel() * bit)[:most]
    padded = torch.full((most,), -1, dtype=torch.int32, device=zero.device)
    padded[: found.numel()] = found
    return padded


def nonzero_plane(indices: Tensor, valid: Tensor) -> Tensor:
    """Return the plane c != 0, uint8, shape (B,), from the list made by `zero_indices`."""
    num_bytes = valid.numel()
    known = indices[indices >= 0].long()
    flags = (1 << known // num_bytes).to(torch.uint8)

    # indices are distinct, so adding the bits of a byte is OR-ing them
    zero = torch.zeros_like(valid).index_put_((known % num_bytes,), flags, accumulate=True)
    return valid ^ zero


# -- exchanges

UP_TAG = "vote_up"
DOWN_TAG = "vote_down"
NODE_TAG = "vote_node"

_FLAG_BYTES = 8


class VoteResult(NamedTuple):
    """Result of the vote on one bucket."""

    summary: HeaderSummary
    delta: PackedDelta | None  # None: the step is refused


def cheaper_ballot_exchange(
    view: View, plane_bytes: int, parameters: int, valid: Tensor, rule: Rule
) -> BallotExchange:
    """Return the exchange on the route that sends fewer bytes; arguments as in `BallotExchange`."""
    both = [BallotExchange(route, plane_bytes, parameters, valid, rule) for route in routes(view)]
    return min(both, key=lambda exchange: exchange.bytes_by_tag.total())


class BallotExchange:
    """Exchange of ballots on a bucket between the members of one view.

    Args:
        route: route between the workers.
        plane_bytes: size of a plane, a multiple of 8 times the number of workers: shards are whole
            words.
        parameters: number of tensors in the bucket.
        valid: uint8, shape (plane_bytes,): bits that are not padding.
        rule: turns votes into Delta.
    """

    def __init__(
        self, route: Route, plane_bytes: int, parameters: int, valid: Tensor, rule: Rule
    ) -> None:
        assert plane_bytes % (8 * route.num_shards) == 0, "shards are whole words"
        self._route, self._parameters, self._rule = route, parameters, rule
        self._shard_bytes = plane_bytes // route.num_shards
        self._valid = valid
        self._valid_here = valid.view(route.num_shards, -1)[route.shard]

    @property
    def bytes_by_tag(self) -> Counter[str]:
        """Bytes that this worker sends per step by tag, with a second plane for ties."""
        sent = Counter(
            {UP_TAG: self._route.bytes_up(header_bytes(self._parameters) + self._shard_bytes)}
        )
        if self._route.two_phase:
            planes = self._rule.expected_planes(self._route.view.size)
            sent[DOWN_TAG] = self._route.bytes_down(_FLAG_BYTES + planes * self._shard_bytes)
        return sent

    def run(self, ballot: Ballot, refuse_faults: bool) -> VoteResult:
        """Exchange and count ballots, this worker its own shard; blocks.

        There is no result if the workers' parameters or hyperparameters differ or, with
        `refuse_faults`, if any worker has NaN or Inf.
        """
        shards = self._route.num_shards
        headers = ballot.header.expand(shards, -1)
        messages = torch.cat([headers, ballot.plus.view(shards, -1)], dim=1)
        received = self._route.up(messages, UP_TAG).wait()

        head = ballot.header.numel()
        summary = summarize_headers(received[:, :head].cpu(), self._parameters)
        if summary.refuses(refuse_faults):
            return VoteResult(summary, None)

        nonzero_WB = self._nonzero_planes(ballot, summary.zeros) if summary.zeros else None
        shard = self._count(received[:, head:], nonzero_WB, summary)
        planes = self._send_back(shard)

        weights = shard.weights if len(planes) == len(shard.weights) else (*shard.weights, 1)
        offset = self._rule.offset(self._route.view.size)
        packed = planes.contiguous().view(torch.uint8)
        return VoteResult(summary, PackedDelta(packed, weights, offset))

    def _nonzero_planes(self, ballot: Ballot, most: int) -> Tensor:
        """Exchange up to `most` zeros per worker; return planes of c != 0, uint8, shape (W, B)."""
        shards, channel = self._route.num_shards, self._route.view.channel
        if 4 * most >= self._shard_bytes:  # a list of int32 would be longer than the plane
            return self._route.up(ballot.nonzero.view(shards, -1), UP_TAG).wait()

        # a list contains indices of all shards, so every worker needs it
        mine = zero_indices(ballot.nonzero, self._valid, most)
        lists = channel.all_gather(mine, UP_TAG).wait()
        whole_WB = torch.stack([nonzero_plane(indices, self._valid) for indices in lists])
        return whole_WB.view(len(whole_WB), shards, -1)[:, self._route.shard]

    def _count(self, plus_WB: Tensor, nonzero_WB: Tensor | None, summary: HeaderSummary) -> Shard:
        """Count the ballots of the workers that do not abstain."""
        if summary.abstaining:  # such a ballot may contain anything: it becomes all zeros
            if nonzero_WB is None:
                nonzero_WB = self._valid_here.repeat(len(plus_WB), 1)
            for worker in summary.abstaining:
                plus_WB[worker] = 0
                nonzero_WB[worker] = 0

        nonzero = None if nonzero_WB is None else _words(nonzero_WB)
        valid = _words(self._valid_here)
        return self._rule.count(_words(plus_WB), nonzero, valid, self._route.shard)

    def _send_back(self, shard: Shard) -> Tensor:
        """Exchange the counted shards; return the planes of the full bucket: int64, (D, B)."""
        flag = torch.tensor([shard.rest is not None], dtype=torch.int64)
        message = torch.cat([flag.to(shard.planes.device), shard.planes.flatten()])
        received = self._route.down(message, DOWN_TAG).wait()
        planes_SDB = received[:, 1:].view(len(received), *shard.planes.shape)
        planes = planes_SDB.transpose(0, 1).reshape(len(shard.planes), -1)

        # all workers read the same flags, so all of them or none exchange the second plane
        if not received[:, 0].any():
            return planes
        rest = torch.zeros_like(shard.planes[0]) if shard.rest is None else shard.rest
        return torch.cat([planes, self._route.down(rest, DOWN_TAG).wait().view(1, -1)])


def _words(planes: Tensor) -> Tensor:
    return planes.contiguous().view(torch.int64)


class NodeBallotExchange:
    """Ballot exchange between nodes: all ranks of a node hold one ballot, and each sends a slice.

    `inner` exchanges one slice between the corresponding ranks of all nodes.
    """

    def __init__(self, inner: BallotExchange, node: Channel, rule: Rule, workers: int) -> None:
        self._inner, self._node, self._rule, self._workers = inner, node, rule, workers

    @property
    def bytes_by_tag(self) -> Counter[str]:
        """Bytes that this rank sends to other nodes."""
        return self._inner.bytes_by_tag

    def run(self, ballot: Ballot, refuse_faults: bool) -> VoteResult:
        """Exchange this rank's slice with the other nodes, then the results within the node."""
        size, rank = self._node.size, self._node.rank
        parts = (plane.view(size, -1)[rank] for plane in (ballot.plus, ballot.nonzero))
        part = Ballot(ballot.header, *parts)
        summary, delta = self._inner.run(part, refuse_faults)

        # the maximum number of planes, which is the same on all ranks of the node
        weights = self._rule.weights(self._workers, bool(summary.zeros or summary.abstaining))
        part_bytes = ballot.plus.numel() // size
        planes = torch.zeros(len(weights), part_bytes, dtype=torch.uint8)
        if delta is not None:
            planes[: len(delta.planes)] = delta.planes

        summary, refused, planes = self._share(summary, delta is None, ballot.header, planes)
        if refused or summary.refuses(faults=False):
            return VoteResult(summary, None)
        planes = planes.reshape(size, len(weights), part_bytes).transpose(0, 1)
        whole = planes.reshape(len(weights), -1)
        return VoteResult(summary, PackedDelta(whole, weights, self._rule.offset(self._workers)))

    def _share(
        self, summary: HeaderSummary, refused: bool, header: Tensor, planes: Tensor
    ) -> tuple[HeaderSummary, bool, Tensor]:
        """Combine the summaries of all ranks of the node; return their planes, one row per rank."""
        differ = summary.parameters_differ, summary.hyperparameters_differ
        seen = [summary.stop, summary.stream_ends, *differ, refused]
        flags = pad(torch.tensor(seen, dtype=torch.uint8), (0, _FLAG_BYTES - len(seen)))
        message = torch.cat([flags, digest_of(header), planes.flatten()])
        gathered = self._node.all_gather(message.to(self._node.device), NODE_TAG).wait().cpu()

        # a rank may have met a refusal that the others have not: the node must act as one worker
        sizes = [_FLAG_BYTES, DIGEST_BYTES, planes.numel()]
        flags, digests, planes = torch.split(gathered, sizes, dim=1)
        stop, stream_ends, parameters, hyperparameters, refused = (
            flags[:, : len(seen)].bool().any(0).tolist()
        )
        within = differing(digests.contiguous().view(torch.int64).flatten().tolist())
        shared = summary._replace(
            stop=stop,
            stream_ends=stream_ends,
            parameters_differ=parameters or within[0],
            hyperparameters_differ=hyperparameters or within[1],
        )
        return shared, refused, planes
