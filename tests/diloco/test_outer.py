"""One fragment's global copy: signs, the outer step by hand, dtypes, buffers and the mix."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_commfree.diloco.fragments import Fragment
from lightning_commfree.diloco.outer import OuterFragment

AVERAGING = partial(torch.optim.SGD, lr=1.0)


class Weights(nn.Module):
    """Three parameters and a buffer, of which a fragment may take some."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor([1.0, 2.0], dtype=dtype))
        self.b = nn.Parameter(torch.tensor([[3.0], [4.0]], dtype=dtype))
        self.other = nn.Parameter(torch.tensor([5.0], dtype=dtype))
        self.register_buffer("mean", torch.tensor([6.0, 7.0]))


WHOLE = Fragment(("a", "b"), ("mean",))


def add(tensor: Tensor, value: Any) -> None:
    with torch.no_grad():
        tensor.add_(torch.as_tensor(value, dtype=tensor.dtype))


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(torch.uint8).clone()


# The copies


# The outer gradient


# The outer step


def test_any_torch_optimizer_gets_fp32_tensors_in_the_parameters_shapes() -> None:
    seen: list[list[nn.Parameter]] = []

    def factory(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        seen.append(parameters)
        return torch.optim.Adam(parameters, lr=0.1)

    fragment = OuterFragment(Weights(torch.bfloat16), WHOLE, factory)
    (parameters,) = seen
    assert [(p.dtype, tuple(p.shape)) for p in parameters] == [
        (torch.float32, (2,)),
        (torch.float32, (2, 1)),
    ]
    fragment.outer_step(torch.ones(6))
    # Adam's first step is lr against the sign; it moves the global copy through these tensors
    assert fragment.global_copy[:4].tolist() == pytest.approx([0.9, 1.9, 2.9, 3.9])
    state = fragment.optimizer.state[parameters[0]]
    assert state["exp_avg"].dtype == torch.float32
    assert [p.grad for p in parameters] == [None, None], "the mean is as large as the fragment"


@pytest.mark.parametrize(("made", "name"), [(None, "NoneType"), ("sgd", "str")])
def test_a_factory_that_makes_no_optimizer_is_refused(made: Any, name: str) -> None:
    text = (
        rf"`outer_optimizer` returned a {name}, but it must take a list of parameters and return a"
        r" `torch\.optim\.Optimizer`, such as `functools\.partial\(torch\.optim\.SGD, lr=0\.4\)`"
    )
    with pytest.raises(TypeError, match=text):
        OuterFragment(Weights(), WHOLE, lambda parameters: made)


# Dtypes


def test_steps_below_the_resolution_of_bf16_add_up() -> None:
    """Near 1 bf16 has a value every 2^-7; a step of 2^-10 is lost in it, eight of them are one."""
    step = 2.0**-10
    module = nn.ParameterList([torch.ones(1, dtype=torch.bfloat16)])
    fragment = OuterFragment(module, Fragment(("0",)), AVERAGING)
    parameter = module[0]
    assert fragment.global_copy.dtype == torch.float32
    for _ in range(8):
        fragment.outer_step(torch.full((1,), -step))
        fragment.merge(0.0)
    assert float(fragment.global_copy) == 1.0 + 8 * step
    assert parameter.dtype == torch.bfloat16
    assert parameter.item() == 1.0 + 2.0**-7

    lost = torch.ones(1, dtype=torch.bfloat16)  # the likely mistake: a copy in the model's dtype
    for _ in range(8):
        lost += step
    assert float(lost) == 1.0


def test_the_mix_is_rounded_once() -> None:
    """bf16 local 1, global 1 + 3 * 2^-9: a quarter of the way is nearest to 1, three quarters not.

    Rounding the global copy to bf16 first would put it at 1 + 2^-7, and half of the way there, a
    tie, goes to 1.
    """
    start = 1.0 + 3 * 2.0**-9
    outcomes = {}
    for mix in (0.75, 0.5, 0.25, 0.0):
        module = nn.ParameterList([torch.ones(1, dtype=torch.bfloat16)])
        fragment = OuterFragment(module, Fragment(("0",)), AVERAGING)
        fragment.outer_step(torch.tensor([1.0 - start]))
        fragment.merge(mix)
        outcomes[mix] = module[0].item()
    assert outcomes == {0.75: 1.0, 0.5: 1.0, 0.25: 1.0 + 2.0**-7, 0.0: 1.0 + 2.0**-7}


# The mix


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_mix_0_takes_the_global_copy_whatever_the_local_one_holds(value: float) -> None:
    module = Weights()
    fragment = OuterFragment(module, WHOLE, AVERAGING)
    with torch.no_grad():
        module.a.fill_(value)
    fragment.merge(0.0)
    assert module.a.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_mix_1_ignores_the_global_copy_whatever_it_holds(value: float) -> None:
    """One replica that diverges makes the global copies NaN; independent runs must not notice."""
    module = Weights()
    fragment = OuterFragment(module, WHOLE, AVERAGING)
    before = bits(module.a)
    fragment.global_copy.fill_(value)
    fragment.merge(1.0)
    assert torch.equal(bits(module.a), before)


# Buffers


def test_a_buffer_that_the_module_replaces_is_the_one_that_is_averaged() -> None:
    """`self.mean = 0.9 * self.mean + ...` puts a new tensor in the place of the old one."""
    module = Weights()
    fragment = OuterFragment(module, WHOLE, AVERAGING)
    module.mean = module.mean + 2.0
    assert fragment.outer_gradient()[4:].tolist() == [8.0, 9.0]
    fragment.average_buffers(torch.tensor([0.0, 0.0, 0.0, 0.0, 7.0, 8.0]))
    fragment.merge(0.0)
    assert module.mean.tolist() == [7.0, 8.0]


@pytest.mark.parametrize("mix", [0.0, 0.5])
def test_a_constant_float64_buffer_keeps_its_precision(mix: float) -> None:
    """A table that is the same on all replicas must come out of a sync as it went in."""
    module = nn.Linear(2, 2)
    table = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)
    module.register_buffer("table", table.clone())
    fragment = OuterFragment(module, Fragment(("weight", "bias"), ("table",)), AVERAGING)
    fragment.average_buffers(fragment.outer_gradient())
    fragment.merge(mix)
    assert torch.equal(module.table, table)


@pytest.mark.parametrize(
    ("counted", "is_cleared", "left"), [(True, False, 2.0), (False, False, 1.0), (False, True, 0.0)]
)
def test_the_rounding_error_of_a_launch_that_did_not_count(
    counted: bool, is_cleared: bool, left: float
) -> None:
    """It is the one from before, unless that was cleared in the meantime."""
    fragment = OuterFragment(Weights(), WHOLE, AVERAGING, keeps_residual=True)
    assert fragment.residual is not None
    fragment.residual.fill_(1.0)
    fragment.keep_residual()
    fragment.residual.fill_(2.0)
    if is_cleared:
        fragment.clear_residual()
    fragment.end_launch(counted)
    assert fragment.residual.unique().tolist() == [left]
