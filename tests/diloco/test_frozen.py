"""What no fragment holds joins while a fit runs: thawed parameters, and frozen ones that move."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_commfree.comm.channel import Channel
from lightning_commfree.diloco import (
    DiLoCoSettings,
    StreamingDiLoCo,
    split_into_fragments,
)
from lightning_commfree.diloco.transport import FixedTransport
from tests.diloco.serial import SerialDiLoCo
from tests.diloco.training import ADAMW, DEFAULTS, NESTEROV, Net, backward, bits, state_of, world
from tests.world import run_ranks

STEPS = 15


def begin(module: nn.Module, channel: Channel, **changes: Any) -> StreamingDiLoCo:
    settings = DiLoCoSettings(**{**DEFAULTS, "num_fragments": 2, **changes})
    fragments = split_into_fragments(module, settings.num_fragments, settings.fragment_pattern)
    return StreamingDiLoCo(module, fragments, settings, FixedTransport(channel))


@dataclass
class Outcome:
    local: list[dict[str, Tensor]] = field(default_factory=list)  # after every step and `finish`
    outer: list[list[Tensor]] = field(default_factory=list)
    names: list[list[str]] = field(default_factory=list)
    error: str = ""


# Thawed

THAWED = ["embed.weight", "embed.bias"]
CASES = [  # sync_every, overlap_steps, thawed before step
    *product((4,), (0, 1, 3), (1, 4, 7)),  # first, at a launch, after a landing
    (4, 1, STEPS),
    (6, 1, 9),
]


def frozen() -> Net:
    module = Net()
    module.embed.requires_grad_(False)
    return module


def thaw(rank: int, size: int, changes: dict[str, Any], at: dict[int, int]) -> Outcome:
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


def test_thawed_parameters_equal_the_twin_after_every_step(tmp_path: Path) -> None:
    size = 3
    ranks = run_ranks(thaw_all, size, tmp_path)
    for i, (every, overlap, at) in enumerate(CASES):
        for outcomes in ranks:
            assert not outcomes[i].error, (every, overlap, at)
            assert outcomes[i].names[2] == THAWED
            for name, tensor in ranks[0][i].local[-1].items():
                assert torch.equal(outcomes[i].local[-1][name], tensor), "all end with the same"
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


def thaw_apart(rank: int, size: int) -> list[list[Outcome]]:
    """Fragment 0 leaves after steps 4, 8 and 12, fragment 1 after 6, 10 and 14."""
    both = ({0: 5, 1: 8}, {0: 7, 1: 8})
    return [[thaw(rank, size, {"overlap_steps": overlap}, at) for at in both] for overlap in (1, 3)]


def test_ranks_that_thaw_at_different_steps_are_told(tmp_path: Path) -> None:
    for outcomes in run_ranks(thaw_apart, 2, tmp_path):
        for apart, before_the_same_launch in outcomes:
            assert "The replicas froze or unfroze different" in apart.error
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
    rank: int,
    size: int,
    validated_at: tuple[int, ...] = (),
    nan_at: int = 0,
    changes: dict[str, Any] | None = None,
) -> tuple[list[dict[str, Tensor]], list[int]]:
    """Return the parameters after every step, the validation after it, and `finish`; and bytes."""
    torch.manual_seed(0)
    module, channel = WithTeacher(), world(rank, size)
    diloco = begin(module, channel, **(changes or {}))
    optimizer = ADAMW(module.student.parameters())
    local, sent = [], []
    for step in range(1, STEPS + 1):
        backward(module.student, rank, step)
        optimizer.step()
        if step == nan_at and rank == 1:
            module.student.embed.weight.data.fill_(torch.nan)
            module.teacher.head.weight.data.fill_(torch.nan)
        diloco.after_step()
        module.follow()
        if step in validated_at:
            diloco.average_moved()
        local.append(state_of(module))
        sent.append(channel.ledger.bytes_by_tag["moved"])
    diloco.finish()
    local.append(state_of(module))
    diloco.close()
    channel.close()
    return local, sent


def names_of_teacher() -> list[str]:
    return [name for name, _ in WithTeacher().named_parameters() if name.startswith("teacher.")]


def test_a_teacher_is_averaged_at_a_validation_and_at_the_end(tmp_path: Path) -> None:
    """In fp32 also where the wire is fp4; in between each replica has its own, and sends none."""
    ranks = run_ranks(move, 3, tmp_path, (6, 10), 0, {"wire_dtype": "fp4"})
    for _, sent in ranks:
        assert [sent[5 - 1], sent[10 - 1] - sent[9 - 1]] == [0, sent[6 - 1]]
        assert sent[6 - 1] > 0
    for name in names_of_teacher():
        teachers = [WithTeacher().get_parameter(name).detach()] * 3
        for step in range(1, STEPS + 1):
            for m, (local, _) in enumerate(ranks):
                student = local[step - 1][name.replace("teacher", "student")]
                teachers[m] = teachers[m] * 0.9 + student * 0.1
            if step in (6, 10):
                teachers = [(teachers[0] + teachers[1] + teachers[2]) / 3] * 3
            for m, (local, _) in enumerate(ranks):
                assert torch.equal(local[step - 1][name], teachers[m]), (step, name, m)
        assert not torch.equal(teachers[0], teachers[1]), "before the end each has its own"
        mean = (teachers[0] + teachers[1] + teachers[2]) / 3
        assert all(torch.equal(local[-1][name], mean) for local, _ in ranks)
    for name, tensor in ranks[0][0][-1].items():
        assert torch.equal(ranks[1][0][-1][name], tensor), "all end with the same"


def move_with_nan(rank: int, size: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return move(rank, size, (6,), 3, {"nonfinite": "abstain"})


def test_a_teacher_with_nan_does_not_count(tmp_path: Path) -> None:
    ranks = run_ranks(move_with_nan, 3, tmp_path)
    name = "teacher.head.weight"
    assert not bool(ranks[1][0][4][name].isfinite().all())
    for local, _ in ranks:
        assert torch.equal(local[5][name], ranks[0][0][5][name])
        assert all(bool(tensor.isfinite().all()) for tensor in local[-1].values())


class Wide(nn.Module):
    """Large enough for two phases, in a thread that is busy when the teacher is averaged."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.student, self.more = nn.Linear(200, 200), nn.Linear(200, 200)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)


def move_beside_flights(rank: int, size: int) -> tuple[list[bool], list[int], Tensor]:
    module, channel = Wide(), world(rank, size)
    changes = {"wire_dtype": "fp4", "fragment_pattern": "balanced", "overlap_steps": 3}
    diloco = begin(module, channel, **changes)
    for _ in range(9):
        with torch.no_grad():
            module.student.weight.add_(0.01 * (rank + 1))
            module.more.weight.sub_(0.02 * (rank + 1))
        diloco.after_step()
        with torch.no_grad():
            module.teacher.weight.lerp_(module.student.weight, 0.3)
    flying = diloco.in_flight
    diloco.average_moved()
    routes = [diloco.transport.exchange(p).route.two_phase for p in range(2)]
    diloco.close()
    channel.close()
    return routes, flying, module.teacher.weight.detach()


def test_a_teacher_is_averaged_beside_fragments_in_flight(tmp_path: Path) -> None:
    ranks = run_ranks(move_beside_flights, 3, tmp_path)
    for routes, flying, teacher in ranks:
        assert routes == [True, True]
        assert flying
        assert torch.equal(teacher, ranks[0][2])
