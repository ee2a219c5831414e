"""SignMuon: matrices vote with the signs of a Newton-Schulz direction, all else as in Lion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.exchange import View
from lightning_commfree.comm.ledger import Ledger
from lightning_commfree.lion import DistributedLion, LionSettings
from lightning_commfree.lion.worker import _newton_schulz_in_bf16, newton_schulz
from tests.cuda_walk import CudaWalk
from tests.lion import training
from tests.lion.training import Run, Worker, assert_same, assert_same_steps, play
from tests.world import run_ranks

STEPS = 12
LION = training.groups


def with_muon(named: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**group, "ns_steps": 3} for group in LION(named)]


def train(rank: int, size: int) -> tuple[Run, str]:
    """Train with small buckets; then let one rank take another number of iterations."""
    with pytest.MonkeyPatch.context() as patch:
        training.small_buckets(patch)
        patch.setattr(training, "groups", with_muon)
        channel = Channel.open([list(range(size))], rank, Ledger())
        run = Worker(channel, LionSettings(check_drift_every=1)).train(STEPS)
        one = Worker(channel, LionSettings())
        one.lion.param_groups[0]["ns_steps"] += rank
        with pytest.raises(RuntimeError) as error:
            one.step(training.gradients(0, rank))
        one.lion.leave()
        channel.close()
    return run, str(error.value)


def test_every_step_equals_the_twin_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lion = play(2, STEPS)
    monkeypatch.setattr(training, "groups", with_muon)
    twin = play(2, STEPS)
    for rank, (run, refusal) in enumerate(run_ranks(train, 2, tmp_path)):
        assert_same_steps(run, twin, rank)
        assert "different learning rates" in refusal
        assert f"ns_steps {3 + rank}" in refusal
    assert_same(
        {n: twin.seen[-1][n] for n in ("bias", "scale", "conv")},
        {n: lion.seen[-1][n] for n in ("bias", "scale", "conv")},
    )
    assert not torch.equal(twin.seen[-1]["head"], lion.seen[-1]["head"]), "matrices vote as before"


@pytest.mark.parametrize("shape", [(8, 20), (20, 8), (6, 6)])
def test_newton_schulz_brings_singular_values_near_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    u, s, v = torch.linalg.svd(newton_schulz(matrix, 5), full_matrices=False)
    assert float(s.min()) > 0.5
    assert float(s.max()) < 1.3
    exact = torch.linalg.svd(matrix, full_matrices=False)
    torch.testing.assert_close(u @ v, exact[0] @ exact[2], rtol=0, atol=1e-4)


class Products(TorchDispatchMode):
    """Collects the dtypes of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "mm" in func.name():
            self.dtypes.add(args[-1].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("dtype", "products"), [(torch.float32, torch.bfloat16), (torch.float64, torch.float64)]
)
def test_on_a_gpu_products_are_in_bf16(dtype: torch.dtype, products: torch.dtype) -> None:
    with CudaWalk() as walk, Products() as found:
        result = newton_schulz(torch.empty(20, 8, device=walk.device, dtype=dtype), 5)
    assert (result.shape, result.dtype) == ((20, 8), dtype)
    assert found.dtypes == {products}
    assert walk.questions == []


def test_iterations_in_bf16_vote_as_those_in_fp32() -> None:
    """Without a vote of 0: sums that are rounded one by one have 154 here, and differ in 0.7 %."""
    matrix = torch.randn(256, 256, generator=torch.Generator().manual_seed(1))
    exact, found = newton_schulz(matrix, 5), _newton_schulz_in_bf16(matrix / matrix.norm(), 5)
    assert found.dtype == torch.float32
    assert found.count_nonzero() == matrix.numel()
    assert float((found.sign() != exact.sign()).float().mean()) < 0.005
    assert float(torch.linalg.matrix_norm(found, 2)) < 1.3


def test_a_bf16_matrix_votes_in_fp32_and_a_zero_gradient_moves_nothing() -> None:
    matrix = torch.nn.Parameter(torch.ones(4, 3, dtype=torch.bfloat16))
    lion = DistributedLion([matrix], lr=0.5, ns_steps=5)
    lion.join([("matrix", matrix)], View.of(Channel([0], 0, Ledger())), LionSettings())
    matrix.grad = torch.zeros_like(matrix)
    lion.step()
    assert torch.equal(matrix, torch.ones_like(matrix))
    matrix.grad = torch.randn(4, 3, generator=torch.Generator().manual_seed(2)).bfloat16()
    lion.step()
    expected = 1 - 0.5 * newton_schulz(matrix.grad.float() * (1 - 0.9), 5).sign()
    assert torch.equal(matrix.float(), expected)


@pytest.mark.parametrize("wrong", [-1, 2.5])
def test_a_number_of_iterations_that_is_none(wrong: Any) -> None:
    with pytest.raises(ValueError, match=rf"`ns_steps={wrong}` must be an integer: 0 for Lion"):
        DistributedLion([torch.nn.Parameter(torch.ones(2, 2))], ns_steps=wrong)
