"""Exchange the workers' ballots for one bucket of parameters, and compute Delta, the result.

A ballot is a header and two bit planes, c > 0 and c != 0. The header is two int64 words and one
byte per parameter tensor. The first word contains requests and the number of zeros. The second
contains hashes of values that must be the same on all workers: hyperparameters in the upper half,
parameters in the lower half. Every worker receives all headers, so all workers make the same
decision.

Each bucket takes the route from `comm.exchange` that sends fewer bytes. With N parameters, n
workers and D bits per parameter in the result (`vote`):

=========  ==============================================================  =======================
route      messages                                                        bytes from each worker
=========  ==============================================================  =======================
gather     every ballot to every worker, which counts all ballots          N (n - 1) / 8
two-phase  shard i of every ballot to worker i, which counts it and sends  N (1+D) (n - 1) / (8 n)
           the result to all workers
=========  ==============================================================  =======================

Messages go up to the workers that count votes, then down to all workers, in this order:

1. Up: the header and the plane c > 0, one bit per parameter.
2. Up, if any worker has an exact zero (headers contain the number of zeros): the plane c != 0, or a
   list of the indices of zeros if that is shorter. Ballots of workers that abstain are ignored.
3. Down: the planes of the result. If any sum is zero, a majority vote has a second plane, which is
   sent as a separate message.

Earlier messages tell every worker whether each optional message follows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_commfree.comm.background import on_host
from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.exchange import Route, View, routes
from lightning_commfree.comm.requests import union
from lightning_commfree.lion.vote import CountedShard, PackedDelta, Rule

_ZEROS_SHIFT = 8  # in a header's first word, the worker's requests are below the number of zeros
_REQUESTS = (1 << _ZEROS_SHIFT) - 1
HAS_GRADIENT, NONFINITE = 1, 2  # bits of a parameter's byte in a header
_WORDS_BYTES, DIGEST_BYTES = 16, 8
_DIGEST_BITS = 32  # size of the parameters' hash, which is in the lower bits


class Ballot(NamedTuple):
    """One worker's ballot for one bucket, on the channel's device."""

    header: Tensor  # (header_bytes(num_parameters),), uint8
    plus: Tensor  # (B,), uint8: bits of c > 0, padded with 0
    nonzero: Tensor  # (B,), uint8: bits of c != 0, padded with 0


class VoteHeaders(NamedTuple):
    """Summary of all workers' headers; the same on every worker."""

    requests: int  # the union of all workers' requests, as bits of `comm.requests`
    zeros: int  # largest number of zero votes by any worker that does not abstain
    abstaining: tuple[int, ...]  # worker indices
    faults: tuple[tuple[int, int], ...]  # (worker, parameter) pairs with NaN or Inf
    with_gradient: tuple[bool, ...]  # per parameter, whether any worker has a gradient
    parameters_differ: bool
    hyperparameters_differ: bool

    def refuses(self, refuse_faults: bool) -> bool:
        """Return whether workers differ or, if `refuse_faults`, any of them has NaN or Inf."""
        differ = self.parameters_differ or self.hyperparameters_differ
        return differ or (refuse_faults and bool(self.faults))


# -- headers


def header_bytes(num_parameters: int) -> int:
    """Return the size of a ballot's header in bytes, padded to whole words."""
    return _WORDS_BYTES + -(-num_parameters // 8) * 8


def pack_digests(hyperparameters: int, parameters: Tensor | int) -> Tensor | int:
    """Pack the hashes of hyperparameters and parameters into an int64, a header's second word."""
    # keep the sign bit clear: torch has no unsigned int64
    upper = (hyperparameters % (1 << (_DIGEST_BITS - 1))) << _DIGEST_BITS
    return (parameters & ((1 << _DIGEST_BITS) - 1)) | upper


def write_header(
    out: Tensor,  # uint8, shape (header_bytes(num_parameters),)
    requests: int,  # bits of `comm.requests`
    numel: int,  # votes in the ballot
    nonzeros: Sequence[Tensor | int],  # nonzero votes in parts of the ballot: ints or 0-d int64
    digest: Tensor | int,  # int64, from `pack_digests`
) -> None:
    """Write requests, number of zeros and hashes into a header; the host does not wait."""
    words = out[:_WORDS_BYTES].view(torch.int64)
    # a sum that starts from 0 would launch an additional kernel
    nonzero = sum(nonzeros[1:], nonzeros[0]) if nonzeros else 0
    words[0].fill_(((numel << _ZEROS_SHIFT) + requests) - (nonzero << _ZEROS_SHIFT))
    words[1].fill_(digest)


def marks_of(headers: Tensor, num_parameters: int) -> Tensor:
    """Return a view of headers: a uint8 of `HAS_GRADIENT` and `NONFINITE` bits per parameter."""
    return headers[..., _WORDS_BYTES : _WORDS_BYTES + num_parameters]


def read_headers(headers: Tensor, num_parameters: int) -> VoteHeaders:
    """Return the summary of all workers' headers: uint8, shape (workers, bytes), in host memory."""
    words = [[int(w) for w in row[:_WORDS_BYTES].view(torch.int64)] for row in headers]
    marks = marks_of(headers, num_parameters)
    faults = tuple((int(w), int(p)) for w, p in (marks & NONFINITE).nonzero())

    abstaining = tuple(sorted({worker for worker, _ in faults}))
    parameters_differ, hyperparameters_differ = differing([digest for _, digest in words])

    return VoteHeaders(
        requests=union([first & _REQUESTS for first, _ in words]),
        zeros=max(
            [first >> _ZEROS_SHIFT for w, (first, _) in enumerate(words) if w not in abstaining]
            or [0]
        ),
        abstaining=abstaining,
        faults=faults,
        with_gradient=tuple((marks & HAS_GRADIENT).bool().any(0).tolist()),
        parameters_differ=parameters_differ,
        hyperparameters_differ=hyperparameters_differ,
    )


def digest_of(header: Tensor) -> Tensor:
    """Return both hashes in a header as raw bytes: uint8, shape (DIGEST_BYTES,)."""
    return header[_WORDS_BYTES - DIGEST_BYTES : _WORDS_BYTES]


def differing(digests: Collection[int]) -> tuple[bool, bool]:
    """Return whether parameters differ, and hyperparameters, in results of `pack_digests`."""
    of_parameters = {digest % (1 << _DIGEST_BITS) for digest in digests}
    of_hyperparameters = {digest >> _DIGEST_BITS for digest in digests}
    return len(of_parameters) > 1, len(of_hyperparameters) > 1


# -- lists of zeros


def zero_vote_indices(
    nonzero_bits: Tensor,  # uint8, shape (B,): this worker's plane c != 0
    valid_bits: Tensor,  # uint8, shape (B,): bits that are not padding
    length: int,  # the same on all workers
) -> Tensor:
    """Return the indices of a plane's zero votes: int32, cut or padded with -1 to `length`.

    Bit b of byte i has index i + b B.
    """
    zero = nonzero_bits ^ valid_bits
    (touched,) = zero.nonzero(as_tuple=True)
    bits = (zero[touched].unsqueeze(1) >> torch.arange(8, device=zero.device)) & 1
    row, bit = bits.nonzero(as_tuple=True)

    # only a worker that abstains can have more than `length` zeros, and its list is not used
    found = (touched[row] + valid_bits.numel() * bit)[:length]
    padded = torch.full((length,), -1, dtype=torch.int32, device=zero.device)
    padded[: found.numel()] = found
    return padded


def nonzero_plane(zero_indices: Tensor, valid_bits: Tensor) -> Tensor:
    """Rebuild the bit plane of nonzero votes, uint8, shape (B,), from the indices of zeros."""
    num_bytes = valid_bits.numel()
    known = zero_indices[zero_indices >= 0].long()
    flags = (1 << known // num_bytes).to(torch.uint8)

    # indices are distinct, so adding the bits of a byte is the same as OR-ing them
    zero = torch.zeros_like(valid_bits).index_put_((known % num_bytes,), flags, accumulate=True)
    return valid_bits ^ zero


# -- exchanges

UP_TAG = "vote_up"
DOWN_TAG = "vote_down"
NODE_TAG = "vote_node"

_FLAG_BYTES = 8


class VoteResult(NamedTuple):
    """Result of the vote on one bucket."""

    summary: VoteHeaders
    delta: PackedDelta | None  # None if the step was rejected


def cheaper_ballot_exchange(
    view: View, plane_bytes: int, num_parameters: int, valid_bits: Tensor, rule: Rule
) -> BallotExchange:
    """Create the exchange for a bucket's ballots over the route that sends fewer bytes."""
    bucket = plane_bytes, num_parameters, valid_bits
    both = [BallotExchange(route, *bucket, rule) for route in routes(view)]
    return min(both, key=lambda exchange: exchange.bytes_by_tag.total())


class BallotExchange:
    """Exchanges the ballots for one bucket over one route."""

    def __init__(
        self,
        route: Route,
        plane_bytes: int,
        num_parameters: int,  # tensors in the bucket
        valid_bits: Tensor,  # uint8, shape (plane_bytes,): bits that are not padding
        rule: Rule,
    ) -> None:
        assert plane_bytes % (8 * route.num_shards) == 0, "shards are whole words"
        self._route, self._num_parameters, self._rule = route, num_parameters, rule
        self._shard_bytes = plane_bytes // route.num_shards
        self._valid_bits = valid_bits
        self._valid_here = valid_bits.view(route.num_shards, -1)[route.shard]

    @property
    def bytes_by_tag(self) -> Counter[str]:
        """Bytes that this worker sends per vote on the bucket, by tag, if no worker votes zero."""
        sent = Counter(
            {UP_TAG: self._route.bytes_up(header_bytes(self._num_parameters) + self._shard_bytes)}
        )
        if self._route.two_phase:
            planes = self._rule.expected_planes(self._route.view.size)
            sent[DOWN_TAG] = self._route.bytes_down(_FLAG_BYTES + planes * self._shard_bytes)
        return sent

    def run(self, ballot: Ballot, refuse_faults: bool) -> VoteResult:
        """Exchange and count the ballots; block until the result is known; collective.

        With `refuse_faults`, NaN or Inf on any worker rejects the step (`VoteHeaders.refuses`).
        """
        shards = self._route.num_shards
        headers = ballot.header.expand(shards, -1)
        messages = torch.cat([headers, ballot.plus.view(shards, -1)], dim=1)
        received = self._route.up(messages, UP_TAG).wait()

        head = ballot.header.numel()
        summary = read_headers(received[:, :head].cpu(), self._num_parameters)
        if summary.refuses(refuse_faults):
            return VoteResult(summary, None)

        nonzero_WB = self._nonzero_planes(ballot, summary.zeros) if summary.zeros else None
        shard = self._count(received[:, head:], nonzero_WB, summary)
        planes = self._send_back(shard)

        # a majority's second plane, which marks ties, has weight 1
        weights = shard.weights if len(planes) == len(shard.weights) else (*shard.weights, 1)
        offset = self._rule.offset(self._route.view.size)
        packed = planes.contiguous().view(torch.uint8)
        return VoteResult(summary, PackedDelta(packed, weights, offset))

    def _nonzero_planes(self, ballot: Ballot, max_zeros: int) -> Tensor:
        """Exchange zeros; return all workers' planes c != 0, (W, shard bytes); collective."""
        shards, channel = self._route.num_shards, self._route.view.channel
        if 4 * max_zeros >= self._shard_bytes:  # a list of int32 would be longer than the plane
            return self._route.up(ballot.nonzero.view(shards, -1), UP_TAG).wait()

        # a list contains indices of all shards, so every worker needs it
        mine = zero_vote_indices(ballot.nonzero, self._valid_bits, max_zeros)
        lists = channel.all_gather(mine, UP_TAG).wait()
        whole_WB = torch.stack([nonzero_plane(indices, self._valid_bits) for indices in lists])
        return whole_WB.view(len(whole_WB), shards, -1)[:, self._route.shard]

    def _count(
        self, plus_WB: Tensor, nonzero_WB: Tensor | None, summary: VoteHeaders
    ) -> CountedShard:
        """Count the votes in this worker's shard; set those of workers that abstain to 0."""
        if summary.abstaining:  # these ballots were computed from NaN or Inf: count them as zeros
            if nonzero_WB is None:
                nonzero_WB = self._valid_here.repeat(len(plus_WB), 1)
            for worker in summary.abstaining:
                plus_WB[worker] = 0
                nonzero_WB[worker] = 0

        nonzero = None if nonzero_WB is None else _words(nonzero_WB)
        valid = _words(self._valid_here)
        return self._rule.count(_words(plus_WB), nonzero, valid, self._route.shard)

    def _send_back(self, shard: CountedShard) -> Tensor:
        """Exchange counted shards; return the bucket's planes, int64, (D, words); collective."""
        flag = torch.tensor([shard.ties is not None], dtype=torch.int64)
        message = torch.cat([flag.to(shard.planes.device), shard.planes.flatten()])
        received = self._route.down(message, DOWN_TAG).wait()
        planes_SDB = received[:, 1:].view(len(received), *shard.planes.shape)
        planes = planes_SDB.transpose(0, 1).reshape(len(shard.planes), -1)

        # all workers read the same flags, so either all or none of them exchange the second plane
        if not received[:, 0].any():
            return planes
        ties = torch.zeros_like(shard.planes[0]) if shard.ties is None else shard.ties
        return torch.cat([planes, self._route.down(ties, DOWN_TAG).wait().view(1, -1)])


def _words(planes: Tensor) -> Tensor:
    """Return uint8 planes as int64 words of 8 bytes."""
    return planes.contiguous().view(torch.int64)


class NodeBallotExchange:
    """Votes between nodes: all ranks of a node hold one ballot, and each exchanges a slice of it.

    Through `inner`, a rank exchanges its slice with the corresponding ranks of the other nodes.
    """

    def __init__(self, inner: BallotExchange, node: Channel, rule: Rule, num_workers: int) -> None:
        self._inner, self._node, self._rule, self._num_workers = inner, node, rule, num_workers

    @property
    def bytes_by_tag(self) -> Counter[str]:
        """Bytes that this rank sends to other nodes per step, by tag, if no worker votes zero."""
        return self._inner.bytes_by_tag

    def run(self, ballot: Ballot, refuse_faults: bool) -> VoteResult:
        """Vote on this rank's slice with other nodes, then gather the node's slices; collective."""
        size, rank = self._node.size, self._node.rank
        slices = (plane.view(size, -1)[rank] for plane in (ballot.plus, ballot.nonzero))
        summary, delta = self._inner.run(Ballot(ballot.header, *slices), refuse_faults)

        # only some slices may have ties: pad to the largest number of planes, so that sizes agree
        weights = self._rule.weights(self._num_workers, bool(summary.zeros or summary.abstaining))
        slice_bytes = ballot.plus.numel() // size
        planes = torch.zeros(len(weights), slice_bytes, dtype=torch.uint8)
        if delta is not None:
            planes[: len(delta.planes)] = delta.planes

        summary, refused, planes = self._merge_in_node(summary, delta is None, ballot, planes)
        if refused or summary.refuses(refuse_faults=False):
            return VoteResult(summary, None)
        planes = planes.reshape(size, len(weights), slice_bytes).transpose(0, 1)
        planes = planes.reshape(len(weights), -1)
        return VoteResult(
            summary, PackedDelta(planes, weights, self._rule.offset(self._num_workers))
        )

    def _merge_in_node(
        self, summary: VoteHeaders, refused: bool, ballot: Ballot, planes: Tensor
    ) -> tuple[VoteHeaders, bool, Tensor]:
        """Merge the node's summaries and refusals; gather planes, a row per rank; collective."""
        differ = summary.parameters_differ, summary.hyperparameters_differ
        seen = [summary.requests, *differ, refused]
        flags = pad(torch.tensor(seen, dtype=torch.uint8), (0, _FLAG_BYTES - len(seen)))
        message = torch.cat([flags, digest_of(ballot.header), planes.flatten()])
        gathered = on_host(
            self._node.all_gather(message.to(self._node.device), NODE_TAG).wait(), self._node.peers
        )

        # the node acts as one worker, but an exchange may have been rejected on only some ranks
        sizes = [_FLAG_BYTES, DIGEST_BYTES, planes.numel()]
        flags, digests, planes = torch.split(gathered, sizes, dim=1)
        requests, *others = flags[:, : len(seen)].T.tolist()
        parameters, hyperparameters, refused = map(any, others)
        # the exchange compared each rank with other nodes only; compare the node's own ranks here
        within = differing(digests.contiguous().view(torch.int64).flatten().tolist())
        shared = summary._replace(
            requests=union(requests),
            parameters_differ=parameters or within[0],
            hyperparameters_differ=hyperparameters or within[1],
        )
        return shared, refused, planes  # one row of planes per rank
