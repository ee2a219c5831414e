"""What a worker does alone: its ballot against numpy, its step against the formulas, bit by bit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_commfree.lion import worker
from lightning_commfree.lion.ballot import header_bytes, read_headers
from lightning_commfree.lion.buckets import Bucket, split_into_buckets
from lightning_commfree.lion.vote import PackedDelta
from lightning_commfree.lion.worker import (
    _CHUNK,
    FlatMomenta,
    LionParam,
    cast_ballot,
    take_step,
)
from tests.lion.ballots import valid_of
from tests.planes import pack_bits

GROUP = {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.5}
EVERY_LAYOUT = ["flat", "channels_last", "transposed", "strided"]


@pytest.fixture(autouse=True, params=["compiled", "torch"])
def _both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the compiled loops, and with torch operations as on a GPU or without numba."""
    if request.param == "torch":
        monkeypatch.setattr(worker, "_loops", lambda run: None)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def laid_out(values: Tensor, layout: str) -> Tensor:
    """The same values of four dimensions, otherwise in memory."""
    if layout == "channels_last":
        return values.to(memory_format=torch.channels_last)
    if layout == "transposed":
        return values.mT.contiguous().mT
    return torch.stack([values, values], -1)[..., 0] if layout == "strided" else values


def member(values: Tensor, gradient: Tensor | None, momentum: Tensor, **state: Any) -> LionParam:
    parameter = nn.Parameter(values)
    parameter.grad = gradient
    return LionParam(parameter, {"momentum": momentum.clone(), **state}, dict(GROUP))


def bucket_of(members: Sequence[LionParam]) -> Bucket:
    named = [(f"p{i}", m.parameter) for i, m in enumerate(members)][::-1]
    return split_into_buckets(named, 2, min_numel=1 << 40)[0]


def ballot(members: list[LionParam], stop: bool = False, digest: int = 0) -> tuple[Any, Any, Any]:
    """Return what the header says, and the planes of c > 0 and c != 0 as flags in order."""
    bucket = bucket_of(members)
    momenta = FlatMomenta().of(members)
    raw = cast_ballot(bucket, members, valid_of(bucket), stop, digest, momenta)
    cut = header_bytes(len(bucket.parameters))
    assert raw.numel() == cut + 2 * bucket.plane_bytes
    summary = read_headers(raw[:cut].unsqueeze(0), len(bucket.parameters))
    return summary, *(flags(plane, bucket) for plane in raw[cut:].view(2, -1))


def flags(plane: Tensor, bucket: Bucket) -> np.ndarray:
    """All places, padding too; numpy knows nothing of our packing."""
    rows = np.unpackbits(plane.numpy().reshape(1, -1), axis=0, bitorder="little")
    return rows.reshape(-1).astype(bool)


def assert_flags(got: np.ndarray, expected: Tensor) -> None:
    assert np.array_equal(got[: expected.numel()], expected.numpy())
    assert not got[expected.numel() :].any(), "padding is 0"


@pytest.mark.parametrize("numel", [1, 63, 64, 65, 127, 129, _CHUNK - 1, _CHUNK, _CHUNK + 1])
def test_a_vote_is_the_sign_of_the_direction(numel: int) -> None:
    """c = b1 m + (1 - b1) g in fp32, each operation rounding once; lengths about a chunk's."""
    m, g = random(numel, seed=1), random(numel, seed=2)
    g[: numel // 3] = -m[: numel // 3] * 9  # c is nearly 0 there: rounding decides
    c = m.numpy() * np.float32(0.9) + g.numpy() * np.float32(1 - 0.9)
    small = member(random(5), random(5), random(5, seed=9))
    last = torch.tensor(small.state["momentum"].numpy() * np.float32(0.9))
    last += small.parameter.grad * (1 - 0.9)
    c = torch.cat([torch.from_numpy(c), last])
    summary, plus, nonzero = ballot([member(random(numel), g, m), small])
    assert_flags(plus, c > 0)
    assert_flags(nonzero, c != 0)
    assert summary.zeros == int((c == 0).sum())


@pytest.mark.parametrize("layout", EVERY_LAYOUT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_layout_votes_and_steps_as_a_flat_one(layout: str, dtype: torch.dtype) -> None:
    """Parameter and gradient may each have their own."""
    values, g, m = (random(3, 4, 5, 6, seed=s) for s in range(3))
    packed_delta = packed((random(360, seed=5) > 0).float() * 2 - 1)
    outcomes = []
    for own, other in (("flat", "flat"), (layout, layout), (layout, "flat"), ("flat", layout)):
        parameter = laid_out(values.to(dtype), own)
        master = {} if dtype == torch.float32 else {"master": values.to(dtype).float()}
        mine = member(parameter, laid_out(g.to(dtype), other), m, **master)
        cast = ballot([mine])
        take_step(bucket_of([mine]), [mine], packed_delta, (True,), abstained=False)
        assert mine.parameter.stride() == parameter.stride()
        outcomes.append((cast, mine.parameter.detach(), mine.state["momentum"]))
    (summary, plus, nonzero), stepped, momentum = outcomes[0]
    for other_cast, other_stepped, other_momentum in outcomes[1:]:
        assert other_cast[0] == summary
        assert np.array_equal(other_cast[1], plus)
        assert np.array_equal(other_cast[2], nonzero)
        assert torch.equal(other_stepped, stepped)
        assert torch.equal(other_momentum, momentum)


def absent(numel: int) -> LionParam:
    return member(random(numel), None, random(numel, seed=4))


def test_without_a_gradient_the_vote_is_zero_whatever_the_momentum() -> None:
    summary, plus, nonzero = ballot([member(random(70), random(70), random(70)), absent(9)])
    assert summary.with_gradient == (True, False)
    assert summary.zeros
    assert not plus[70:].any()
    assert not nonzero[70:].any()
    assert nonzero[:70].all()


@pytest.mark.parametrize("sick", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["gradient", "momentum"])
@pytest.mark.parametrize("place", [0, 40, _CHUNK + 7])
def test_nonfinite_gradients_and_momenta_are_marked(sick: float, where: str, place: int) -> None:
    g, m = random(_CHUNK + 8), random(_CHUNK + 8, seed=1)
    (g if where == "gradient" else m)[place] = sick
    members = [member(random(9), random(9), random(9)), member(g, g, m), absent(3)]
    summary, _, _ = ballot(members)
    assert summary.abstaining == (0,)
    assert summary.faults == ((0, 1),)
    assert summary.with_gradient == (True, True, False)


def test_parameters_without_a_value_take_part() -> None:
    """`nn.Parameter(torch.empty(0))` as placeholder, and one of no dimension."""
    empty = member(torch.empty(0, 3), torch.empty(0, 3), torch.empty(0, 3))
    scalar = member(torch.tensor(1.0), torch.tensor(2.0), torch.tensor(0.0))
    summary, plus, _ = ballot([empty, scalar])
    assert not summary.abstaining
    assert plus[0]
    bucket = bucket_of([empty, scalar])
    take_step(bucket, [empty, scalar], packed(torch.ones(1)), (True, True), abstained=False)
    assert scalar.parameter.item() == pytest.approx(1 - 0.01 * 0.5 - 0.01)


# The step


def packed(delta: Tensor) -> PackedDelta:
    """Delta of -1, 0 and 1 as a majority's two planes."""
    return PackedDelta(torch.stack([pack_bits(delta > 0), pack_bits(delta == 0)]), (2, 1), 1)


def by_hand(x: Tensor, m: Tensor, g: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """In numpy, where nothing is fused: decay, then vote; the new momentum beside it."""
    lr, decay, b2 = (np.float32(v) for v in (1 - 0.01 * 0.5, 0.01, 0.99))
    stepped = x.numpy() * lr - delta.numpy() * decay
    momentum = m.numpy() * b2 + g.numpy() * np.float32(1 - 0.99)
    return torch.from_numpy(stepped), torch.from_numpy(momentum)


@pytest.mark.parametrize("numel", [1, 65, _CHUNK + 1])
def test_a_step_rounds_as_its_formulas(numel: int) -> None:
    x, m, g = (random(numel, seed=s) for s in range(3))
    delta = torch.randint(-1, 2, (numel,), generator=torch.Generator().manual_seed(3)).float()
    mine = member(x.clone(), g, m)
    take_step(bucket_of([mine]), [mine], packed(delta), (True,), abstained=False)
    stepped, momentum = by_hand(x, m, g, delta)
    assert torch.equal(mine.parameter, stepped)
    assert torch.equal(mine.state["momentum"], momentum)
    if numel > 65:  # the likely mistakes differ: coupled decay, and a fused multiply-add
        assert not torch.equal(stepped, (x - delta * 0.01) * (1 - 0.01 * 0.5))
        fused = (
            x.double() * np.float32(1 - 0.01 * 0.5) - delta.double() * np.float32(0.01)
        ).float()
        assert not torch.equal(stepped, fused)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_gpu_votes_and_steps_with_the_cpus_bits(dtype: torch.dtype) -> None:
    exact = torch.promote_types(dtype, torch.float32)
    outcomes = []
    for device in ("cpu", "cuda"):
        values, g, m = (random(4, 7, 9, 300, seed=s).to(device) for s in range(3))
        g[0, 0, 0, :20], m[0, 0, 0, :20] = 0.0, 0.0
        values, g, m = values.to(dtype), g.to(dtype), m.to(exact)
        master = {} if dtype == exact else {"master": values.to(exact)}
        mine = member(values, g, m, **master)
        bucket = bucket_of([mine])
        raw = cast_ballot(bucket, [mine], valid_of(bucket).to(device), False, 5)
        delta = (random(values.numel(), seed=5) > 0).float() * 2 - 1
        packed_delta = packed(delta).to(torch.device(device))
        take_step(bucket, [mine], packed_delta, (True,), abstained=False)
        outcomes.append([raw, mine.parameter.detach(), *mine.state.values()])
    for on_cpu, on_gpu in zip(*outcomes, strict=True):
        assert torch.equal(on_cpu, on_gpu.cpu())
