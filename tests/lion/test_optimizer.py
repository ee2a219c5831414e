"""`DistributedLion` as a torch optimizer: alone it is Lion, and has every optimizer's habits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_commfree.lion import DistributedLion
from tests.lion import training
from tests.lion.serial import SerialLion
from tests.lion.training import train_alone


def test_alone_it_is_lion_bit_for_bit() -> None:
    """200 steps, two groups, decay, a schedule, zeros, gradients that are None."""
    twin = training.play(workers=1, steps=200)
    named, lion, seen = train_alone(200)
    for step, (got, expected) in enumerate(zip(seen, twin.seen, strict=True)):
        training.assert_same(got, expected, step)
    momenta = {name: lion.state[p]["momentum"] for name, p in named.items()}
    training.assert_same(momenta, twin.momenta)
    # without decay, or without the schedule, it would be elsewhere
    for key, value in (("weight_decay", 0.0), ("lr", 0.01)):
        other = training.parameters()
        wrong = SerialLion([{**g, key: value} for g in training.groups(other)], 1)
        for step in range(200):
            values = training.gradients(step, 0)
            wrong.step([{p: values[name] for name, p in other.items()}])
        assert not torch.equal(other["head"], named["head"])


def test_it_is_lion_as_the_authors_wrote_it() -> None:
    """google/automl, lion_pytorch.py, line by line in float64, where its fused steps differ from
    ours by 1e-15 a step at most; a vote that went the other way would differ by 2 lr."""
    generator = torch.Generator().manual_seed(0)
    ours = nn.Parameter(torch.randn(500, generator=generator, dtype=torch.float64))
    theirs, exp_avg = ours.detach().clone(), torch.zeros(500, dtype=torch.float64)
    lion = DistributedLion([ours], lr=1e-2, betas=(0.9, 0.99), weight_decay=0.2)
    for _ in range(200):
        grad = torch.randn(500, generator=generator, dtype=torch.float64)
        ours.grad = grad.clone()
        lion.step()
        theirs.mul_(1 - 1e-2 * 0.2)
        update = exp_avg.clone().mul_(0.9).add(grad, alpha=1 - 0.9).sign_()
        theirs.add_(update, alpha=-1e-2)
        exp_avg.mul_(0.99).add_(grad, alpha=1 - 0.99)
    assert (ours - theirs).abs().max() < 200 * 1e-15
    assert lion.state[ours]["momentum"].dtype == torch.float64


def test_a_closure_is_called_once_and_its_gradients_are_voted_with() -> None:
    parameter, calls = nn.Parameter(torch.tensor([1.0, -2.0])), []
    lion = DistributedLion([parameter], lr=0.5)

    def closure() -> Tensor:
        calls.append(parameter.detach().clone())
        lion.zero_grad()
        loss = (parameter**2).sum()
        loss.backward()
        return loss

    assert lion.step(closure).item() == 5.0
    assert len(calls) == 1
    assert parameter.tolist() == [0.5, -1.5]
    assert lion.step() is None


def test_nothing_moves_without_a_gradient() -> None:
    parameter = nn.Parameter(torch.ones(3))
    lion = DistributedLion([parameter], lr=0.1, weight_decay=1.0)
    lion.step()
    assert torch.equal(parameter, torch.ones(3)), "no decay either, as with any torch optimizer"
    parameter.grad = torch.zeros(3)
    lion.step()
    assert torch.equal(parameter, torch.full((3,), 1 - 0.1)), "sign(0) is 0, and it decays"


# Parameters of less than 32 bits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_master_copy_takes_the_steps_that_the_parameter_is_too_coarse_for(
    dtype: torch.dtype,
) -> None:
    generator = torch.Generator().manual_seed(0)
    rough = nn.Parameter(torch.randn(200, generator=generator).to(dtype))
    start = rough.detach().clone()
    fine = rough.detach().float()
    lion = DistributedLion([rough], lr=1e-4, weight_decay=0.1)
    twin = SerialLion(
        [{"params": [fine], "lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.1}], 1
    )
    for _ in range(300):
        gradient = (torch.randn(200, generator=generator) + 2).to(dtype)
        rough.grad = gradient
        lion.step()
        twin.step([{fine: gradient.float()}])
        assert torch.equal(rough, fine.to(dtype))
    state = lion.state[rough]
    assert torch.equal(state["master"], fine)
    assert state["momentum"].dtype == state["master"].dtype == torch.float32
    moved = (rough - start).abs() > 0
    alone = (start - start.new_full((200,), 1e-4)) != start  # one step without a master copy
    assert moved.float().mean() > 0.9
    if dtype == torch.bfloat16:
        assert alone.float().mean() < 0.5, "without it most steps would be lost"


def test_schedulers_and_repr_work() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    lion = DistributedLion([parameter], lr=0.1)
    schedule = torch.optim.lr_scheduler.LinearLR(lion, 0.5, 1.0, total_iters=2)
    for expected in (0.05, 0.075, 0.1):
        before = parameter.detach().clone()
        parameter.grad = torch.ones(2)
        lion.step()
        schedule.step()
        assert before - parameter.detach() == pytest.approx([expected] * 2)
    assert "weight_decay: 0.0" in repr(lion)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_gpu_steps_with_the_cpus_bits(dtype: torch.dtype) -> None:
    """The ballot goes through pinned memory to the host and the result back."""
    seen = []
    for device in ("cpu", "cuda"):
        values = {n: p.detach().to(device, dtype) for n, p in training.parameters().items()}
        named = {name: nn.Parameter(value) for name, value in values.items()}
        lion = DistributedLion(training.groups(named))
        for step in range(30):
            for name, value in training.gradients(step, 0).items():
                named[name].grad = None if value is None else value.to(device, dtype)
            lion.step()
        states = {f"{n} {k}": v.cpu() for n, p in named.items() for k, v in lion.state[p].items()}
        seen.append(states | {name: p.detach().cpu() for name, p in named.items()})
    training.assert_same(seen[1], seen[0])


# What is refused


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"lr": -0.1}, r"`lr=-0.1` must be 0 or more.*3 to 10 times smaller than for AdamW"),
        ({"lr": math.nan}, r"`lr=nan` must be 0 or more"),
        ({"lr": torch.tensor(-1.0)}, r"must be 0 or more"),
        ({"betas": (0.9, 1.0)}, r"`betas=\(0.9, 1.0\)` must be two numbers in \[0, 1\)"),
        ({"betas": (-0.1, 0.9)}, r"must be two numbers in \[0, 1\)"),
        ({"betas": (0.9,)}, r"must be two numbers"),
        ({"betas": 0.9}, r"`betas=0.9` must be two numbers"),
        ({"weight_decay": -1.0}, r"`weight_decay=-1.0` must be 0 or more"),
        ({"weight_decay": math.nan}, r"`weight_decay=nan` must be 0 or more"),
    ],
)
def test_a_wrong_value_is_refused_for_all_and_for_a_group(
    arguments: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        DistributedLion([nn.Parameter(torch.zeros(2))], **arguments)
    with pytest.raises(ValueError, match=text):
        DistributedLion([{"params": [nn.Parameter(torch.zeros(2))], **arguments}])


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64])
def test_only_real_parameters_have_a_sign(dtype: torch.dtype) -> None:
    parameter = nn.Parameter(torch.zeros(2, 3, dtype=dtype), requires_grad=False)
    with pytest.raises(TypeError, match=rf"only real .* {dtype} and shape \[2, 3\]"):
        DistributedLion([parameter])


def test_a_sparse_gradient_is_refused_and_nothing_moves() -> None:
    table = nn.Embedding(5, 2, sparse=True)
    other = nn.Parameter(torch.ones(3))
    before = table.weight.detach().clone()
    lion = DistributedLion([table.weight, other], lr=0.1)
    (table(torch.tensor([1, 2])).sum() + other.sum()).backward()
    with pytest.raises(TypeError, match=r"'parameter 0' is sparse.*`sparse=False`"):
        lion.step()
    assert torch.equal(table.weight, before)
    assert torch.equal(other, torch.ones(3))


def test_alone_a_gradient_with_nan_stops_before_anything_is_changed() -> None:
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    lion = DistributedLion(parameters, lr=0.1)
    parameters[0].grad = torch.ones(3)
    parameters[1].grad = torch.tensor([1.0, math.nan, 1.0])
    with pytest.raises(RuntimeError, match="'parameter 1' on rank 0 contains NaN or Inf"):
        lion.step()
    assert all(torch.equal(p, torch.ones(3)) for p in parameters)
    assert not any(state["momentum"].any() for state in lion.state.values())
    parameters[1].grad = torch.ones(3)
    lion.step()
    assert all(torch.equal(p, torch.full((3,), 0.9)) for p in parameters)


def test_a_group_that_is_refused_is_not_kept() -> None:
    named, lion, _ = train_alone(2)
    with pytest.raises(ValueError, match="`lr=-1` must be 0 or more"):
        lion.add_param_group({"params": [nn.Parameter(torch.zeros(2))], "lr": -1})
    assert len(lion.param_groups) == 2
    late = nn.Parameter(torch.zeros(2))
    lion.add_param_group({"params": [late], "lr": 0.5})
    late.grad = torch.ones(2)
    train_alone(1, 2, lion, named=named)
    assert late.tolist() == [-0.5, -0.5]


def test_parameters_put_into_the_groups_by_hand_are_voted_on() -> None:
    """As a callback does at resume: it writes `param_groups`, and calls no method."""
    first, second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    lion = DistributedLion([first], lr=0.1, weight_decay=0.0)
    first.grad, second.grad = torch.ones(3), -torch.ones(2)
    lion.step()
    lion.param_groups[0]["params"].append(second)
    lion.step()
    torch.testing.assert_close(first.detach(), torch.full((3,), 0.8))
    torch.testing.assert_close(second.detach(), torch.full((2,), 1.1))
    lion.param_groups = [{**lion.param_groups[0], "params": [second]}]
    lion.step()
    torch.testing.assert_close(first.detach(), torch.full((3,), 0.8))
    torch.testing.assert_close(second.detach(), torch.full((2,), 1.2))
