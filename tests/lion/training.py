"""A training whose gradients depend on step and worker alone: for workers that vote, and for the
serial twin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.exchange import View
from lightning_commfree.lion import DistributedLion, LionSettings, Voting, buckets
from tests.lion.serial import SerialLion

SHAPES = {"embed": (30, 8), "conv": (4, 3, 3, 3), "bias": (5,), "head": (40, 8), "scale": ()}
NUMEL = 240 + 108 + 5 + 320 + 1
BUCKETS = [["scale", "head"], ["bias", "conv"], ["embed"]]  # as `small_buckets` makes them
HALVED_AT = (8, 16)  # the learning rates

Gradients = dict[str, Tensor | None]
Data = Callable[[int, int], Gradients]  # step, worker -> gradients


class Run(NamedTuple):
    """What one worker saw."""

    seen: list[dict[str, Tensor]]  # parameters after every step
    momenta: dict[str, Tensor]  # at the end
    sent: list[int]  # bytes of every step
    voting: dict[str, Any]


def small_buckets(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(buckets, "_MIN_NUMEL", 40)


def parameters() -> dict[str, nn.Parameter]:
    """Five of them, one in a layout that is not flat, one without a dimension."""
    generator = torch.Generator().manual_seed(7)
    values = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    values["conv"] = values["conv"].to(memory_format=torch.channels_last)
    return {name: nn.Parameter(value) for name, value in values.items()}


def groups(named: dict[str, nn.Parameter]) -> list[dict[str, Any]]:
    """Two groups that share no setting."""
    matrices = [p for p in named.values() if p.ndim >= 2]
    others = [p for p in named.values() if p.ndim < 2]
    return [
        {"params": matrices, "lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.3},
        {"params": others, "lr": 0.02, "betas": (0.8, 0.95), "weight_decay": 0.1},
    ]


def gradients(step: int, worker: int) -> Gradients:
    """Rows that nobody uses and rows that one worker does not; gradients that are None."""
    generator = torch.Generator().manual_seed(1000 * step + worker)
    drawn: Gradients = {n: torch.randn(s, generator=generator) for n, s in SHAPES.items()}
    drawn["conv"] = drawn["conv"].to(memory_format=torch.channels_last)
    drawn["embed"][25:] = 0.0
    drawn["embed"][20:25] *= -0.0 if worker == 0 else 1.0
    if worker == 0 and step % 2:
        drawn["bias"] = None
    if step < 5:
        drawn["scale"] = None
    return drawn


def dense_gradients(step: int, worker: int) -> Gradients:
    """No zero anywhere."""
    generator = torch.Generator().manual_seed(1000 * step + worker)
    return {n: torch.randn(s, generator=generator) for n, s in SHAPES.items()}


def set_gradients(named: dict[str, nn.Parameter], values: Gradients) -> None:
    for name, parameter in named.items():
        parameter.grad = values[name]


def schedule(step: int, groups: list[dict[str, Any]]) -> None:
    if step in HALVED_AT:
        for group in groups:
            group["lr"] *= 0.5


def snapshot(named: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in named.items()}


class Worker:
    """A worker with its parameters and its optimizer, joined to the others."""

    def __init__(self, channel: Any, settings: LionSettings, node: Any = None) -> None:
        self.named = parameters()
        self.channel = channel
        self.number = channel.rank
        self.lion = DistributedLion(groups(self.named))
        self.voting: Voting = self.lion.join(
            list(self.named.items()), View.of(channel), settings, node
        )

    def step(self, values: Gradients) -> dict[str, Tensor]:
        set_gradients(self.named, values)
        self.lion.step()
        return snapshot(self.named)

    def momenta(self) -> dict[str, Tensor]:
        """Return them as they are; none before the first step."""
        state = self.lion.state
        return {name: state[p]["momentum"].clone() for name, p in self.named.items() if state[p]}

    def train(self, steps: int, data: Data = gradients) -> Run:
        seen, sent = [], []
        for step in range(steps):
            before = self.sent()
            schedule(step, self.lion.param_groups)
            seen.append(self.step(data(step, self.number)))
            sent.append(self.sent() - before)
        self.lion.leave()
        return Run(seen, self.momenta(), sent, self.voting.state_dict())

    def sent(self) -> int:
        """Bytes to other workers, as the transport has counted them."""
        if isinstance(self.channel, Channel):
            return self.channel.ledger.bytes_sent
        return sum(self.channel.sent.values())


def play(workers: int, steps: int, vote: str = "majority", data: Data = gradients) -> Run:
    """The same in a for-loop; momenta are those of worker 0."""
    named = parameters()
    twin = SerialLion(groups(named), workers, vote)
    seen = []
    for step in range(steps):
        schedule(step, twin.groups)
        votes = [data(step, worker) for worker in range(workers)]
        twin.step([{p: mine[name] for name, p in named.items()} for mine in votes])
        seen.append(snapshot(named))
    momenta = {name: twin.momenta[0][p] for name, p in named.items()}
    return Run(seen, momenta, [], {})


def train_alone(
    steps: int,
    first: int = 0,
    lion: DistributedLion | None = None,
    named: dict[str, nn.Parameter] | None = None,
) -> tuple[dict[str, nn.Parameter], DistributedLion, list[dict[str, Tensor]]]:
    """Train without anybody else; return parameters, optimizer and what was seen."""
    named = named or parameters()
    lion = lion or DistributedLion(groups(named))
    seen = []
    for step in range(first, first + steps):
        schedule(step, lion.param_groups)
        set_gradients(named, gradients(step, 0))
        lion.step()
        seen.append(snapshot(named))
    return named, lion, seen


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor], what: object = "") -> None:
    """Bit for bit: -0.0 is not 0.0."""
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype
        raw, wanted = (t.contiguous().view(-1).view(torch.uint8) for t in (got[name], tensor))
        assert torch.equal(raw, wanted), (what, name)


def assert_same_steps(run: Run, expected: Run, what: object = "") -> None:
    assert len(run.seen) == len(expected.seen)
    for step, (got, wanted) in enumerate(zip(run.seen, expected.seen, strict=True)):
        assert_same(got, wanted, (what, step))
