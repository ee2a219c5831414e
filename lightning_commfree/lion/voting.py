"""When buckets leave and land: one optimizer step of a worker among others.

1. *Launch*: a bucket's ballot is cast and leaves as soon as its last gradient is there, if that is
   allowed during backward, else at the step. Buckets leave in their order, on every worker.
2. *Land*: the step waits for the results of all buckets. Only then is anything changed, so that a
   fault that stops the run leaves parameters and momenta as they were.
3. *Apply*: every worker steps by the results; from time to time momenta are averaged.

What travels is in CPU memory, and a background thread sends it (`ballot_exchange`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_commfree.comm.background import Background
from lightning_commfree.comm.channel import Channel
from lightning_commfree.lion.ballot import ENDS, STOP
from lightning_commfree.lion.ballot_exchange import DOWN_TAG, NODE_TAG, UP_TAG
from lightning_commfree.lion.bucket_vote import BallotInFlight, BucketVote
from lightning_commfree.lion.buckets import split_into_buckets
from lightning_commfree.lion.momenta import TAG as MOMENTUM_TAG
from lightning_commfree.lion.momenta import average_momenta, momentum_bytes
from lightning_commfree.lion.refusals import refusal
from lightning_commfree.lion.settings import LionSettings
from lightning_commfree.lion.vote_statistics import vote_shares
from lightning_commfree.lion.worker import Member


class Voting:
    """A worker's part in the votes of a run.

    Args:
        parameters: names and parameters, in order of use in forward; the same on all workers.
        members: gives parameters with their state and group, as they are now.
        channel: to the other workers: CPU tensors.
        settings: of the vote.
        node: to the ranks that form one worker with this one; None for a worker of one rank.
        others: to the ranks of this worker that vote on other parts of its parameters. They end
            with the same step and change nothing where one of them may not.
        bucket_numel: see `split_into_buckets`.

    Attributes:
        step: steps that have been voted on.
        stop: asked at every launch: whether this worker wants all to stop.
        stop_agreed: whether some worker wanted to, at the last step; the same on all of them.
        ends: asked at every launch: why this worker takes no part after the step, a number below
            4; 0: it does.
        parted: whether workers said different things of the last step; the same on all.
        abstentions: buckets that some worker has left to the others because of NaN or Inf, each
            worker counted, since the beginning.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        members: Callable[[Sequence[nn.Parameter]], list[Member]],
        channel: Channel,
        settings: LionSettings,
        node: Channel | None = None,
        others: Channel | None = None,
        bucket_numel: int | None = None,
    ) -> None:
        self.settings, self.channel, self.node = settings, channel, node
        self._others = others
        shards = channel.size * (node.size if node else 1)
        self.buckets = split_into_buckets(parameters, shards, bucket_numel)

        self.step = 0
        self.stop: Callable[[], bool] = lambda: False
        self.stop_agreed = False
        self.ends: Callable[[], int] = lambda: 0
        self.parted = False
        self.abstentions = 0

        self._members = members
        self._background = Background(channel.ledger)
        self._votes = [BucketVote(bucket, channel, settings, node) for bucket in self.buckets]
        self._flights: list[BallotInFlight] = []
        self._awaited: list[set[nn.Parameter]] = []  # per bucket, gradients that are still to come
        self._bucket_of = {p: b.index for b in self.buckets for p in b.parameters}
        self._hooks: dict[nn.Parameter, RemovableHandle] = {}
        self._begun = (self.step, self._sent())

    @property
    def parameters(self) -> Set[nn.Parameter]:
        """What is voted on."""
        return self._bucket_of.keys()

    # -- what is sent, and figures of it

    @property
    def bytes_per_step(self) -> int:
        """Bytes that this rank sends in a step without zeros and momentum sync, as formulas say."""
        return sum(vote.bytes_by_tag.total() for vote in self._votes)

    def cycle(self) -> tuple[Counter[str], int]:
        """Return the bytes that this rank sends from one momentum sync to the next, and the steps.

        By tag; as `bytes_per_step` says, by the ledger's formulas.
        """
        every = max(self.settings.momentum_sync_every, 1)
        sent: Counter[str] = Counter()
        for vote in self._votes:
            for tag, num_bytes in vote.bytes_by_tag.items():
                sent[tag] += every * num_bytes

        if self.settings.momentum_sync_every:
            members = (self._members(bucket.parameters) for bucket in self.buckets)
            sent[MOMENTUM_TAG] = sum(momentum_bytes(m, self.channel, self.node) for m in members)
        return sent, every

    def shares(self) -> dict[str, float]:
        """Return what the votes of the last step were like; see `vote_shares`."""
        return vote_shares(vote.latest for vote in self._votes if vote.latest is not None)

    def bits_per_parameter(self) -> dict[str, float]:
        """Return what this rank has sent up and down, in bits per parameter and step."""
        since, before = self._begun
        voted = (self.step - since) * sum(bucket.numel for bucket in self.buckets)
        sent = self._sent() - before

        names = {UP_TAG: "bits_up", DOWN_TAG: "bits_down"}
        return {name: 8 * sent[tag] / max(voted, 1) for tag, name in names.items()}

    def figures(self) -> dict[str, float]:
        """Return what a log shows of the votes, by name; shares are those of the last step."""
        abstentions = {"abstentions": float(self.abstentions)}
        return {**self.shares(), **self.bits_per_parameter(), **abstentions}

    # -- state

    def state_dict(self) -> dict[str, Any]:
        """Return what besides parameters and optimizer state an exact resume needs."""
        return {"step": self.step, "abstentions": self.abstentions}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what `state_dict` returned."""
        self.step, self.abstentions = state["step"], state["abstentions"]
        self._begun = (self.step, self._sent())

    # -- a step

    @contextmanager
    def during_backward(self) -> Iterator[None]:
        """Launch buckets as their gradients come, in a backward in the body: the step's last one.

        Nothing may change the gradients between that backward and the step.
        """
        for parameter in self._bucket_of:
            if parameter.requires_grad and parameter not in self._hooks:
                hook = parameter.register_post_accumulate_grad_hook(self._gradient_is_there)  # type: ignore[no-untyped-call]
                self._hooks[parameter] = hook

        self._awaited = [{p for p in b.parameters if p.requires_grad} for b in self.buckets]
        try:
            yield
        finally:
            self._awaited = []

    def run_step(self) -> None:
        """Take the step that the gradients of all workers ask for.

        Raises:
            RuntimeError: on all workers alike: a gradient is not finite and the setting is "raise",
                or the workers' parameters or hyperparameters differ. Nothing has been changed.
        """
        while len(self._flights) < len(self.buckets):
            self._launch(len(self._flights))
        flights, self._flights = self._flights, []
        for vote, flight in zip(self._votes, flights, strict=True):
            vote.check_gradients(flight)

        results = [vote.land(flight) for vote, flight in zip(self._votes, flights, strict=True)]
        summaries = [result.summary for result in results]
        ends = [any(reason) for reason in zip(*(one.ends for one in summaries), strict=True)]
        raises = self.settings.nonfinite == "raise"
        refused = any(summary.refuses(raises) for summary in summaries)
        heard = self._heard([any(one.stop for one in summaries), refused, *ends])
        self.stop_agreed, refused, self.parted = heard[0], heard[1], sum(heard[2:]) > 1
        if refused:
            here = raises, self.channel, self.node
            raise refusal(self.step + 1, self.buckets, results, self._members, *here)

        for vote, flight, result in zip(self._votes, flights, results, strict=True):
            vote.apply(self._members(vote.bucket.parameters), flight, result)
            self.abstentions += len(result.summary.abstaining)
        self.step += 1

        every = self.settings.momentum_sync_every
        if every and self.step % every == 0:
            for bucket in self.buckets:
                average_momenta(self._members(bucket.parameters), self.channel, self.node)

    def close(self) -> None:
        """Let parameters and thread go."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {}
        self._background.close()

    # -- inside

    def _gradient_is_there(self, parameter: nn.Parameter) -> None:
        if not self._awaited:  # a backward that is not the step's last, or votes wait for the step
            return
        self._awaited[self._bucket_of[parameter]].discard(parameter)
        while len(self._flights) < len(self.buckets) and not self._awaited[len(self._flights)]:
            self._launch(len(self._flights))

    def _launch(self, index: int) -> None:
        members = self._members(self.buckets[index].parameters)
        flags = STOP * self.stop() + ENDS * self.ends()
        flight = self._votes[index].launch(members, self.step, flags, self._background)
        self._flights.append(flight)

    def _sent(self) -> Counter[str]:
        sent = self.channel.ledger.bytes_by_tag
        return Counter({tag: sent[tag] for tag in (UP_TAG, DOWN_TAG)})

    def _heard(self, flags: list[bool]) -> list[bool]:
        """Return which flags some rank with a part of this worker's parameters has set."""
        if self._others is None or self._others.size == 1:
            return flags
        mine = torch.tensor(flags, dtype=torch.uint8, device=self._others.device)
        return self._others.all_gather(mine, NODE_TAG).wait().cpu().bool().any(0).tolist()
