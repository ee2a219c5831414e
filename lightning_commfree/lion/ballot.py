"""What a worker sends up of one bucket: a header, then its votes as bits.

The header is two words and a byte for each parameter. The first word holds flags and the number of
zeros. The second word holds hashes of what must be equal on all workers: of the hyperparameters in
its upper half, of the parameters in its lower. Every worker sees all headers, so all of them decide
alike.

A vote is two bits in two planes, c > 0 and c != 0. The second plane travels only where there are
zeros. While they are few, a list of their indices takes its place.

How ballots travel and the result of the vote comes back.

N parameters, n workers, D bits a parameter in the result (`vote`):

=========  ==================================================================  =================
way        what travels                                                        a worker sends
=========  ==================================================================  =================
gather     every worker's ballot to every other one; all count all of it       N (n - 1) / 8
by shards  each worker gets one shard of all ballots, counts it, and sends     N (1 + D)
           the result on it to all                                             (n - 1) / (8 n)
=========  ==================================================================  =================

The cheaper one in bytes is taken, headers and padding included. A ballot is one bit of each
parameter, c > 0. If some worker has an exact zero, a second message says where the zeros are: a
plane, c != 0, or a list of indices while that is shorter. If some sum is zero, the majority's
result has a second plane. What came before says that they follow, so every worker knows alike. A
worker that abstains needs no second plane: the header says it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.ledger import all_gather_bytes, all_to_all_bytes
from lightning_commfree.lion.vote import PackedDelta, Rule, Shard

# Bits of a header's first word, below the number of zeros. A worker wants all to STOP; the STREAM
# of unknown length that it trains on ENDS with this step.
STOP, _ABSTAINS, STREAM_ENDS = 1, 2, 4
_COUNT_FROM = 8
HAS_GRADIENT, NONFINITE = 1, 2  # bits of a parameter's byte in a header
_WORDS_BYTES, DIGEST_BYTES = 16, 8
_DIGEST_BITS = 32  # of parameters; the upper half of a header's second word is of hyperparameters


class Ballot(NamedTuple):
    """What one worker votes on the parameters of one bucket; on the channel's device."""

    header: Tensor  # (header_bytes(parameters),), uint8
    plus: Tensor  # (B,), uint8: c > 0, padding 0
    nonzero: Tensor  # (B,), uint8: c != 0, padding 0


class HeaderSummary(NamedTuple):
    """What all headers say together; the same on all workers."""

    stop: bool  # somebody wants all to stop
    stream_ends: bool  # somebody's stream of unknown length ends with this step
    zeros: int  # the most votes of 0 of a worker that does not abstain
    abstaining: tuple[int, ...]  # workers
    faults: tuple[tuple[int, int], ...]  # worker, parameter of the bucket: NaN or Inf
    with_gradient: tuple[bool, ...]  # per parameter: some worker has a gradient
    parameters_differ: bool
    hyperparameters_differ: bool

    def refuses(self, faults: bool) -> bool:
        """Return whether nothing may be done by this vote; `faults`: nor where there are some."""
        differ = self.parameters_differ or self.hyperparameters_differ
        return differ or (faults and bool(self.faults))


# -- the header


def header_bytes(parameters: int) -> int:
    """Return the size of a header: two words, then a byte per parameter, in whole words."""
    return _WORDS_BYTES + -(-parameters // 8) * 8


def join_digests(hyperparameters: int, parameters: Tensor | int) -> Tensor | int:
    """Return a header's word of what must be equal on all workers; int64 like `parameters`."""
    # the sign bit stays free: torch has no unsigned words
    upper = (hyperparameters % (1 << (_DIGEST_BITS - 1))) << _DIGEST_BITS
    return (parameters & ((1 << _DIGEST_BITS) - 1)) | upper


def write_header(
    out: Tensor, flags: int, zeros: Tensor, abstains: Tensor, digest: Tensor | int, marks: Tensor
) -> None:
    """Fill a header without reading anything back from its device.

    Args:
        out: uint8, shape (header_bytes(parameters),).
        flags: what this worker says for itself: `STOP`, `STREAM_ENDS`, their sum, or 0.
        zeros: int64, no dimension: how many of its votes are 0.
        abstains: bool, no dimension: it leaves the whole bucket to the others.
        digest: as `join_digests` makes it, int64; 0: not asked for.
        marks: uint8, shape (parameters,): `HAS_GRADIENT` and `NONFINITE`.
    """
    words = out[:_WORDS_BYTES].view(torch.int64)
    words[0] = flags + abstains * _ABSTAINS + (zeros << _COUNT_FROM)
    words[1] = digest

    out[_WORDS_BYTES:].zero_()
    out[_WORDS_BYTES : _WORDS_BYTES + marks.numel()] = marks


def summarize_headers(headers: Tensor, parameters: int) -> HeaderSummary:
    """Put all workers' headers together; uint8, shape (workers, bytes)."""
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
    """Return the bytes of what must be equal on all workers: uint8, shape (DIGEST_BYTES,)."""
    return header[_WORDS_BYTES - DIGEST_BYTES : _WORDS_BYTES]


def differing(digests: Collection[int]) -> tuple[bool, bool]:
    """Return whether parameters differ, and whether hyperparameters do, by their digests."""
    of_parameters = {digest % (1 << _DIGEST_BITS) for digest in digests}
    of_hyperparameters = {digest >> _DIGEST_BITS for digest in digests}
    return len(of_parameters) > 1, len(of_hyperparameters) > 1


# -- the zeros as a list


def zero_indices_bytes(most: int) -> int:
    """Return the size of a list of up to `most` indices."""
    return 4 * most


def zero_indices(nonzero: Tensor, valid: Tensor, most: int) -> Tensor:
    """Return the indices of a worker's zeros.

    Args:
        nonzero: this worker's plane, uint8, shape (B,).
        valid: the bits that are no padding, uint8, shape (B,).
        most: length of the list, the same on all workers. The list of a worker with more zeros is
            cut off: that worker abstains, and nobody reads its list.

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


UP_TAG = "vote_up"
DOWN_TAG = "vote_down"
NODE_TAG = "vote_node"

_FLAG_BYTES = 8


class VoteResult(NamedTuple):
    """The outcome for one bucket."""

    summary: HeaderSummary
    delta: PackedDelta | None  # None: the bucket is refused


class BallotExchange(Protocol):
    """A way for buckets of one size; `run` belongs into a background thread."""

    @property
    def bytes_by_tag(self) -> Counter[str]:
        """Bytes that this worker sends for a bucket without zeros, by the ledger's formulas."""

    def run(self, ballot: Ballot, rule: Rule, parameters: int, refuse_faults: bool) -> VoteResult:
        """Exchange a bucket; blocks.

        It is refused after the first message where the workers' parameters or hyperparameters
        differ and, with `refuse_faults`, where some worker has NaN or Inf.
        """


def cheaper_ballot_exchange(
    channel: Channel, plane_bytes: int, parameters: int, valid: Tensor, rule: Rule
) -> BallotExchange:
    """Return the way that sends fewer bytes for buckets of this size.

    Args:
        channel: to the other workers.
        plane_bytes: of a ballot's plane, a multiple of 8 times the workers.
        parameters: tensors in the bucket.
        valid: uint8, shape (plane_bytes,): the bits that are no padding.
        rule: what it is for.
    """
    ways: list[BallotExchange] = [
        GatheredBallotExchange(channel, plane_bytes, parameters, valid),
        ShardedBallotExchange(channel, plane_bytes, parameters, valid, rule),
    ]
    return min(ways, key=lambda way: way.bytes_by_tag.total())


class GatheredBallotExchange:
    """Every worker counts all ballots."""

    def __init__(self, channel: Channel, plane_bytes: int, parameters: int, valid: Tensor) -> None:
        self._channel, self._valid = channel, valid
        self._message_bytes = header_bytes(parameters) + plane_bytes

    @property
    def bytes_by_tag(self) -> Counter[str]:
        """See `BallotExchange`."""
        return Counter({UP_TAG: all_gather_bytes(self._message_bytes, self._channel.size)})

    def run(self, ballot: Ballot, rule: Rule, parameters: int, refuse_faults: bool) -> VoteResult:
        """See `BallotExchange`."""
        message = torch.cat([ballot.header, ballot.plus])
        received = self._channel.all_gather(message, UP_TAG).wait()
        summary, plus_WB = _open(received, ballot, parameters)
        if summary.refuses(refuse_faults):
            return VoteResult(summary, None)

        nonzero_WB = None
        if summary.zeros and zero_indices_bytes(summary.zeros) < ballot.nonzero.numel():
            nonzero_WB = _gather_zeros(self._channel, ballot, self._valid, summary.zeros)
        elif summary.zeros:
            nonzero_WB = self._channel.all_gather(ballot.nonzero, UP_TAG).wait()

        shard = _count(plus_WB, nonzero_WB, summary, self._valid, rule, shard=0)
        planes = shard.planes
        if shard.rest is not None:
            planes = torch.cat([planes, shard.rest.unsqueeze(0)])
        return VoteResult(summary, _packed(planes, shard.weights, rule.offset(self._channel.size)))


class ShardedBallotExchange:
    """Every worker counts one shard for all."""

    def __init__(
        self, channel: Channel, plane_bytes: int, parameters: int, valid: Tensor, rule: Rule
    ) -> None:
        size = channel.size
        assert plane_bytes % (8 * size) == 0, "shards are whole words"
        self._channel = channel
        self._shard_bytes = plane_bytes // size
        self._valid_everywhere = valid
        self._valid = valid.view(size, -1)[channel.rank]
        self._up_bytes = size * (header_bytes(parameters) + self._shard_bytes)
        self._down_planes = rule.expected_planes(size)

    @property
    def bytes_by_tag(self) -> Counter[str]:
        """See `BallotExchange`; ties count where they can be."""
        size = self._channel.size
        down_bytes = _FLAG_BYTES + self._down_planes * self._shard_bytes
        up, down = all_to_all_bytes(self._up_bytes, size), all_gather_bytes(down_bytes, size)
        return Counter({UP_TAG: up, DOWN_TAG: down})

    def run(self, ballot: Ballot, rule: Rule, parameters: int, refuse_faults: bool) -> VoteResult:
        """See `BallotExchange`."""
        size, rank = self._channel.size, self._channel.rank
        headers = ballot.header.expand(size, -1)
        messages = torch.cat([headers, ballot.plus.view(size, -1)], dim=1)
        received = self._channel.all_to_all(messages, UP_TAG).wait()
        summary, plus_WB = _open(received, ballot, parameters)
        if summary.refuses(refuse_faults):
            return VoteResult(summary, None)

        nonzero_WB = None
        if summary.zeros and zero_indices_bytes(summary.zeros) < self._shard_bytes:
            whole_WB = _gather_zeros(self._channel, ballot, self._valid_everywhere, summary.zeros)
            nonzero_WB = whole_WB.view(size, size, -1)[:, rank]
        elif summary.zeros:
            nonzero_WB = self._channel.all_to_all(ballot.nonzero.view(size, -1), UP_TAG).wait()

        shard = _count(plus_WB, nonzero_WB, summary, self._valid, rule, rank)
        planes = self._send_back(shard)
        return VoteResult(summary, _packed(planes, shard.weights, rule.offset(size)))

    def _send_back(self, shard: Shard) -> Tensor:
        """Return the planes of all shards, int64, (D, B)."""
        flag = torch.tensor([shard.rest is not None], dtype=torch.int64)
        message = torch.cat([flag.to(shard.planes.device), shard.planes.flatten()])
        received = self._channel.all_gather(message, DOWN_TAG).wait()
        planes = received[:, 1:].view(self._channel.size, *shard.planes.shape).transpose(0, 1)
        planes = planes.reshape(len(shard.planes), -1)

        if not received[:, 0].any():
            return planes
        rest = torch.zeros_like(shard.planes[0]) if shard.rest is None else shard.rest
        return torch.cat([planes, self._channel.all_gather(rest, DOWN_TAG).wait().view(1, -1)])


class NodeBallotExchange:
    """The ranks of a node hold one ballot; each carries its part of it to the other nodes.

    Args:
        inner: the way from this rank to those ranks of the other nodes that carry the same part.
        node: to the other ranks of this node.
        workers: nodes.
    """

    def __init__(self, inner: BallotExchange, node: Channel, workers: int) -> None:
        self._inner, self._node, self._workers = inner, node, workers

    @property
    def bytes_by_tag(self) -> Counter[str]:
        """See `BallotExchange`; without what stays within the node."""
        return self._inner.bytes_by_tag

    def run(self, ballot: Ballot, rule: Rule, parameters: int, refuse_faults: bool) -> VoteResult:
        """See `BallotExchange`."""
        size, rank = self._node.size, self._node.rank
        parts = (plane.view(size, -1)[rank] for plane in (ballot.plus, ballot.nonzero))
        part = Ballot(ballot.header, *parts)
        summary, delta = self._inner.run(part, rule, parameters, refuse_faults)

        # all planes that there can be: the ranks of the node know alike how many these are
        weights = rule.weights(self._workers, bool(summary.zeros or summary.abstaining))
        part_bytes = ballot.plus.numel() // size
        planes = torch.zeros(len(weights), part_bytes, dtype=torch.uint8)
        if delta is not None:
            planes[: len(delta.planes)] = delta.planes

        summary, refused, planes = self._share(summary, delta is None, ballot.header, planes)
        if refused or summary.refuses(faults=False):
            return VoteResult(summary, None)
        planes = planes.reshape(size, len(weights), part_bytes).transpose(0, 1)
        whole = planes.reshape(len(weights), -1)
        return VoteResult(summary, PackedDelta(whole, weights, rule.offset(self._workers)))

    def _share(
        self, summary: HeaderSummary, refused: bool, header: Tensor, planes: Tensor
    ) -> tuple[HeaderSummary, bool, Tensor]:
        """Return what all ranks of the node have learnt, and their planes, a row for each rank."""
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


def _open(received: Tensor, ballot: Ballot, parameters: int) -> tuple[HeaderSummary, Tensor]:
    """Split the first messages of all workers into headers and planes."""
    split = ballot.header.numel()
    return summarize_headers(received[:, :split].cpu(), parameters), received[:, split:]


def _gather_zeros(channel: Channel, ballot: Ballot, valid: Tensor, most: int) -> Tensor:
    """Exchange lists of zeros; return the planes of c != 0 of all workers, uint8, (W, B)."""
    mine = zero_indices(ballot.nonzero, valid, most)
    lists = channel.all_gather(mine, UP_TAG).wait()
    return torch.stack([nonzero_plane(indices, valid) for indices in lists])


def _count(
    plus_WB: Tensor,
    nonzero_WB: Tensor | None,
    summary: HeaderSummary,
    valid_B: Tensor,
    rule: Rule,
    shard: int,
) -> Shard:
    """Count the ballots of those that do not abstain."""
    if summary.abstaining:
        nonzero_WB = valid_B.repeat(len(plus_WB), 1) if nonzero_WB is None else nonzero_WB
        for worker in summary.abstaining:
            plus_WB[worker] = 0
            nonzero_WB[worker] = 0

    nonzero = None if nonzero_WB is None else _words(nonzero_WB)
    return rule.count(_words(plus_WB), nonzero, _words(valid_B), shard)


def _words(planes: Tensor) -> Tensor:
    return planes.contiguous().view(torch.int64)


def _packed(planes_DB: Tensor, weights: tuple[int, ...], offset: int) -> PackedDelta:
    with_rest = weights if len(planes_DB) == len(weights) else (*weights, 1)
    return PackedDelta(planes_DB.contiguous().view(torch.uint8), with_rest, offset)
