"""The compiled loops of a worker against its torch operations, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from lightning_commfree.lion import worker
from lightning_commfree.lion.buckets import Bucket, split_into_buckets
from lightning_commfree.lion.vote import Average, Majority, PackedDelta, Rule
from lightning_commfree.lion.worker import FlatMomenta, LionParam, cast_ballot, take_step
from tests.lion.ballots import valid_of
from tests.lion.training import assert_same

SHAPES = [(70, 11), (3,), (), (0, 4), (129,), (worker._CHUNK + 5,), (64,)]
GROUPS = [
    {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.3},
    {"lr": 3e-5, "betas": (0.0, 0.5), "weight_decay": 0.0},
]


def wide(shape: tuple[int, ...], seed: int) -> Tensor:
    """Magnitudes from subnormal to large, and zeros of both signs."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    exponents = torch.randint(-149, 60, shape, generator=generator)
    values = torch.where(
        torch.rand(shape, generator=generator) < 0.3, values.ldexp(exponents), values
    )
    zero = torch.where(values > 0, 0.0, -0.0)
    return torch.where(torch.rand(shape, generator=generator) < 0.2, zero, values)


def worker_of(dtype: torch.dtype, device: str = "cpu") -> tuple[Bucket, list[LionParam]]:
    members = []
    for i, shape in enumerate(SHAPES):
        parameter = nn.Parameter(wide(shape, i).to(device, dtype))
        parameter.grad = None if i == 1 else wide(shape, 10 + i).to(device, dtype)
        state = {"momentum": wide(shape, 20 + i).to(device)}
        if dtype != torch.float32:
            state["master"] = parameter.detach().float()
        members.append(LionParam(parameter, state, GROUPS[i % 2]))
    named = [(f"p{i}", member.parameter) for i, member in enumerate(members)]
    (bucket,) = split_into_buckets(named[::-1], 3, min_numel=1 << 40)
    return bucket, members


def outcome(dtype: torch.dtype, rule: Rule, workers: int, zeros: bool) -> dict[str, Tensor]:
    bucket, members = worker_of(dtype)
    found = {
        "ballot": cast_ballot(bucket, members, valid_of(bucket), 0, 0, FlatMomenta().of(members))
    }
    weights = rule.weights(workers, zeros)
    generator = torch.Generator().manual_seed(workers)
    size = (len(weights), bucket.plane_bytes)
    planes = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
    delta = PackedDelta(planes, weights, rule.offset(workers))
    take_step(bucket, members, delta, (True, True, True, True, False, True, True), abstained=False)
    for i, member in enumerate(members):
        found[f"x{i}"] = member.parameter.detach()
        found |= {f"{key}{i}": value for key, value in member.state.items()}
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("rule", "workers"),
    [(Majority(), 3), (Average(), 1), (Average(), 3), (Average(), 63), (Average(), 64)],
)
def test_loops_and_torch_operations_agree_to_the_bit(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, rule: Rule, workers: int
) -> None:
    """With groups that share no setting, and a parameter without a gradient here."""
    used = []
    loops = worker._loops
    for zeros in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(worker, "_loops", lambda run: used.append(loops(run)) or used[-1])
            compiled = outcome(dtype, rule, workers, zeros)
            patch.setattr(worker, "_loops", lambda run: None)
            assert_same(compiled, outcome(dtype, rule, workers, zeros))
    assert used
    assert all(used), "the loops were used"


@pytest.mark.parametrize("way", ["loops", "torch", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("where", [0, worker._CHUNK + 1])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_each_way_marks_the_same_parameters(
    monkeypatch: pytest.MonkeyPatch, value: float, where: int, way: str
) -> None:
    device = "cuda" if way == "cuda" else "cpu"
    bucket, members = worker_of(torch.float32, device)
    members[5].parameter.grad[where] = value
    if way == "torch":
        monkeypatch.setattr(worker, "_loops", lambda run: None)
    raw = cast_ballot(bucket, members, valid_of(bucket).to(device), 0, 0)
    assert worker.marks_of(raw, len(members)).tolist() == [1, 0, 1, 0, 1, 3, 1]
