"""One bucket, from its gradients to Delta."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

from lightning_commfree.comm.background import Background, to_host
from lightning_commfree.comm.bits import pack_bits_part
from lightning_commfree.comm.channel import Channel, Pending
from lightning_commfree.comm.digest import digest, mix_digests
from lightning_commfree.lion.ballot import Ballot, header_bytes, join_digests
from lightning_commfree.lion.ballot_exchange import (
    BallotExchange,
    NodeBallotExchange,
    VoteResult,
    cheaper_ballot_exchange,
)
from lightning_commfree.lion.buckets import Bucket
from lightning_commfree.lion.settings import LionSettings
from lightning_commfree.lion.vote import Average, Majority, PackedDelta, Rule
from lightning_commfree.lion.worker import Member, cast_ballot, hyperparameters, take_step

WAIT_TAG = "vote"


class BallotInFlight(NamedTuple):
    """A ballot on its way."""

    ballot: Ballot
    pending: Pending[VoteResult]
    gradients: list[tuple[Tensor | None, int]]  # what was voted with, and how often written to


class CastVote(NamedTuple):
    """This worker's votes on a bucket, and what became of all votes; packed, in host memory."""

    valid: Tensor  # uint8, shape (bucket.plane_bytes,): the bits that are no padding
    ballot: Ballot
    delta: PackedDelta


class BucketVote:
    """The votes on one bucket, one after the other.

    Args:
        bucket: what is voted on.
        channel: to the other workers: CPU tensors.
        settings: of the vote.
        node: to the ranks that form one worker with this one; None for a worker of one rank.

    Attributes:
        latest: the vote of the last step; None before the first.
    """

    def __init__(
        self, bucket: Bucket, channel: Channel, settings: LionSettings, node: Channel | None
    ) -> None:
        self.bucket = bucket
        self.latest: CastVote | None = None
        self._valid = torch.zeros(bucket.plane_bytes, dtype=torch.uint8)
        pack_bits_part(torch.ones(bucket.numel, dtype=torch.bool), 0, self._valid)
        self._valid_on_device = self._valid.to(bucket.parameters[0].device)

        self._channel, self._settings, self._node = channel, settings, node
        self._step = 0
        self._rule = self._make_rule()
        self._exchange = self._make_exchange()

    @property
    def bytes_by_tag(self) -> Counter[str]:
        """Bytes that this rank sends for a vote without zeros, by the ledger's formulas."""
        return self._exchange.bytes_by_tag

    def launch(
        self, members: list[Member], step: int, flags: int, background: Background
    ) -> BallotInFlight:
        """Cast the ballot and let it go.

        Args:
            members: the bucket's parameters, in its order.
            step: how many steps came before.
            flags: what this worker says for itself, as `write_header` takes it.
            background: where the exchange runs.
        """
        self._step = step
        with record_function(f"launch vote #{self.bucket.index}"):
            every = self._settings.check_drift_every
            due = every and step % every == 0
            tuning = zlib.crc32("; ".join(hyperparameters(members)).encode())
            value = join_digests(tuning, _digest(self.bucket) if due else 0)

            raw = cast_ballot(self.bucket, members, self._valid_on_device, flags, value)
            host, wait_for_host = to_host(raw)
            head = header_bytes(len(self.bucket.parameters))
            ballot = Ballot(host[:head], *host[head:].view(2, -1))

            task = partial(self._carry, ballot, wait_for_host)
            alone = self._channel.size == 1 and self._node is None  # nothing is sent
            pending = Pending(task) if alone else background.submit(task, WAIT_TAG, wait_for_host)
            return BallotInFlight(ballot, pending, self._gradients())

    def check_gradients(self, flight: BallotInFlight) -> None:
        """See that gradients are still what was voted with.

        Raises:
            RuntimeError: one of them was written to since.
        """
        for name, voted, now in zip(
            self.bucket.names, flight.gradients, self._gradients(), strict=True
        ):
            if voted[0] is not now[0] or voted[1] != now[1]:
                raise RuntimeError(
                    f"The gradient of {name!r} changed after its vote had begun. Something writes"
                    " to gradients between backward and optimizer step, or backward reaches them"
                    " more than once, as reentrant activation checkpointing does. Pass"
                    " `overlap=False`."
                )

    def land(self, flight: BallotInFlight) -> VoteResult:
        """Wait for the result; nothing is changed yet."""
        with record_function(f"land vote #{self.bucket.index}"):
            return flight.pending.wait()

    def apply(self, members: list[Member], flight: BallotInFlight, result: VoteResult) -> None:
        """Step the bucket's parameters by the result, and this worker's momenta."""
        summary, delta = result
        assert delta is not None, "a refused bucket has raised"
        abstained = self._channel.rank in summary.abstaining

        with record_function(f"apply vote #{self.bucket.index}"):
            on_device = delta.to(self.bucket.parameters[0].device)
            take_step(self.bucket, members, on_device, summary.with_gradient, abstained)
        self.latest = CastVote(self._valid, flight.ballot, delta)

    # -- inside

    def _carry(self, ballot: Ballot, wait_for_host: Callable[[], None]) -> VoteResult:
        wait_for_host()
        refuse = self._settings.nonfinite == "raise"
        return self._exchange.run(ballot, self._rule, len(self.bucket.parameters), refuse)

    def _gradients(self) -> list[tuple[Tensor | None, int]]:
        gradients = (parameter.grad for parameter in self.bucket.parameters)
        return [(g, 0 if g is None else g._version) for g in gradients]

    def _make_rule(self) -> Rule:
        if self._settings.vote == "average":
            return Average()
        return Majority(self._draw if self._settings.ties == "random" else None)

    def _make_exchange(self) -> BallotExchange:
        count = len(self.bucket.parameters)
        make = partial(cheaper_ballot_exchange, self._channel, parameters=count, rule=self._rule)
        if self._node is None:
            return make(plane_bytes=self.bucket.plane_bytes, valid=self._valid)

        part = self._valid.view(self._node.size, -1)[self._node.rank]
        inner = make(plane_bytes=part.numel(), valid=part)
        return NodeBallotExchange(inner, self._node, self._channel.size)

    def _draw(self, shard: int, words: int) -> Tensor:
        """Return random words that depend on nothing but their place and the step.

        So all workers that count the same words draw the same, and a resumed run draws as the
        uninterrupted one.
        """
        part = self._node.rank if self._node else 0
        place = f"{self._step} {self.bucket.index} {part} {shard}"
        # the generator reads 32 bits of a seed only
        generator = torch.Generator().manual_seed(zlib.crc32(place.encode()))
        raw = torch.randint(0, 256, (8 * words,), dtype=torch.uint8, generator=generator)
        return raw.view(torch.int64)


def _digest(bucket: Bucket) -> Tensor:
    return mix_digests(torch.stack([digest(p.contiguous()) for p in bucket.parameters]))
