"""`outer_device="cpu"` with a model on a GPU: the exchange's thread takes the outer steps.

CPU tensors play the GPU's: the channel's device has another name than theirs, so their messages are
made, sent and decoded as those of CUDA tensors are.
"""

from __future__ import annotations

import copy
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from lightning_commfree.diloco import StreamingDiLoCo
from tests.diloco import training
from tests.diloco.training import (
    ADAMW,
    NESTEROV,
    Net,
    Run,
    State,
    all_bits,
    alone,
    assert_equal_states,
    assert_same_bits,
    backward,
    elsewhere,
    start,
    twin,
)
from tests.world import run_ranks

# fragments 0, 1, 2 leave after steps 6, 8, 10 and so on: up to three are in flight
CHANGES: dict[str, Any] = {
    "sync_every": 6,
    "num_fragments": 3,
    "overlap_steps": 5,
    "outer_device": "cpu",
}


class InThread(torch.optim.SGD):
    """Refuses to step on the training thread."""

    def step(self, closure: Any = None) -> Any:
        assert threading.current_thread() is not threading.main_thread(), "training waits for it"
        return super().step(closure)


@pytest.mark.parametrize("size", [2, 3])
def test_outer_steps_in_the_thread_equal_the_twin(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are taken long before the landing, and the global copy changes only there."""
    monkeypatch.setattr(training, "world", elsewhere(training.world))  # the ranks are forked
    outer = partial(InThread, lr=0.7, momentum=0.9, nesterov=True)
    changes = {**CHANGES, "outer_optimizer": outer}
    run = Run(20, changes, between_steps=StreamingDiLoCo.wait_in_flight)
    traces = run_ranks(training.train, size, tmp_path, run)
    serial = Run(run.steps, {**CHANGES, "outer_optimizer": NESTEROV})
    for rank, expected in enumerate(twin(size, serial, traces[0].fragments)):
        assert_same_bits(traces[rank], expected, f"rank {rank}")


def scheduled(parameters: list[nn.Parameter]) -> Any:
    optimizer = NESTEROV(parameters)
    return optimizer, StepLR(optimizer, 1, 0.5)


def begin() -> tuple[Net, StreamingDiLoCo, torch.optim.Optimizer]:
    module, channel = Net(), elsewhere(alone)()
    diloco = start(module, channel, **CHANGES, outer_optimizer=scheduled)
    return module, diloco, ADAMW(module.parameters())


def take(module: Net, diloco: StreamingDiLoCo, optimizer: Any, steps: range) -> State:
    for step in steps:
        backward(module, 0, step)
        optimizer.step()
        diloco.after_step()
    return all_bits(module)


@pytest.mark.parametrize("saved_at", [11, 13])
def test_a_state_saved_before_a_landing_resumes_to_the_bit(saved_at: int) -> None:
    module, diloco, optimizer = begin()
    take(module, diloco, optimizer, range(1, saved_at + 1))
    shared, own = copy.deepcopy(diloco.state_dict())
    inner, local = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(module.state_dict())

    ahead = 0
    for p in diloco.in_flight:
        lr = shared["fragments"][p]["optimizer"]["param_groups"][0]["lr"]
        assert diloco.fragments[p].outer_lr == lr
        ahead += diloco.fragments[p].optimizer.param_groups[0]["lr"] == lr / 2
    assert ahead == len(diloco.in_flight) > 1, "their outer steps have been taken"

    again, resumed, other = begin()
    again.load_state_dict(local)
    resumed.load_state_dict(shared, own)
    other.load_state_dict(inner)
    for later in (range(saved_at + 1, 18), range(18, 26)):
        expected = take(module, diloco, optimizer, later)
        assert_equal_states(take(again, resumed, other, later), expected)
    assert resumed.figures().keys() == diloco.figures().keys()
    for p, landing in diloco.landings.items():
        assert resumed.landings[p].outer_lr == landing.outer_lr
    diloco.close()
    resumed.close()


def test_a_refused_landing_leaves_the_outer_state_as_it_was() -> None:
    module, diloco, optimizer = begin()
    take(module, diloco, optimizer, range(1, 12))  # fragment 0 has landed once
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(torch.nan)
    diloco.after_step()  # launches fragment 0
    before = copy.deepcopy(diloco.state_dict()[0]["fragments"][0])
    assert torch.cat([part.flatten() for part in before["global_copy"]]).isfinite().all()
    for _ in range(4):
        diloco.after_step()
    with pytest.raises(RuntimeError, match="The outer gradient of fragment 0 .* is not finite"):
        diloco.after_step()
    after = diloco.fragments[0].state_dict()
    for name in ("global_copy", "optimizer", "scheduler", "landings"):
        torch.testing.assert_close(after[name], before[name], rtol=0, atol=0)
    diloco.close()
