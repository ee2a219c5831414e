"""A worker's ballot on one bucket of parameters, and how ballots travel and become Delta.

A ballot has a header and two planes of bits: c > 0 and c != 0. The header is two int64 words and a
byte for each parameter. The first word holds flags and the number of zeros. The second word holds
hashes of what must be equal on all workers: of the hyperparameters in its upper half, of the
parameters in its lower. Every worker sees all headers, so all of them decide the same.

`comm.exchange` describes the two routes; the cheaper one in bytes is taken for each bucket. With N
parameters, n workers and D bits a parameter in the result (`vote`):

=========  ==============================================================  =======================
route      what travels                                                    a worker sends
=========  ==============================================================  =======================
gather     every ballot to every worker; each counts all of it             N (n - 1) / 8
two-phase  shard i of every ballot to worker i, which counts it and sends  N (1 + D) (n - 1) / 8 n
           the result to all
=========  ==============================================================  =======================

1. Up: header and the plane c > 0, one bit of each parameter.
2. Up, if some worker has an exact zero (the headers tell how many): the plane c != 0, or a list of
   the zeros' indices while that is shorter. A worker that abstains needs neither.
3. Down: the planes of the result. A majority has a second plane where some sum is zero; it follows
   in a message of its own.

So what follows is known to all from what came before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.exchange import Route, routes
from lightning_commfree.comm.view import View
from lightning_commfree.lion.vote import PackedDelta, Rule, Shard

# Bits of a header's first word, below the number of zeros. A worker wants all to STOP; the STREAM
# of unknown length that it trains on ENDS with this step.
STOP, _ABSTAINS, STREAM_ENDS = 1, 2, 4
_COUNT_FROM = 8
HAS_GRADIENT, NONFINITE = 1, 2  # bits of a parameter's byte in a header
_WORDS_BYTES, DIGEST_BYTES = 16, 8
_DIGEST_BITS = 32  # of parameters; the upper half of a header's second word is of hyperparameters


class Ballot(NamedTuple):
    """One worker's ballot on one bucket, on the channel's device."""

    header: Tensor  # (header_bytes(parameters),), uint8
    plus: Tensor  # (B,), uint8: c > 0, padding 0
    nonzero: Tensor  # (B,), uint8: c != 0, padding 0


class HeaderSummary(NamedTuple):
    """All workers' headers together; the same on all workers."""

    stop: bool  # some worker wants all to stop
    stream_ends: bool  # some worker's stream of unknown length ends with this step
    zeros: int  # the most votes of 0 of a worker that does not abstain
    abstaining: tuple[int, ...]  # workers
    faults: tuple[tuple[int, int], ...]  # worker, parameter of the bucket: NaN or Inf
    with_gradient: tuple[bool, ...]  # per parameter: some worker has a gradient
    parameters_differ: bool
    hyperparameters_differ: bool

    def refuses(self, faults: bool) -> bool:
        """Return whether this vote must change nothing; with `faults`, NaN or Inf is a reason."""
        differ = self.parameters_differ or self.hyperparameters_differ
        return differ or (faults and bool(self.faults))


# -- headers


def header_bytes(parameters: int) -> int:
    """Return the size of a header: two words, then a byte per parameter, in whole words."""
    return _WORDS_BYTES + -(-parameters // 8) * 8


def join_digests(hyperparameters: int, parameters: Tensor | int) -> Tensor | int:
    """Return a header's second word: two hashes; int64 like `parameters`."""
    # the sign bit stays free: torch has no unsigned words
    upper = (hyperparameters % (1 << (_DIGEST_BITS - 1))) << _DIGEST_BITS
    return (parameters & ((1 << _DIGEST_BITS) - 1)) | upper


def write_header(
    out: Tensor, flags: int, zeros: Tensor, abstains: Tensor, digest: Tensor | int, marks: Tensor
) -> None:
    """Fill a header; the host does not wait for the device.

    Args:
        out: uint8, shape (header_bytes(parameters),).
        flags: this worker's: `STOP`, `STREAM_ENDS`, their sum, or 0.
        zeros: int64, no dimension: how many of its votes are 0.
        abstains: bool, no dimension: it leaves the whole bucket to the others.
        digest: as `join_digests` makes it, int64; 0: not compared.
        marks: uint8, shape (parameters,): `HAS_GRADIENT` and `NONFINITE`.
    """
    words = out[:_WORDS_BYTES].view(torch.int64)
    words[0] = flags + abstains * _ABSTAINS + (zeros << _COUNT_FROM)
    words[1] = digest

    out[_WORDS_BYTES:].zero_()
    out[_WORDS_BYTES : _WORDS_BYTES + marks.numel()] = marks


def summarize_headers(headers: Tensor, parameters: int) -> HeaderSummary:
    """Summarize all workers' headers; uint8, shape (workers, bytes)."""
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
    """Return the header's hashes as bytes: uint8, shape (DIGEST_BYTES,)."""
    return header[_WORDS_BYTES - DIGEST_BYTES : _WORDS_BYTES]


def differing(digests: Collection[int]) -> tuple[bool, bool]:
    """Return whether parameters differ, and whether hyperparameters do, by their digests."""
    of_parameters = {digest % (1 << _DIGEST_BITS) for digest in digests}
    of_hyperparameters = {digest >> _DIGEST_BITS for digest in digests}
    return len(of_parameters) > 1, len(of_hyperparameters) > 1


# -- lists of zeros


def zero_indices_bytes(most: int) -> int:
    """Return the size of a list of up to `most` indices."""
    return 4 * most


def zero_indices(nonzero: Tensor, valid: Tensor, most: int) -> Tensor:
    """Return the indices of a worker's zeros.

    Args:
        nonzero: this worker's plane, uint8, shape (B,).
        valid: the bits that are no padding, uint8, shape (B,).
        most: length of the list, the same on all workers. A worker with more zeros abstains: its
            list is cut off, and no worker reads it.

    Returns:
        int32, shape (most,): bit b of byte i has the index i + b B; -1 fills up.
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
    """Return the plane of c != 0 that `zero_indices` has made a list of: uint8, shape (B,)."""
    num_bytes = valid.numel()
    known = indices[indices >= 0].long()
    flags = (1 << known // num_bytes).to(torch.uint8)

    # indices differ, so the bits of one byte add up as they would be or-ed
    zero = torch.zeros_like(valid).index_put_((known % num_bytes,), flags, accumulate=True)
    return valid ^ zero


# -- exchanges

UP_TAG = "vote_up"
DOWN_TAG = "vote_down"
NODE_TAG = "vote_node"

_FLAG_BYTES = 8


class VoteResult(NamedTuple):
    """The result of a vote on one bucket."""

    summary: HeaderSummary
    delta: PackedDelta | None  # None: the bucket is refused


class BucketExchange(Protocol):
    """How ballots on one bucket are exchanged: between workers, or also within a node."""

    @property
    def bytes_by_tag(self) -> Counter[str]:
        """Bytes that this worker sends to others for a bucket without zeros, as formulas say."""

    def run(self, ballot: Ballot, refuse_faults: bool) -> VoteResult:
        """Exchange ballots and count them; blocks.

        The vote ends without a result after the first message if the workers' parameters or
        hyperparameters differ or, with `refuse_faults`, if some worker has NaN or Inf.
        """


def cheaper_ballot_exchange(
    view: View, plane_bytes: int, parameters: int, valid: Tensor, rule: Rule
) -> BallotExchange:
    """Return the exchange on the route that sends fewer bytes; arguments as `BallotExchange`."""
    both = [BallotExchange(route, plane_bytes, parameters, valid, rule) for route in routes(view)]
    return min(both, key=lambda exchange: exchange.bytes_by_tag.total())


class BallotExchange:
    """The exchange of ballots on buckets of one size, in one view.

    Args:
        route: between the workers.
        plane_bytes: of a ballot's plane: a multiple of 8 times the workers, so that shards are
            whole words.
        parameters: tensors in the bucket.
        valid: uint8, shape (plane_bytes,): the bits that are no padding.
        rule: makes Delta of the votes.
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
        """Bytes that this worker sends; a majority's second plane counts where ties can be."""
        sent = Counter(
            {UP_TAG: self._route.bytes_up(header_bytes(self._parameters) + self._shard_bytes)}
        )
        if self._route.two_phase:
            planes = self._rule.expected_planes(self._route.view.size)
            sent[DOWN_TAG] = self._route.bytes_down(_FLAG_BYTES + planes * self._shard_bytes)
        return sent

    def run(self, ballot: Ballot, refuse_faults: bool) -> VoteResult:
        """Send the ballot up, count this worker's shard, and send the result down."""
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
        """Exchange the zeros, at most `most` a worker; return planes of c != 0, uint8, (W, B)."""
        shards, channel = self._route.num_shards, self._route.view.channel
        if zero_indices_bytes(most) >= self._shard_bytes:
            return self._route.up(ballot.nonzero.view(shards, -1), UP_TAG).wait()

        # a list has indices of all shards: it goes to all workers
        mine = zero_indices(ballot.nonzero, self._valid, most)
        lists = channel.all_gather(mine, UP_TAG).wait()
        whole_WB = torch.stack([nonzero_plane(indices, self._valid) for indices in lists])
        return whole_WB.view(len(whole_WB), shards, -1)[:, self._route.shard]

    def _count(self, plus_WB: Tensor, nonzero_WB: Tensor | None, summary: HeaderSummary) -> Shard:
        """Count the ballots of the workers that do not abstain."""
        if summary.abstaining:
            if nonzero_WB is None:
                nonzero_WB = self._valid_here.repeat(len(plus_WB), 1)
            for worker in summary.abstaining:
                plus_WB[worker] = 0
                nonzero_WB[worker] = 0

        nonzero = None if nonzero_WB is None else _words(nonzero_WB)
        valid = _words(self._valid_here)
        return self._rule.count(_words(plus_WB), nonzero, valid, self._route.shard)

    def _send_back(self, shard: Shard) -> Tensor:
        """Return the planes of the whole bucket, int64, (D, B)."""
        flag = torch.tensor([shard.rest is not None], dtype=torch.int64)
        message = torch.cat([flag.to(shard.planes.device), shard.planes.flatten()])
        received = self._route.down(message, DOWN_TAG).wait()
        planes_SDB = received[:, 1:].view(len(received), *shard.planes.shape)
        planes = planes_SDB.transpose(0, 1).reshape(len(shard.planes), -1)

        if not received[:, 0].any():
            return planes
        rest = torch.zeros_like(shard.planes[0]) if shard.rest is None else shard.rest
        return torch.cat([planes, self._route.down(rest, DOWN_TAG).wait().view(1, -1)])


def _words(planes: Tensor) -> Tensor:
    return planes.contiguous().view(torch.int64)


class NodeBallotExchange:
    """The exchange where the ranks of a node hold one ballot: each carries its part of it.

    Args:
        inner: between the ranks of all nodes that carry the same part.
        node: between the ranks of this node.
        rule: makes Delta of the votes.
        workers: number of nodes.
    """

    def __init__(self, inner: BallotExchange, node: Channel, rule: Rule, workers: int) -> None:
        self._inner, self._node, self._rule, self._workers = inner, node, rule, workers

    @property
    def bytes_by_tag(self) -> Counter[str]:
        """Bytes that this rank sends to other nodes."""
        return self._inner.bytes_by_tag

    def run(self, ballot: Ballot, refuse_faults: bool) -> VoteResult:
        """Exchange this rank's part with the other nodes, and the results within the node."""
        size, rank = self._node.size, self._node.rank
        parts = (plane.view(size, -1)[rank] for plane in (ballot.plus, ballot.nonzero))
        part = Ballot(ballot.header, *parts)
        summary, delta = self._inner.run(part, refuse_faults)

        # as many planes as there can be: a number that all ranks of the node know
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
        """Combine the summaries of all ranks of the node; return their planes, a row for each."""
        differ = summary.parameters_differ, summary.hyperparameters_differ
        seen = [summary.stop, summary.stream_ends, *differ, refused]
        flags = pad(torch.tensor(seen, dtype=torch.uint8), (0, _FLAG_BYTES - len(seen)))
        message = torch.cat([flags, digest_of(header), planes.flatten()])
        gathered = self._node.all_gather(message.to(self._node.device), NODE_TAG).wait().cpu()

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
