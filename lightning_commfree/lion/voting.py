"""One worker's optimizer step: launch ballots, wait for the results, and apply them.

1. *Launch*: cast a bucket's ballot and send it. If overlap is allowed, this happens during
   backward, as soon as the last gradient of this bucket and of those before it is ready; otherwise
   at the optimizer step.
2. *Land*: wait for the results of all buckets.
3. *Apply*: update the parameters and this worker's momentum buffers.

A background thread exchanges the ballots in CPU memory (`ballot`).
"""

from __future__ import annotations

import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import record_function
from torch.utils.hooks import RemovableHandle

from lightning_commfree.comm.background import Background, Staging, on_host, to_host
from lightning_commfree.comm.bits import pack_bits_part
from lightning_commfree.comm.channel import Channel, Pending
from lightning_commfree.comm.digest import digest, mix_digests
from lightning_commfree.comm.exchange import View
from lightning_commfree.comm.liveness import AgreedError
from lightning_commfree.comm.requests import Requests, union
from lightning_commfree.lion.ballot import (
    DOWN_TAG,
    NODE_TAG,
    UP_TAG,
    Ballot,
    BallotExchange,
    NodeBallotExchange,
    VoteResult,
    cheaper_ballot_exchange,
    header_bytes,
    pack_digests,
)
from lightning_commfree.lion.buckets import Bucket, split_into_buckets
from lightning_commfree.lion.settings import LionSettings
from lightning_commfree.lion.vote import Average, Majority, PackedDelta, Rule, compare_to
from lightning_commfree.lion.worker import (
    FlatMomenta,
    LionParam,
    cast_ballot,
    hyperparameters,
    take_step,
    warm_up,
)

WAIT_TAG = "vote"


class LandedVote(NamedTuple):
    """Result of a vote, and its planes on their way to the parameters' device."""

    result: VoteResult
    # makes the current stream wait for the planes and returns them; nothing if the step is rejected
    upload: Callable[[], tuple[Tensor, ...]]


class BallotInFlight(NamedTuple):
    """A ballot that has been cast, and the pending result of its exchange."""

    members: list[LionParam]
    ballot: Ballot
    pending: Pending[LandedVote]
    gradients: list[tuple[Tensor | None, int]]  # at launch, with `_version` counters


class PackedVote(NamedTuple):
    """This worker's ballot for a bucket and the vote's result, both packed, in host memory."""

    valid: Tensor  # uint8, shape (bucket.plane_bytes,): bits that are not padding
    ballot: Ballot
    delta: PackedDelta


class Voting:
    """Casts one worker's votes on all buckets and applies the results at every step."""

    def __init__(
        self,
        # in the order in which forward uses them; the same on all workers
        parameters: Sequence[tuple[str, nn.Parameter]],
        # returns parameters with their current states and groups
        members: Callable[[Sequence[nn.Parameter]], list[LionParam]],
        view: View,  # the workers, with a channel for CPU tensors
        settings: LionSettings,
        node: Channel | None = None,  # this worker's ranks, if they cast a single ballot together
        # this worker's ranks, if each votes on a different shard: all of them stop after the same
        # step, and all reject a step if one of them does
        shard_peers: Channel | None = None,
    ) -> None:
        self.settings, self.view, self.node = settings, view, node
        self._shard_peers = shard_peers
        shards = view.size * (node.size if node else 1)
        self.buckets = split_into_buckets(parameters, shards)

        self.step = 0  # completed steps
        self.requests = Requests()  # sent with every ballot; those of all workers land with a step
        self.abstentions = 0  # buckets on which any worker abstained because of NaN or Inf

        self._members = members
        self._background = Background(view.channel.ledger)
        self._votes = [BucketVote(bucket, view, settings, node) for bucket in self.buckets]
        self._flights: list[BallotInFlight] = []
        self._in_step: list[list[LionParam]] = []  # per bucket, in the current step
        self._awaited: list[set[nn.Parameter]] = []  # per bucket, parameters with no gradient yet
        self._launching = threading.Lock()
        self._bucket_of = {p: b.index for b in self.buckets for p in b.parameters}
        self._hooks: dict[nn.Parameter, RemovableHandle] = {}
        self._counted_from = (self.step, self._sent())  # where `bits_per_parameter` starts counting
        warm_up(self._bucket_of)

    # -- a step

    def run_step(self) -> None:
        """Vote on all buckets and update parameters and momentum with the results; collective.

        Raises an `AgreedError` on all workers, before any change, if the step is rejected; raises a
        `RuntimeError` on this worker only if a gradient changed after its vote was launched.
        """
        while len(self._flights) < len(self.buckets):  # backward has not launched all ballots
            self._launch(len(self._flights))
        flights, self._flights, self._in_step = self._flights, [], []
        for vote, flight in zip(self._votes, flights, strict=True):
            vote.check_gradients(flight)

        # get all results before applying any, so that a rejected step leaves the model unchanged
        landed = [vote.land(flight) for vote, flight in zip(self._votes, flights, strict=True)]
        results = [vote.result for vote in landed]
        summaries = [result.summary for result in results]
        raises = self.settings.nonfinite == "raise"
        refused = any(summary.refuses(raises) for summary in summaries)
        requests = union([summary.requests for summary in summaries])
        requests, refused = self._merge_over_shards(requests, refused)
        self.requests.incoming(requests)
        if refused:
            raise self._refusal(results)

        for vote, flight, each in zip(self._votes, flights, landed, strict=True):
            vote.apply(flight, each)
            self.abstentions += len(each.result.summary.abstaining)
        self.step += 1

    @contextmanager
    def during_backward(self) -> Iterator[None]:
        """Context manager that launches votes during a backward pass, as gradients become ready.

        It must be the last pass before a step, and nothing may change the gradients in between.
        """
        for parameter in self._bucket_of:
            if parameter.requires_grad and parameter not in self._hooks:
                hook = parameter.register_post_accumulate_grad_hook(self._gradient_ready)  # type: ignore[no-untyped-call]
                self._hooks[parameter] = hook

        self._awaited = [{p for p in b.parameters if p.requires_grad} for b in self.buckets]
        try:
            yield
        finally:
            self._awaited = []

    def _gradient_ready(self, parameter: nn.Parameter) -> None:
        """Hook of a gradient: launch every next bucket whose gradients are all ready."""
        if not self._awaited:  # outside `during_backward`: gradients accumulate, or no overlap
            return
        with self._launching:  # autograd has a thread for each device of the module
            self._awaited[self._bucket_of[parameter]].discard(parameter)
            # in index order, even if a later bucket is ready: all workers must use the same order
            while len(self._flights) < len(self.buckets) and not self._awaited[len(self._flights)]:
                self._launch(len(self._flights))

    def _launch(self, bucket_index: int) -> None:
        """Start a bucket's vote; buckets are launched in order of their index."""
        if bucket_index == 0:  # call `_members` once per step, because it goes through all groups
            each = iter(self._members([p for b in self.buckets for p in b.parameters]))
            self._in_step = [list(islice(each, len(b.parameters))) for b in self.buckets]
        members, requests = self._in_step[bucket_index], self.requests.outgoing()
        flight = self._votes[bucket_index].launch(members, self.step, requests, self._background)
        self._flights.append(flight)

    def _merge_over_shards(self, requests: int, refused: bool) -> tuple[int, bool]:
        """Combine requests, and whether to reject a step, over this worker's ranks; collective."""
        peers = self._shard_peers
        if peers is None or peers.size == 1:
            return requests, refused
        mine = torch.tensor([requests, refused], dtype=torch.uint8, device=peers.device)
        of_all, refusals = on_host(peers.all_gather(mine, NODE_TAG).wait(), peers.peers).T.tolist()
        return union(of_all), any(refusals)

    def _refusal(self, results: Sequence[VoteResult]) -> RuntimeError:
        """Return the error for a step that was rejected on all workers."""
        step = self.step + 1
        for bucket, (summary, _) in zip(self.buckets, results, strict=True):
            names = bucket.names
            if summary.hyperparameters_differ:
                here = "; ".join(hyperparameters(self._members(bucket.parameters)))
                return AgreedError(
                    "The workers have different learning rates, betas or weight decay before step"
                    f" {step} (for {names[0]!r} and possibly others), so the same votes would make"
                    f" their parameters diverge. On this rank: {here}. No parameter was changed."
                    " Set the same values on all ranks: a scheduler that monitors a metric needs"
                    " one that is logged per epoch with `sync_dist=True`."
                )

            if summary.parameters_differ:
                return AgreedError(
                    f"The workers' parameters differ before step {step}, including"
                    f" {', '.join(map(repr, names[:5]))}. Only votes may change them: look for code"
                    " that writes to parameters on only some ranks."
                )

            if summary.faults and self.settings.nonfinite == "raise":
                worker, i = summary.faults[0]
                more = f" (and {len(summary.faults) - 1} more)" if len(summary.faults) > 1 else ""
                return AgreedError(
                    f"The gradient of {names[i]!r} on {self._describe_ranks(worker)} contains NaN"
                    f" or Inf{more}, before step {step}. All ranks are stopping; no parameter was"
                    " changed. Lower the learning rate or check the batches there;"
                    " `nonfinite='abstain'` would leave such a worker out of the vote."
                )

        return AgreedError(
            "Another rank, which votes on a different shard of this worker's parameters, rejected"
            f" step {step}. See that rank's error for the reason. All ranks are stopping; no"
            " parameter was changed."
        )

    def _describe_ranks(self, worker: int) -> str:
        rank = self.view.channel.ranks[worker]
        # gradients are averaged over these ranks, with shards too, so any may be the source
        ranks = self.node or self._shard_peers
        if ranks is None:
            return f"rank {rank}"
        first = rank - ranks.rank
        return f"ranks {first} to {first + ranks.size - 1}"

    def close(self) -> None:
        """Remove the hooks and stop the background thread."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {}
        self._background.close()

    @property
    def parameters(self) -> Set[nn.Parameter]:
        """The set of parameters that the votes cover."""
        return self._bucket_of.keys()

    # -- state

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers of steps and abstentions, which an exact resume needs."""
        return {"step": self.step, "abstentions": self.abstentions}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state returned by `state_dict`."""
        self.step, self.abstentions = state["step"], state["abstentions"]
        self._counted_from = (self.step, self._sent())

    # -- bytes and metrics

    @property
    def bytes_per_step(self) -> Counter[str]:
        """Return the number of bytes that this rank sends per step, by tag, if no vote is zero."""
        return sum((vote.bytes_by_tag for vote in self._votes), Counter[str]())

    def shares(self) -> dict[str, float]:
        """Return the fractions of ties, zeros and agreement in the last step (`vote_shares`)."""
        return vote_shares(vote.latest for vote in self._votes if vote.latest is not None)

    def bits_per_parameter(self) -> dict[str, float]:
        """Return the mean "bits_up" and "bits_down" that this rank sends per parameter and step.

        Steps before the most recent `load_state_dict` are not included.
        """
        since, before = self._counted_from
        voted = (self.step - since) * sum(bucket.numel for bucket in self.buckets)
        sent = self._sent() - before

        names = {UP_TAG: "bits_up", DOWN_TAG: "bits_down"}
        return {name: 8 * sent[tag] / max(voted, 1) for tag, name in names.items()}

    def figures(self) -> dict[str, float]:
        """Return the metrics to log: `shares`, `bits_per_parameter` and "abstentions"."""
        abstentions = {"abstentions": float(self.abstentions)}
        return {**self.shares(), **self.bits_per_parameter(), **abstentions}

    def _sent(self) -> Counter[str]:
        """Return the bytes that this rank has sent in votes so far, by tag."""
        sent = self.view.channel.ledger.bytes_by_tag
        return Counter({tag: sent[tag] for tag in (UP_TAG, DOWN_TAG)})


class BucketVote:
    """Runs the vote on one bucket, once per step."""

    def __init__(
        self, bucket: Bucket, view: View, settings: LionSettings, node: Channel | None
    ) -> None:
        self.bucket = bucket
        self.latest: PackedVote | None = None  # the vote in the last step
        self._momenta = FlatMomenta()
        self._valid = torch.zeros(bucket.plane_bytes, dtype=torch.uint8)
        pack_bits_part(torch.ones(bucket.numel, dtype=torch.bool), 0, self._valid)
        self._valid_on_device = self._valid.to(bucket.parameters[0].device)

        self._view, self._settings, self._node = view, settings, node
        self._step = 0  # step of the vote in flight, for `_draw`
        self._rule = self._make_rule()
        self._exchange = self._make_exchange()

    @property
    def bytes_by_tag(self) -> Counter[str]:
        """Number of bytes that this rank sends per vote, by tag, if no worker votes zero."""
        return self._exchange.bytes_by_tag

    def launch(
        self, members: list[LionParam], step: int, requests: int, background: Background
    ) -> BallotInFlight:
        """Cast this worker's ballot after `step` completed steps, and start exchanging it."""
        self._step = step
        with record_function(f"launch vote #{self.bucket.index}"):
            # send hashes with the ballot: workers that differ would diverge unnoticed
            every = self._settings.check_drift_every
            due = every and step % every == 0
            tuning = zlib.crc32("; ".join(hyperparameters(members)).encode())
            hashes = pack_digests(tuning, _parameters_digest(self.bucket) if due else 0)

            momenta = self._momenta.of(members)
            raw = cast_ballot(
                self.bucket, members, self._valid_on_device, requests, hashes, momenta
            )
            host, wait_for_host = to_host(raw, self._view.channel.peers)
            head = header_bytes(len(self.bucket.parameters))
            ballot = Ballot(host[:head], *host[head:].view(2, -1))

            task = partial(self._exchange_ballot, ballot, wait_for_host, background.staging)
            alone = self._view.size == 1 and self._node is None  # nothing is sent
            pending = (
                Pending(task)
                if alone
                else background.submit(task, WAIT_TAG, wait_for_host, raw.device)
            )
            return BallotInFlight(members, ballot, pending, self._gradients_with_versions())

    def check_gradients(self, flight: BallotInFlight) -> None:
        """Raise a `RuntimeError` if a gradient has changed since the ballot was cast."""
        for name, voted, now in zip(
            self.bucket.names, flight.gradients, self._gradients_with_versions(), strict=True
        ):
            if voted[0] is not now[0] or voted[1] != now[1]:
                raise RuntimeError(
                    f"The gradient of {name!r} changed after its vote was launched. Either some"
                    " code writes to gradients between backward and the optimizer step, or backward"
                    " computes them more than once, as reentrant activation checkpointing does."
                    " Pass `overlap=False`."
                )

    def land(self, flight: BallotInFlight) -> LandedVote:
        """Wait for the result of the vote and return it, without applying it."""
        with record_function(f"land vote #{self.bucket.index}"):
            return flight.pending.wait()

    def apply(self, flight: BallotInFlight, landed: LandedVote) -> None:
        """Update the bucket's parameters and this worker's momentum buffers with the result."""
        summary, delta = landed.result
        assert delta is not None, "a refused bucket has raised"
        abstained = self._view.rank in summary.abstaining

        with record_function(f"apply vote #{self.bucket.index}"):
            (planes,) = landed.upload()
            on_device = delta._replace(planes=planes)
            take_step(self.bucket, flight.members, on_device, summary.with_gradient, abstained)
        self.latest = PackedVote(self._valid, flight.ballot, delta)

    # -- inside

    def _exchange_ballot(
        self, ballot: Ballot, wait_for_host: Callable[[], None], staging: Staging
    ) -> LandedVote:
        """In the background, exchange a ballot and start uploading the result; collective."""
        wait_for_host()
        result = self._exchange.run(ballot, refuse_faults=self._settings.nonfinite == "raise")
        if result.delta is None:
            return LandedVote(result, lambda: ())
        device = self.bucket.parameters[0].device
        # on CUDA, a copy from unpinned memory would block the training thread
        return LandedVote(result, staging.upload(result.delta.planes, device, lambda up: (up,)))

    def _gradients_with_versions(self) -> list[tuple[Tensor | None, int]]:
        gradients = (parameter.grad for parameter in self.bucket.parameters)
        # torch counts a tensor's in-place writes in `_version`
        return [(g, 0 if g is None else g._version) for g in gradients]

    def _make_rule(self) -> Rule:
        if self._settings.vote == "average":
            return Average()
        return Majority(self._draw if self._settings.ties == "random" else None)

    def _make_exchange(self) -> BallotExchange | NodeBallotExchange:
        count = len(self.bucket.parameters)
        make = partial(cheaper_ballot_exchange, self._view, num_parameters=count, rule=self._rule)
        if self._node is None:
            return make(plane_bytes=self.bucket.plane_bytes, valid_bits=self._valid)

        own_slice = self._valid.view(self._node.size, -1)[self._node.rank]
        inner = make(plane_bytes=own_slice.numel(), valid_bits=own_slice)
        return NodeBallotExchange(inner, self._node, self._rule, self._view.size)

    def _draw(self, shard_index: int, num_words: int) -> Tensor:
        """Draw random int64 words to break ties in a shard, the same on all workers."""
        # seed by step and position only, so that all workers that count a shard, and a resumed run,
        # draw the same words
        node_rank = self._node.rank if self._node else 0
        position = f"{self._step} {self.bucket.index} {node_rank} {shard_index}"
        # crc32, because the generator uses only 32 bits of a seed
        generator = torch.Generator().manual_seed(zlib.crc32(position.encode()))
        raw = torch.randint(0, 256, (8 * num_words,), dtype=torch.uint8, generator=generator)
        return raw.view(torch.int64)


def _parameters_digest(bucket: Bucket) -> Tensor:
    """Return a hash of a bucket's parameters, 0-d int64."""
    return mix_digests(torch.stack([digest(p.contiguous()) for p in bucket.parameters]))


def vote_shares(votes: Iterable[PackedVote]) -> dict[str, float]:
    """Return the fractions of "ties", "zeros" and "agreement" in one step's votes, from 0 to 1."""
    parameters = moved = voted = agreed = 0
    for valid, ballot, delta in votes:
        positive, negative = (plane & valid for plane in _signs(delta))
        minus = ballot.nonzero & ~ballot.plus

        parameters += _popcount(valid)
        moved += _popcount(positive | negative)
        voted += _popcount(ballot.nonzero)
        agreed += _popcount((positive & ballot.plus) | (negative & minus))

    return {
        "ties": 1 - moved / max(parameters, 1),  # parameters with Delta = 0
        "zeros": 1 - voted / max(parameters, 1),  # of this worker's votes
        "agreement": agreed / max(voted, 1),  # of its nonzero votes, those with Delta's sign
    }


def _signs(delta: PackedDelta) -> tuple[Tensor, Tensor]:
    """Return the planes Delta > 0 and Delta < 0."""
    by_weight = dict(zip(delta.weights, delta.planes, strict=True))
    zero = torch.zeros_like(delta.planes[0])
    digits = [by_weight.get(1 << i, zero) for i in range(max(delta.weights).bit_length())]

    greater, equal = compare_to(digits, delta.offset)
    return greater, ~(greater | equal)


def _popcount(plane: Tensor) -> int:
    """Count the set bits in a uint8 plane."""
    return int(_BITS_SET[plane.int()].sum())


_BITS_SET = torch.tensor([byte.bit_count() for byte in range(256)])  # one entry per byte value
