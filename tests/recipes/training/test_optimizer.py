from __future__ import annotations

import math

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn

from recipes.training.muon import muon_cosine
from recipes.training.optimizer import adamw_cosine, lion_betas, lion_cosine
from tests.cuda_walk import CudaWalk
from tests.kernels import KernelCount

FACTORIES = pytest.mark.parametrize("factory", [adamw_cosine, lion_cosine])


def _learning_rates(steps, factory, **kwargs):
    made = factory(nn.Linear(2, 2), **kwargs)
    optimizer, scheduler = made["optimizer"], made["lr_scheduler"]["scheduler"]
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@FACTORIES
def test_warm_up_and_cosine(factory) -> None:
    rates = _learning_rates(
        13, factory, total_steps=12, lr=2.0, warmup_steps=4, final_lr_fraction=0.1
    )
    assert rates[:5] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])
    assert rates[8] == pytest.approx(2.0 * (0.1 + 0.9 * 0.5)), "half of the way down"
    assert rates[12] == pytest.approx(0.2)
    assert rates[4:] == sorted(rates[4:], reverse=True)
    last = 2.0 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 7 / 8)))
    assert rates[11] == pytest.approx(last)


@FACTORIES
def test_matrices_decay_and_nothing_else_does(factory) -> None:
    module = nn.ModuleDict(
        {"embedding": nn.Embedding(3, 2), "norm": nn.LayerNorm(2), "linear": nn.Linear(2, 2)}
    )
    module["linear"].weight.requires_grad_(False)
    made = factory(module, total_steps=10, warmup_steps=1, weight_decay=0.3)
    decays, spared = made["optimizer"].param_groups
    assert decays["weight_decay"] == 0.3
    assert [p is module["embedding"].weight for p in decays["params"]] == [True]
    assert spared["weight_decay"] == 0.0
    assert len(spared["params"]) == 3, "the norm's two, the linear layer's bias; none is frozen"


def takes_fused_steps(optimizer: torch.optim.Optimizer) -> bool:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.empty_like(parameter)
    with KernelCount() as count:
        optimizer.step()
    divides = any("addcdiv" in kernel for kernel in count.kernels)  # AdamW in several kernels
    assert divides != ("aten::_fused_adamw_" in count.kernels)
    return not divides


def test_adamw_is_fused_where_all_parameters_are_on_cuda() -> None:
    module = nn.ModuleDict({"matrix": nn.Linear(4, 4, bias=False), "norm": nn.LayerNorm(4)})
    groups = adamw_cosine(module, 10)["optimizer"].param_groups
    assert [group["fused"] for group in groups] == [None, None], "as ever on a CPU"
    with CudaWalk() as walk:
        walk.on_cuda(module["norm"])
        assert not takes_fused_steps(adamw_cosine(module, 10)["optimizer"]), "some on a CPU"
        walk.on_cuda(module)
        assert takes_fused_steps(adamw_cosine(module, 10)["optimizer"])


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch before 2.9")
def test_adamw_beside_muon_is_fused_too() -> None:
    with CudaWalk() as walk:
        module = walk.on_cuda(nn.ModuleList([nn.Linear(4, 4), nn.Embedding(3, 4)]))
        assert takes_fused_steps(muon_cosine(module, 10)["optimizer"])


def test_lightning_clips_the_gradients_of_a_fused_adamw() -> None:
    """As `trainer=gpu` does, in bf16; before a step that unscales gradients itself it refuses."""
    precision = MixedPrecision("bf16-mixed", "cuda")
    with CudaWalk() as walk:
        module = walk.on_cuda(nn.Linear(4, 4))
        precision.clip_gradients(adamw_cosine(module, 10)["optimizer"], 1.0)
        by_constructor = torch.optim.AdamW(module.parameters(), fused=True)
        with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
            precision.clip_gradients(by_constructor, 1.0)


@pytest.mark.parametrize(
    ("steps", "betas"),
    [
        (100, (0.8, 0.9)),  # a shorter memory than has been tried is not taken
        (500, (0.8, 0.9)),
        (750, (0.8667, 0.9333)),
        (1000, (0.9, 0.95)),
        (2500, (0.9, 0.98)),
        (5000, (0.9, 0.99)),
        (1_000_000, (0.9, 0.99)),
    ],
)
def test_lions_betas_follow_the_length_of_the_run_unless_they_are_given(steps, betas) -> None:
    assert lion_betas(steps) == betas
    made = lion_cosine(nn.Linear(1, 1), steps, warmup_steps=0)
    assert made["optimizer"].defaults["betas"] == betas
    given = lion_cosine(nn.Linear(1, 1), steps, betas=(0.9, 0.99), warmup_steps=0)
    assert given["optimizer"].defaults["betas"] == (0.9, 0.99)


@FACTORIES
def test_a_run_without_length(factory) -> None:
    with pytest.raises(ValueError, match=r"total_steps=-1: .*Set `trainer.max_steps`"):
        factory(nn.Linear(1, 1), total_steps=-1)


@FACTORIES
@pytest.mark.parametrize(("steps", "warmup"), [(20, 4), (10_000, 100)])
def test_a_short_run_has_a_short_warm_up(factory, steps, warmup) -> None:
    """`trainer.max_steps=20` was refused until the warm-up was lowered by hand, too."""
    made = factory(nn.Linear(1, 1), total_steps=steps, lr=1.0)
    lr = made["lr_scheduler"]["scheduler"].lr_lambdas[0]
    assert [lr(0), lr(warmup - 1), lr(warmup)] == [1 / warmup, 1.0, 1.0]
    assert lr(warmup + 1) < 1.0


@FACTORIES
@pytest.mark.parametrize("warmup_steps", [-1, 10])
def test_a_warm_up_longer_than_the_run(factory, warmup_steps) -> None:
    match = rf"warmup_steps={warmup_steps} must be at least 0 and less than the run's 10 steps"
    with pytest.raises(ValueError, match=match):
        factory(nn.Linear(1, 1), total_steps=10, warmup_steps=warmup_steps)
