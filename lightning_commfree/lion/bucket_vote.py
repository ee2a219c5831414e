"""One bucket, from its gradients to Delta."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_commfree.comm.background import Background
from lightning_commfree.comm.bits import pack_bits_part
from lightning_commfree.comm.channel import Channel, Pending
from lightning_commfree.comm.digest import digest, mix_digests
from lightning_commfree.lion.ballot_exchange import (
    Ballot,
    BallotExchange,
    NodeBallotExchange,
    VoteResult,
    cheaper_ballot_exchange,
)
from lightning_commfree.lion.buckets import Bucket
from lightning_commfree.lion.header import header_bytes, join_digests
from lightning_commfree.lion.settings import LionSettings
from lightning_commfree.lion.vote import Average, Majority, Rule
from lightning_commfree.lion.worker import Member, cast_ballot, hyperparameters

WAIT_TAG = "vote"


class BallotInFlight(NamedTuple):
    """A ballot on its way."""

    ballot: Ballot
    pending: Pending[VoteResult]
    gradients: list[tuple[Tensor | None, int]]  # what was voted with, and how often written to


class BucketVote:
    """The votes on one bucket, one after the other.

    Args:
        bucket: what is voted on.
        channel: to the other workers: CPU tensors.
        settings: of the vote.
        node: to the ranks that form one worker with this one; None for a worker of one rank.

    Attributes:
        valid: uint8, shape (bucket.plane_bytes,), on the CPU: the bits that are no padding.
    """

    def __init__(
        self, bucket: Bucket, channel: Channel, settings: LionSettings, node: Channel | None
    ) -> None:
        self.bucket = bucket
        self.valid = torch.zeros(bucket.plane_bytes, dtype=torch.uint8)
        pack_bits_part(torch.ones(bucket.numel, dtype=torch.bool), 0, self.valid)
        self._valid_there = self.valid.to(bucket.parameters[0].device)
        self._channel, self._settings, self._node = channel, settings, node
        self._step = 0
        self._rule = self._make_rule()
        self._exchange = self._make_exchange()

    @property
    def bytes_by_tag(self) -> Counter[str]:
        """Bytes that this rank sends for a vote without zeros, by the ledger's formulas."""
        return self._exchange.bytes_by_tag

    def launch(
        self, members: list[Member], step: int, wants: int, background: Background
    ) -> BallotInFlight:
        """Cast the ballot and let it go.

        Args:
            members: the bucket's parameters, in its order.
            step: how many steps came before.
            wants: what this worker says for itself, as `write_header` takes it.
            background: where the exchange runs.
        """
        self._step = step
        every = self._settings.check_drift_every
        due = every and step % every == 0
        tuning = zlib.crc32("; ".join(hyperparameters(members)).encode())
        value = join_digests(tuning, _digest(self.bucket) if due else 0)
        raw, arrived = _to_host(cast_ballot(self.bucket, members, self._valid_there, wants, value))
        head = header_bytes(len(self.bucket))
        ballot = Ballot(raw[:head], *raw[head:].view(2, -1))
        job = partial(self._carry, ballot, arrived)
        alone = self._channel.size == 1 and self._node is None  # nothing is sent
        pending = Pending(job) if alone else background.submit(job, WAIT_TAG, arrived)
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

    # -- inside

    def _carry(self, ballot: Ballot, arrived: Callable[[], None]) -> VoteResult:
        arrived()
        refuse = self._settings.nonfinite == "raise"
        return self._exchange.run(ballot, self._rule, len(self.bucket), refuse)

    def _gradients(self) -> list[tuple[Tensor | None, int]]:
        gradients = (parameter.grad for parameter in self.bucket.parameters)
        return [(g, 0 if g is None else g._version) for g in gradients]

    def _make_rule(self) -> Rule:
        if self._settings.vote == "average":
            return Average()
        return Majority(self._draw if self._settings.ties == "random" else None)

    def _make_exchange(self) -> BallotExchange:
        make = partial(
            cheaper_ballot_exchange, self._channel, parameters=len(self.bucket), rule=self._rule
        )
        if self._node is None:
            return make(plane_bytes=self.bucket.plane_bytes, valid=self.valid)
        part = self.valid.view(self._node.size, -1)[self._node.rank]
        inner = make(plane_bytes=part.numel(), valid=part)
        return NodeBallotExchange(inner, self._node, self._channel.size)

    def _draw(self, shard: int, words: int) -> Tensor:
        """Return random words, which depend on nothing but their place and the step.

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


def _to_host(buffer: Tensor) -> tuple[Tensor, Callable[[], None]]:
    """Return the buffer in host memory, and what to call before reading it."""
    if buffer.device.type != "cuda":
        host = buffer.cpu()
        return host, lambda: None
    host = torch.empty(buffer.shape, dtype=buffer.dtype, pin_memory=True)
    host.copy_(buffer, non_blocking=True)
    # of the buffer's device, whichever the thread's is; blocking: the thread that waits sleeps
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(buffer.device))

    def wait() -> None:
        with torch.cuda.device(buffer.device):  # a new thread would start a context on device 0
            event.synchronize()

    return host, wait
