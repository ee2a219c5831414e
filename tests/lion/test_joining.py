"""Joining other workers and leaving them; parameters that come later; copies of a joined one."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.exchange import View
from lightning_commfree.comm.ledger import Ledger
from lightning_commfree.lion import DistributedLion, LionSettings, worker
from tests.lion import training
from tests.lion.threads import in_threads
from tests.lion.training import Worker, play

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def by_rank(channel: Any, parameter: nn.Parameter) -> None:
    """Two for plus and one for minus: alone, the third worker would go the other way."""
    parameter.grad = torch.full_like(parameter, -1.0 if channel.rank == 2 else 1.0)


def test_a_worker_that_leaves_is_plain_lion_and_may_join_again() -> None:
    def worker(channel: Any) -> None:
        parameter = nn.Parameter(torch.zeros(3))
        lion = DistributedLion([parameter], lr=1.0, betas=(0.0, 0.0))
        assert lion.voting is None
        voting = lion.join([("p", parameter)], View.of(channel), LionSettings())
        assert lion.voting is voting
        by_rank(channel, parameter)
        lion.step()
        assert parameter.tolist() == [-1.0] * 3
        lion.leave()
        assert lion.voting is None
        sent = dict(channel.sent)
        lion.step()
        assert parameter.tolist() == [0.0 if channel.rank == 2 else -2.0] * 3
        assert channel.sent == sent
        parameter.data.zero_()
        again = lion.join([("p", parameter)], View.of(channel), LionSettings())
        lion.step()
        assert parameter.tolist() == [-1.0] * 3
        assert (voting.step, again.step) == (1, 1)
        lion.leave()

    in_threads(3, worker)


def test_a_group_that_comes_later_must_be_joined_by_all() -> None:
    """Else a worker would step alone on what the others still vote on, and part from them."""

    def worker(channel: Any) -> None:
        first, late = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))
        lion = DistributedLion([first], lr=1.0)
        lion.join([("first", first)], View.of(channel), LionSettings())
        by_rank(channel, first)
        lion.step()
        lion.add_param_group({"params": [late], "lr": 0.25})
        for parameter in (first, late):
            by_rank(channel, parameter)
        before = first.detach().clone()
        with pytest.raises(RuntimeError, match="after it joined other workers.*call `join`"):
            lion.step()
        assert torch.equal(first, before)
        assert late.tolist() == [0.0, 0.0]
        lion.join([("first", first), ("late", late)], View.of(channel), LionSettings())
        lion.step()
        assert torch.equal(first, before - 1.0)
        assert late.tolist() == [-0.25] * 2
        lion.leave()

    in_threads(3, worker)


@pytest.mark.parametrize("missing", [0, 1])
def test_all_parameters_of_the_optimizer_are_voted_on(missing: int) -> None:
    parameters = [nn.Parameter(torch.zeros(3)) for _ in range(2)]
    lion = DistributedLion(parameters)
    named = [("p", p) for i, p in enumerate(parameters) if i != missing]
    with pytest.raises(AssertionError, match="the parameters are this optimizer's"):
        lion.join(named, View.of(Channel([0], 0, Ledger())), LionSettings())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_a_copy_of_a_joined_one_is_plain_lion(copied: Callable[[Any], Any]) -> None:
    """It holds no channel: stepping it on one rank only must not wait for the others."""

    def worker(channel: Any) -> None:
        one = Worker(channel, LionSettings())
        for step in range(3):
            one.step(training.gradients(step, channel.rank))
        if channel.rank == 0:
            named, lion = copied((one.named, one.lion))
            assert lion.voting is None
            alone, _, _ = training.train_alone(2, 3, lion, named)
            assert not torch.equal(alone["head"], one.named["head"])
        one.step(training.gradients(3, channel.rank))
        one.lion.leave()
        training.assert_same(training.snapshot(one.named), twin.seen[-1])

    twin = play(3, 4)
    in_threads(3, worker)


def test_a_state_that_is_loaded_after_joining_is_voted_with() -> None:
    """As on resume: the optimizer has joined when Lightning restores its state."""

    def worker(channel: Any) -> None:
        one = Worker(channel, LionSettings())
        for step in range(4):
            one.step(training.gradients(step, channel.rank))
        values, state = training.snapshot(one.named), copy.deepcopy(one.lion.state_dict())
        one.lion.leave()
        other = Worker(channel, LionSettings())
        other.lion.load_state_dict(state)
        for name, parameter in other.named.items():
            parameter.data.copy_(values[name])
        for step in range(4, 7):
            other.step(training.gradients(step, channel.rank))
        other.lion.leave()
        training.assert_same(training.snapshot(other.named), twin.seen[-1])

    twin = play(3, 7)
    in_threads(3, worker)


def test_what_computes_the_steps_is_loaded_on_joining(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing numba or compiling kernels within the first backward would delay all workers."""
    asked = []
    monkeypatch.setattr(worker, "_loops", lambda momentum: asked.append(momentum.dtype))
    parameters = [nn.Parameter(torch.zeros(3, dtype=dtype)) for dtype in DTYPES]
    named = [(str(i), parameter) for i, parameter in enumerate(parameters)]
    alone = View.of(Channel([0], 0, Ledger()))
    DistributedLion(parameters).join(named, alone, LionSettings())
    assert set(asked) == {torch.float32, torch.float64}
