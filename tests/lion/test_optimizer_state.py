"""The state of `DistributedLion` saved, loaded and copied: whatever goes on goes on bit for bit."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_commfree.lion import DistributedLion, mean_momenta, worker
from tests.lion import training
from tests.lion.training import train_alone

Copy = Callable[[Any], Any]


def saved_and_loaded(thing: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def mixed() -> dict[str, nn.Parameter]:
    """The parameters of the training, of three dtypes."""
    named = training.parameters()
    for name, dtype in (("head", torch.bfloat16), ("conv", torch.float64)):
        named[name] = nn.Parameter(named[name].detach().to(dtype))
    return named


def assert_same_state(got: DistributedLion, expected: DistributedLion) -> None:
    both = (got.state_dict()["state"], expected.state_dict()["state"])
    assert both[0].keys() == both[1].keys()
    for index, state in both[1].items():
        training.assert_same(both[0][index], state, index)


def step_mixed(named: dict[str, nn.Parameter], lion: DistributedLion, steps: range) -> None:
    for step in steps:
        values = training.gradients(step, 0)
        for name, parameter in named.items():
            value = values[name]
            parameter.grad = None if value is None else value.to(parameter.dtype)
        lion.step()


@pytest.mark.parametrize(
    "handed_over", [saved_and_loaded, copy.deepcopy], ids=["saved", "deepcopied"]
)
def test_a_loaded_state_continues_bit_for_bit(handed_over: Copy) -> None:
    """bf16 parameters keep fp32 state, which torch's own `load_state_dict` would round."""
    named = mixed()
    lion = DistributedLion(training.groups(named))
    step_mixed(named, lion, range(7))
    state = handed_over(lion.state_dict())
    values = copy.deepcopy({name: p.detach() for name, p in named.items()})
    step_mixed(named, lion, range(7, 20))

    other_named = {name: nn.Parameter(value) for name, value in values.items()}
    other = DistributedLion(training.groups(other_named), lr=0.5)
    other.load_state_dict(state)
    kept = [copy.deepcopy(s) for s in state["state"].values()]
    assert {k: v["lr"] for k, v in enumerate(other.param_groups)} == {0: 0.01, 1: 0.02}
    rounded = other.state[other_named["head"]]["momentum"]
    assert not torch.equal(rounded, rounded.bfloat16().float()), "it is more than bf16 holds"
    step_mixed(other_named, other, range(7, 20))
    training.assert_same(training.snapshot(other_named), training.snapshot(named))
    assert_same_state(other, lion)
    for before, after in zip(kept, state["state"].values(), strict=True):
        training.assert_same(after, before, "what was loaded stays the caller's")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
@pytest.mark.parametrize("steps", [0, 5])
def test_a_copy_continues_independently(copied: Copy, steps: int) -> None:
    """With the parameters, as Lightning and sweeps copy them."""
    named, lion, _ = train_alone(steps)
    other_named, other = copied((named, lion))
    before = training.snapshot(named)
    train_alone(8, steps, other, named=other_named)
    training.assert_same(training.snapshot(named), before, "the original")
    train_alone(8, steps, lion, named=named)
    training.assert_same(training.snapshot(other_named), training.snapshot(named))
    assert_same_state(other, lion)
    assert other.voting is not lion.voting


def test_each_parameter_has_its_own_momentum_though_a_bucket_has_one_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU: states are saved by parameter, and what is loaded is put together again."""
    monkeypatch.setattr(worker, "_loops", lambda momentum: None)
    training.small_buckets(monkeypatch)
    named, other = training.parameters(), training.parameters()
    lion, loaded = (DistributedLion(training.groups(p), lr=0.1) for p in (named, other))
    step_mixed(named, lion, range(3))
    loaded.load_state_dict(saved_and_loaded(lion.state_dict()))
    for p, q in zip(named.values(), other.values(), strict=True):
        q.data.copy_(p.data)
    for one, parameters in ((lion, named), (loaded, other)):
        step_mixed(parameters, one, range(3, 6))
        assert one.voting is not None
        for bucket in one.voting.buckets:
            momenta = [one.state[p]["momentum"] for p in bucket.parameters]
            assert len({m.untyped_storage().data_ptr() for m in momenta}) == 1
            assert [m.shape for m in momenta] == [p.shape for p in bucket.parameters]
    assert_same_state(loaded, lion)
    training.assert_same(dict(other), dict(named), "parameters")


def random_values(seed: int, numel: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * numel + seed)
    return torch.randn(numel, generator=generator)


def test_the_mean_of_saved_states() -> None:
    """For another number of workers; everything but the momentum is the first one's."""
    states = []
    for seed in range(3):
        parameters = [nn.Parameter(random_values(seed, n).to(torch.bfloat16)) for n in (5, 7)]
        lion = DistributedLion(parameters, lr=0.1 * (seed + 1))
        for parameter in parameters:
            parameter.grad = random_values(seed + 9, parameter.numel()).to(torch.bfloat16)
        lion.step()
        states.append(lion.state_dict())
    before = copy.deepcopy(states)
    mean = mean_momenta(states)
    assert mean["param_groups"] == before[0]["param_groups"]
    for index, state in mean["state"].items():
        momenta = [other["state"][index]["momentum"] for other in before]
        assert torch.equal(state["momentum"], (momenta[0] + momenta[1] + momenta[2]) / 3)
        assert torch.equal(state["master"], before[0]["state"][index]["master"])
    for state, was in zip(states, before, strict=True):
        for index, kept in was["state"].items():
            training.assert_same(state["state"][index], kept, "the states are left alone")
