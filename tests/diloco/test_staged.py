"""Messages that are staged in host memory, and decoded by the exchange's thread when they arrive.

CPU tensors play the GPU's: the channel's device has another name than theirs, so their messages are
made, sent and decoded as those of CUDA tensors are.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_commfree.diloco import StreamingDiLoCo
from tests.diloco import training
from tests.diloco.training import (
    ADAMW,
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
CHANGES: dict[str, Any] = {"sync_every": 6, "num_fragments": 3, "overlap_steps": 5}


@pytest.mark.parametrize("size", [2, 3])
def test_messages_decoded_on_arrival_equal_the_twin(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are decoded long before the landing, and the global copy changes only there."""
    monkeypatch.setattr(training, "world", elsewhere(training.world))  # the ranks are forked
    run = Run(20, CHANGES, between_steps=StreamingDiLoCo.wait_in_flight)
    traces = run_ranks(training.train, size, tmp_path, run)
    for rank, expected in enumerate(twin(size, run, traces[0].fragments)):
        assert_same_bits(traces[rank], expected, f"rank {rank}")


def begin() -> tuple[Net, StreamingDiLoCo, torch.optim.Optimizer]:
    module, channel = Net(), elsewhere(alone)()
    return module, start(module, channel, **CHANGES), ADAMW(module.parameters())


def take(module: Net, diloco: StreamingDiLoCo, optimizer: Any, steps: range) -> State:
    for step in steps:
        backward(module, 0, step)
        optimizer.step()
        diloco.after_step()
    return all_bits(module)


@pytest.mark.parametrize("saved_at", [11, 13])
def test_a_state_saved_after_an_arrival_resumes_to_the_bit(saved_at: int) -> None:
    module, diloco, optimizer = begin()
    take(module, diloco, optimizer, range(1, saved_at + 1))
    shared, own = copy.deepcopy(diloco.state_dict())
    inner, local = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(module.state_dict())
    flights = diloco.flights.values()
    assert len(flights) > 1
    assert all(flight.pending.wait().arrived.decoded for flight in flights)

    again, resumed, other = begin()
    again.load_state_dict(local)
    resumed.load_state_dict(shared, own)
    other.load_state_dict(inner)
    for later in (range(saved_at + 1, 18), range(18, 26)):
        expected = take(module, diloco, optimizer, later)
        assert_equal_states(take(again, resumed, other, later), expected)
    diloco.close()
    resumed.close()
