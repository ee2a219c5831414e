"""What no fragment holds joins while a fit runs: thawed parameters, and frozen ones that move."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_commfree.comm.channel import Channel
from lightning_commfree.diloco import (
    DiLoCoSettings,
    EagerDiLoCo,
    StreamingDiLoCo,
    split_into_fragments,
)
from lightning_commfree.diloco.exchange import ShardedFragmentExchange
from tests.diloco.serial import SerialDiLoCo
from tests.diloco.training import ADAMW, DEFAULTS, NESTEROV, Net, backward, bits, state_of, world
from tests.world import run_ranks

STEPS = 15


def begin(module: nn.Module, channel: Channel, **changes: Any) -> StreamingDiLoCo:
    settings = DiLoCoSettings(**{**DEFAULTS, "num_fragments": 2, **changes})
    fragments = split_into_fragments(module, settings.num_fragments, settings.fragment_pattern)
    algorithm = EagerDiLoCo if settings.eager else StreamingDiLoCo
    return algorithm(module, fragments, settings, channel)


@dataclass
class Outcome:
    local: list[dict[str, Tensor]] = field(default_factory=list)  # after every step and `finish`
    outer: list[list[Tensor]] = field(default_factory=list)
    names: list[list[str]] = field(default_factory=list)
    error: str = ""


# Thawed

THAWED = ["embed.weight", "embed.bias"]
CASES = [  # sync_every, overlap_steps, thawed before step
    *product((4,), (0, 1, 3), (1, 3, 4, 5, 6, 7, STEPS)),
    (6, 1, 9),
    (5, "eager", 4),
    (5, "eager", 8),
]


def frozen() -> Net:
    module = Net()
    module.embed.requires_grad_(False)
    return module


def thaw(
    rank: int, size: int, changes: dict[str, Any], at: dict[int, int], resume_at: int = 0
) -> Outcome:
    """Train; with `resume_at` go on from there with new objects and the state of the old ones."""
    module, channel, outcome = frozen(), world(rank, size), Outcome()
    diloco, optimizer = begin(module, channel, **changes), ADAMW(module.parameters())
    try:
        for step in range(1, STEPS + 1):
            if step == at.get(rank):
                module.embed.requires_grad_(True)
            with diloco.stepping():
                backward(module, rank, step)
                optimizer.step()
            diloco.after_step()
            outcome.local.append(state_of(module))
            outcome.outer.append([f.global_copy.clone() for f in diloco.fragments])
            if step == resume_at:
                state, inner = diloco.state_dict(), optimizer.state_dict()
                diloco.close()
                module = frozen()
                diloco, optimizer = begin(module, channel, **changes), ADAMW(module.parameters())
                diloco.load_state_dict(*state)
                optimizer.load_state_dict(inner)
        diloco.finish()
        outcome.local.append(state_of(module))
    except (RuntimeError, ValueError) as error:
        outcome.error = str(error)
    outcome.names = [list(f.fragment.parameters) for f in diloco.fragments]
    diloco.close()
    channel.close()
    return outcome


def thaw_all(rank: int, size: int) -> list[Outcome]:
    both = [dict.fromkeys(range(size), at) for *_, at in CASES]
    return [
        thaw(rank, size, {"sync_every": every, "overlap_steps": overlap}, at)
        for (every, overlap, _), at in zip(CASES, both, strict=True)
    ]


def play(
    size: int, sync_every: int, overlap_steps: int, at: int, names: list[list[str]]
) -> list[tuple[list[dict[str, Tensor]], list[Tensor]]]:
    """Return the replicas' parameters and the global copies after every step and `finish`."""
    modules = [frozen() for _ in range(size)]
    optimizers = [ADAMW(module.parameters()) for module in modules]

    def inner_step(m: int, step: int) -> None:
        backward(modules[m], m, step)
        optimizers[m].step()

    twin = SerialDiLoCo(modules, inner_step, names, sync_every, overlap_steps, 0.5, NESTEROV)
    seen = []
    for step in range(1, STEPS + 2):
        if step == at:
            for module in modules:
                module.embed.requires_grad_(True)
            twin.thaw(THAWED)
        twin.run_step() if step <= STEPS else twin.finish()
        outer = [torch.cat([twin.outer[n].detach().flatten() for n in f]) for f in twin.fragments]
        seen.append(([state_of(module) for module in modules], outer))
    return seen


@pytest.mark.parametrize("size", [2, 3])
def test_what_is_thawed_equals_the_twin_after_every_step(size: int, tmp_path: Path) -> None:
    ranks = run_ranks(thaw_all, size, tmp_path)
    for i, (every, overlap, at) in enumerate(CASES):
        for outcomes in ranks:
            assert not outcomes[i].error, (every, overlap, at)
            assert outcomes[i].names[2] == THAWED
            for name, tensor in ranks[0][i].local[-1].items():
                assert torch.equal(outcomes[i].local[-1][name], tensor), "all end with the same"
        if overlap == "eager":
            continue
        expected = play(size, every, overlap, at, ranks[0][i].names[:2])
        for rank, outcomes in enumerate(ranks):
            assert_same(outcomes[i], rank, expected, (every, overlap, at))


def assert_same(got: Outcome, rank: int, expected: Any, case: Any) -> None:
    for step, (local, outer) in enumerate(expected, 1):
        for name, tensor in local[rank].items():
            assert torch.equal(bits(got.local[step - 1][name]), bits(tensor)), (case, step, name)
        if step <= STEPS:
            for mine, theirs in zip(got.outer[step - 1], outer, strict=True):
                assert torch.equal(mine, theirs), (case, step)


def thaw_and_resume(rank: int, size: int) -> list[tuple[Outcome, Outcome]]:
    changes: list[dict[str, Any]] = [{}, {"overlap_steps": 3}, {"overlap_steps": "eager"}]
    at = dict.fromkeys(range(size), 6)
    return [
        (thaw(rank, size, one, at), thaw(rank, size, one, at, resume_at))
        for one in changes
        for resume_at in (6, 7, 11, 12)
    ]


def test_a_state_after_the_thaw_goes_on_exactly(tmp_path: Path) -> None:
    for outcomes in run_ranks(thaw_and_resume, 2, tmp_path):
        for straight, resumed in outcomes:
            assert not straight.error
            assert not resumed.error
            assert straight.names == resumed.names
            for one, other in zip(straight.local, resumed.local, strict=True):
                for name, tensor in one.items():
                    assert torch.equal(other[name], tensor), name


def thaw_apart(rank: int, size: int) -> list[list[Outcome]]:
    """Fragment 0 leaves after steps 4, 8 and 12, fragment 1 after 6, 10 and 14."""
    both = ({0: 5, 1: 8}, {0: 7, 1: 8})
    return [
        [thaw(rank, size, {"overlap_steps": overlap}, at) for at in both]
        for overlap in (1, "eager")
    ]


def test_ranks_that_thaw_at_different_steps_are_told(tmp_path: Path) -> None:
    for outcomes in run_ranks(thaw_apart, 2, tmp_path):
        for apart, before_the_same_launch in outcomes:
            assert "The ranks of this job do not agree" in apart.error
            assert "what has joined as fragment 2 is " in apart.error
            assert "embed.weight" in apart.error
            assert not before_the_same_launch.error


# Moved


class WithTeacher(nn.Module):
    """A teacher follows the student; a backbone is frozen and nobody moves it."""

    def __init__(self) -> None:
        super().__init__()
        self.student = Net()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.backbone = nn.Linear(300, 300).requires_grad_(False)

    @torch.no_grad()
    def follow(self) -> None:
        for mine, theirs in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            # as MoCo writes it: neither in place nor seen by a version counter
            mine.data = mine.data * 0.9 + theirs.data * 0.1


def move(
    rank: int, size: int, steps: int, resume_at: int, changes: dict[str, Any], nan_at: int = 0
) -> Any:
    torch.manual_seed(0)
    module, channel = WithTeacher(), world(rank, size)
    diloco, optimizer = begin(module, channel, **changes), ADAMW(module.student.parameters())
    local, shown, sent = [], [], []
    for step in range(1, steps + 1):
        backward(module.student, rank, step)
        optimizer.step()
        if step == nan_at and rank == 1:
            module.student.embed.weight.data.fill_(torch.nan)
            module.student.head.weight.data.fill_(torch.nan)
        diloco.after_step()
        module.follow()
        local.append(state_of(module))
        sent.append(channel.ledger.bytes_sent)
        with diloco.weight_swap.outer_weights():
            shown.append(state_of(module))
        if step == resume_at:
            state, kept = diloco.state_dict(), copy.deepcopy(module)
            diloco.close()
            diloco, module = begin(kept, channel, **changes), kept
            optimizer_state = optimizer.state_dict()
            optimizer = ADAMW(module.student.parameters())
            optimizer.load_state_dict(optimizer_state)
            diloco.load_state_dict(*state)
    diloco.finish()
    local.append(state_of(module))
    joined = [one.fragment.buffers for one in diloco.fragments if not one.fragment.parameters]
    diloco.close()
    channel.close()
    return local, shown, sent, joined


def names_of_teacher() -> list[str]:
    return [name for name, _ in WithTeacher().named_parameters() if name.startswith("teacher.")]


def test_a_teacher_is_averaged_from_the_first_difference_on(tmp_path: Path) -> None:
    """H = 4: fragment 0 leaves after step 4 and lands after 5; the teacher leaves after 9 and 13,
    as it is before it follows the student, and lands one step later."""
    ranks = run_ranks(move, 2, tmp_path, STEPS, 0, {})
    assert [joined for *_, joined in ranks] == [[tuple(names_of_teacher())]] * 2
    for name in names_of_teacher():
        start = WithTeacher().get_parameter(name).detach()
        teachers, average = [start, start], start
        for step in range(1, STEPS + 1):
            if step in (5, 9, 13):
                leaves = (teachers[0] + teachers[1]) / 2
            if step in (5, 10, 14):
                average = leaves
                teachers = [torch.lerp(teacher, average, 0.5) for teacher in teachers]
            for m, (local, shown, *_) in enumerate(ranks):
                student = local[step - 1][name.replace("teacher", "student")]
                teachers[m] = teachers[m] * 0.9 + student * 0.1
                assert torch.equal(local[step - 1][name], teachers[m]), (step, name, m)
                outer = average if step >= 5 else teachers[m]
                assert torch.equal(shown[step - 1][name], outer), (step, name)
    for name, tensor in ranks[0][0][-1].items():
        assert torch.equal(ranks[1][0][-1][name], tensor), "all end with the same"


def move_with_nan(rank: int, size: int) -> Any:
    """Replica 1's student and teacher are NaN before it is known that teachers differ."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return move(rank, size, STEPS, 0, {"nonfinite": "abstain"}, nan_at=3)


def test_a_teacher_with_nan_does_not_count(tmp_path: Path) -> None:
    ranks = run_ranks(move_with_nan, 3, tmp_path)
    (healthy, *_), (sick, *_), (other, *_) = ranks
    name = "teacher.head.weight"
    assert not bool(sick[3][name].isfinite().all())
    average = (healthy[3][name] + other[3][name]) / 2  # when fragment 0 lands
    assert torch.equal(ranks[0][1][4][name], average)
    for local, *_ in ranks:
        assert all(bool(tensor.isfinite().all()) for tensor in local[-1].values())
        assert torch.equal(local[-1][name], healthy[-1][name])


WAYS: list[dict[str, Any]] = [{}, {"overlap_steps": "eager"}, {"wire_dtype": "fp4"}]


def move_all(rank: int, size: int) -> Any:
    """A fit that ends before the first exchange; a longer one, straight and resumed."""
    return [
        [move(rank, size, steps, at, changes) for steps, at in ((2, 0), (STEPS, 0), (STEPS, 7))]
        for changes in WAYS
    ]


def test_a_teacher_ends_equal_on_all_ranks_and_is_resumed_exactly(tmp_path: Path) -> None:
    ranks = run_ranks(move_all, 3, tmp_path)
    last = "teacher.head.weight"
    for i, changes in enumerate(WAYS):
        for short, straight, resumed in (rank[i] for rank in ranks):
            for got, first in ((short, ranks[0][i][0]), (straight, ranks[0][i][1])):
                for name, tensor in first[0][-1].items():
                    assert torch.equal(got[0][-1][name], tensor), (changes, name)
            for state, again in zip(straight[0], resumed[0], strict=True):
                for name, tensor in state.items():
                    assert torch.equal(again[name], tensor), (changes, name)
        one, other = (rank[i][1][0][-2][last] for rank in ranks[:2])
        assert not torch.equal(one, other), "before the end each has its own"


class Wide(nn.Module):
    """Large enough to go by shards, in a thread that is busy when the teacher joins."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.student, self.more = nn.Linear(200, 200), nn.Linear(200, 200)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)


def move_by_shards(rank: int, size: int) -> tuple[list[type], Tensor]:
    module, channel = Wide(), world(rank, size)
    changes = {"wire_dtype": "fp4", "fragment_pattern": "balanced", "overlap_steps": 3}
    diloco = begin(module, channel, **changes)
    for _ in range(11):
        with torch.no_grad():
            module.student.weight.add_(0.01 * (rank + 1))
            module.more.weight.sub_(0.02 * (rank + 1))
        diloco.after_step()
        with torch.no_grad():
            module.teacher.weight.lerp_(module.student.weight, 0.3)
    diloco.finish()
    ways = [type(exchange) for exchange in diloco._transfers.exchanges]
    diloco.close()
    channel.close()
    return ways, module.teacher.weight.detach()


def test_a_teacher_goes_by_shards_too(tmp_path: Path) -> None:
    ranks = run_ranks(move_by_shards, 3, tmp_path)
    for ways, teacher in ranks:
        assert ways == [ShardedFragmentExchange] * 3
        assert torch.equal(teacher, ranks[0][1])


def bytes_sent(rank: int, size: int, with_base: bool) -> list[int]:
    module, channel = Net(), world(rank, size)
    if with_base:
        module.base = nn.Linear(300, 300).requires_grad_(False)
    diloco = begin(module, channel)
    optimizer = ADAMW(p for p in module.parameters() if p.requires_grad)
    sent = []
    for step in range(1, STEPS + 1):
        backward(module, rank, step)
        optimizer.step()
        diloco.after_step()
        sent.append(channel.ledger.bytes_sent)
    diloco.finish()
    diloco.close()
    channel.close()
    return [*sent, channel.ledger.bytes_sent]


@pytest.mark.parametrize("size", [2, 3])
def test_what_is_frozen_and_nobody_moves_costs_no_byte(size: int, tmp_path: Path) -> None:
    without = run_ranks(bytes_sent, size, tmp_path, False)
    assert run_ranks(bytes_sent, size, tmp_path, True) == without
