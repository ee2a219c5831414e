"""A replica with NaN or Inf: all stop and name it, or the others go on without it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_commfree.comm.channel import Channel
from lightning_commfree.diloco import (
    DiLoCoSettings,
    StreamingDiLoCo,
    split_into_fragments,
)
from lightning_commfree.diloco.nonfinite import is_nonfinite, reset_nonfinite_state
from lightning_commfree.diloco.transport import FixedTransport
from tests.diloco.serial import SerialDiLoCo
from tests.diloco.training import (
    ADAMW,
    DEFAULTS,
    NESTEROV,
    Net,
    alone,
    backward,
    bits,
    state_of,
    world,
)
from tests.world import run_ranks

H, STEPS = 4, 15
Sick = Mapping[int, int]  # by replica: the step in which a gradient of its is NaN


def begin(module: nn.Module, channel: Channel, **changes: Any) -> StreamingDiLoCo:
    settings = DiLoCoSettings(**{**DEFAULTS, "num_fragments": 3, "nonfinite": "abstain", **changes})
    fragments = split_into_fragments(module, settings.num_fragments, settings.fragment_pattern)
    return StreamingDiLoCo(module, fragments, settings, FixedTransport(channel))


def inner_step(
    module: Net, optimizer: torch.optim.Optimizer, replica: int, step: int, sick: Sick
) -> None:
    backward(module, replica, step)
    if sick.get(replica) == step:
        module.embed.weight.grad.fill_(torch.nan)
    optimizer.step()


@dataclass
class Outcome:
    local: list[dict[str, Tensor]] = field(default_factory=list)  # after every step and `finish`
    outer: list[list[Tensor]] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    error: str = ""
    abstentions: dict[int, int] = field(default_factory=dict)
    names: list[list[str]] = field(default_factory=list)


def train(rank: int, size: int, sick: Sick, changes: dict[str, Any]) -> Outcome:
    module, channel, outcome = Net(), world(rank, size), Outcome()
    diloco, optimizer = begin(module, channel, **changes), ADAMW(module.parameters())
    diloco.optimizers = [optimizer]
    outcome.names = [list(fragment.fragment.parameters) for fragment in diloco.fragments]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for step in range(1, STEPS + 2):
                if step <= STEPS:
                    inner_step(module, optimizer, rank, step, sick)
                    diloco.after_step()
                else:
                    diloco.finish()
                outcome.local.append(state_of(module))
                outcome.outer.append([f.global_copy.clone() for f in diloco.fragments])
        except RuntimeError as error:
            outcome.error = str(error)
    outcome.told = [str(one.message) for one in caught]
    outcome.abstentions = {p: landing.abstentions for p, landing in diloco.landings.items()}
    diloco.close()
    channel.close()
    return outcome


def play(size: int, sick: Sick, names: list[list[str]]) -> list[list[dict[str, Tensor]]]:
    """The same by the serial twin; returns what every replica held after every step."""
    modules = [Net() for _ in range(size)]
    optimizers = [ADAMW(module.parameters()) for module in modules]
    twin = SerialDiLoCo(
        modules,
        lambda m, step: inner_step(modules[m], optimizers[m], m, step, sick),
        names,
        H,
        1,
        0.5,
        NESTEROV,
        inner_optimizers=optimizers,
    )
    seen: list[list[dict[str, Tensor]]] = [[] for _ in modules]
    for step in range(1, STEPS + 2):
        twin.run_step() if step <= STEPS else twin.finish()
        for states, module in zip(seen, modules, strict=True):
            states.append(state_of(module))
    return seen


# the embedding leaves after steps 6, 10 and 14: NaN there spreads to all, or to itself alone
TIMES = (6, 7, 12, STEPS)


def train_all(rank: int, size: int) -> list[Outcome]:
    return [train(rank, size, {1: at}, {}) for at in TIMES]


def test_one_that_abstains_equals_the_twin(tmp_path: Path) -> None:
    size = 3
    ranks = run_ranks(train_all, size, tmp_path)
    for i, at in enumerate(TIMES):
        expected = play(size, {1: at}, ranks[0][i].names)
        for rank, outcomes in enumerate(ranks):
            got, first = outcomes[i], ranks[0][i]
            assert not got.error
            assert_same(got, expected[rank], (rank, at))
            assert all(bool(copy.isfinite().all()) for copies in got.outer for copy in copies)
            for name, tensor in first.local[-1].items():
                assert torch.equal(got.local[-1][name], tensor), "all end with the same"
            assert got.abstentions == first.abstentions
            assert sum(got.abstentions.values()) >= 1
            assert bool(got.told) == (rank == 1)
        sick = ranks[1][i].local[at - 1]
        assert not all(bool(tensor.isfinite().all()) for tensor in sick.values())
    (told,) = ranks[1][0].told
    assert "left out of the mean of fragment 2" in told
    assert "It continues from the global copy of fragments 0, 1, 2" in told


def assert_same(got: Outcome, expected: list[dict[str, Tensor]], case: Any) -> None:
    assert len(got.local) == STEPS + 1
    for step, (local, states) in enumerate(zip(got.local, expected, strict=True), 1):
        for name, tensor in states.items():
            same = torch.equal(bits(local[name]), bits(tensor)) or bool(tensor.isnan().all())
            assert same, (case, step, name)


def test_where_nobody_is_left_all_stop(tmp_path: Path) -> None:
    for outcome in run_ranks(train, 2, tmp_path, {0: 6, 1: 5}, {}):
        assert "replica 0 (rank 0), replica 1 (rank 1)" in outcome.error
        assert "No replica with finite weights is left" in outcome.error


# What of it is a mean, by shards too, with buffers


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.wide = nn.Linear(64, 256)
        self.norm = nn.BatchNorm1d(256)
        self.register_buffer("mask", torch.full((4,), -torch.inf))


def average(rank: int, size: int, wire_dtype: str) -> Any:
    """Rank 2's variance is Inf in the first exchange."""
    module, channel = Normed(), world(rank, size)
    changes = {
        "num_fragments": 1,
        "wire_dtype": wire_dtype,
        "mix": 0.5,
        "outer_optimizer": NESTEROV,
    }
    diloco = begin(module, channel, **changes)
    start = diloco.fragments[0].global_copy.clone()
    with torch.no_grad():
        module.norm.running_mean.fill_(1.0 + 2.0 * rank)
        module.wide.weight.add_(4.0 if rank == 2 else 0.5)
        if rank == 2:
            module.norm.running_var[3] = torch.inf
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(H + 1):
            diloco.after_step()
    way = diloco.transport.exchange(0).route.two_phase
    diloco.close()
    channel.close()
    landing = diloco.landings[0]
    moved = (diloco.fragments[0].global_copy - start)[0].item()
    return way, state_of(module), dict(module.named_buffers()), landing, moved


def test_by_shards_too_the_mean_is_over_the_others(tmp_path: Path) -> None:
    ranks = run_ranks(average, 3, tmp_path, "fp4")
    for rank, (way, weights, buffers, landing, moved) in enumerate(ranks):
        assert way, "in two phases"
        assert landing.abstentions == 1
        assert landing.cosine == pytest.approx(1.0)
        # a half, where rank 2 would have made it 5/3; the first Nesterov step of lr 0.7
        assert landing.gradient_norm == pytest.approx(0.5 * 128, rel=1e-6)
        assert moved == pytest.approx(0.5 * 0.7 * 1.9, rel=1e-5)
        mean = buffers["norm.running_mean"]
        assert torch.equal(mean, torch.full((256,), 2.0 if rank == 2 else (1.5, 2.5)[rank]))
        assert bool(buffers["norm.running_var"].isfinite().all())
        assert torch.equal(buffers["mask"], torch.full((4,), -torch.inf)), "a constant stays"
        assert bool(weights["wide.weight"].isfinite().all())


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 2.0**119, -(2.0**119)])
def test_values_that_no_codec_carries_count_as_nonfinite(value: float) -> None:
    module = Net()
    diloco = begin(module, alone())
    fragment = diloco.fragments[0]
    assert not is_nonfinite(fragment, fragment.outer_gradient())
    with torch.no_grad():
        fragment.local[-1].view(-1)[-1] = value
    assert is_nonfinite(fragment, fragment.outer_gradient())


# The inner optimizer


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_a_nonfinite_optimizer_state_is_reset(make: Any) -> None:
    momentum = {"momentum": 0.9} if make is torch.optim.SGD else {}
    sick, fresh, untouched = (nn.Parameter(torch.ones(3)) for _ in range(3))
    optimizer = make([sick, untouched], lr=0.1, **momentum)
    for value in (1.0, torch.nan):
        sick.grad, untouched.grad = torch.full((3,), value), torch.ones(3)
        optimizer.step()
    kept = {k: v.clone() for k, v in optimizer.state[untouched].items()}
    reset_nonfinite_state([optimizer], [sick, untouched])
    with torch.no_grad():
        sick.fill_(1.0)
    for name, tensor in kept.items():
        assert torch.equal(optimizer.state[untouched][name], tensor)
    other = make([fresh], lr=0.1, **momentum)
    for value in (0.5, -0.25):
        for one, parameter in ((optimizer, sick), (other, fresh)):
            untouched.grad = None
            parameter.grad = torch.full((3,), value)
            one.step()
    assert torch.equal(sick, fresh)
