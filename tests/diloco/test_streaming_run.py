"""Buffers, refusals, bytes, and the wish to stop."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_commfree.comm.requests import STOP
from tests.diloco.training import (
    Net,
    after_some_steps,
    alone,
    start,
    world,
)
from tests.world import run_ranks

# Buffers


# Refusals, bytes, stop


def test_a_parameter_that_becomes_trainable_in_the_middle_of_a_step_is_refused_after_it() -> None:
    module = Net()
    module.embed.requires_grad_(False)
    diloco = start(module, alone())
    diloco.after_step()
    with diloco.stepping():
        module.embed.requires_grad_(True)
    text = (
        r"The parameters \['embed\.bias', 'embed\.weight'\] became trainable during the fit, and"
        r" they belong to no fragment.*Make them trainable before `fit`, or between two steps"
    )
    with pytest.raises(RuntimeError, match=text):
        diloco.after_step()


def freeze(rank: int, size: int, changes: dict[str, Any]) -> list[dict[str, Tensor]]:
    """Freeze a layer before step 4 and free it before step 13; return it after every step."""
    module, channel = Net(), world(rank, size)
    diloco, found = start(module, channel, **changes), []
    for step in range(1, 17):
        module.embed.requires_grad_(not 4 <= step < 13)
        with diloco.stepping(), torch.no_grad():
            for p in filter(lambda p: p.requires_grad, module.parameters()):
                p += 0.1 * (rank + 1) + 0.01 * step
        diloco.after_step()
        found.append({name: p.detach().clone() for name, p in module.embed.named_parameters()})
    diloco.finish()
    found.append({name: p.detach().clone() for name, p in module.embed.named_parameters()})
    diloco.close()
    channel.close()
    return found


@pytest.mark.parametrize("wire_dtype", ["fp32", "fp4", "int2"])
@pytest.mark.parametrize("mix", [0.5, 1.0])
def test_a_parameter_frozen_later_settles_and_stays(
    wire_dtype: str, mix: float, tmp_path: Path
) -> None:
    """Its fragment is launched after step 4 and lands after step 5: there it takes the mean."""
    changes = {"wire_dtype": wire_dtype, "mix": mix, "sync_every": 4, "num_fragments": 1}
    one, other = run_ranks(freeze, 2, tmp_path, {**changes, "overlap_steps": 1})
    for name in one[0]:
        mean = (one[2][name] + other[2][name]) / 2  # after step 3, the last that trained it
        if wire_dtype == "fp32":
            assert torch.allclose(one[4][name], mean, atol=1e-6), "no outer step"
        for ranks in (one, other):  # int2 has no code for 0, and the outer optimizer has momentum
            assert all(torch.equal(found[name], one[4][name]) for found in ranks[4:12])
        assert not torch.equal(one[15][name], one[4][name]), "it is trained again"
        assert torch.equal(one[16][name], other[16][name])


def bytes_of_cycles(rank: int, size: int, changes: dict[str, Any]) -> list[int]:
    """Return `bytes_per_cycle`, what the third cycle sent, and what the first H - 1 steps did."""
    module = Net()
    channel = world(rank, size) if size > 1 else alone()
    diloco = start(module, channel, **changes)
    sent = []
    for _ in range(3 * diloco.schedule.sync_every):
        sent.append(channel.ledger.bytes_sent)
        diloco.after_step()
    total, cycle = channel.ledger.bytes_sent, diloco.schedule.sync_every
    return [diloco.bytes_per_cycle, total - sent[2 * cycle], sent[cycle - 1] - sent[0]]


@pytest.mark.parametrize(
    ("wire_dtype", "fragment_bytes"),
    # blocks 0 and 2, 60 values; block 1, 30 values; the rest, 25: each 72 bytes of header and the
    # payload, filled up to a multiple of 8
    [
        ("fp32", [72 + 240, 72 + 120, 72 + 100 + 4]),
        ("bf16", [72 + 120, 72 + 60 + 4, 72 + 50 + 6]),
        ("int8", [72 + 4 + 60, 72 + 4 + 30 + 6, 72 + 4 + 25 + 3]),
        ("fp4", [72 + 32 + 1 + 7, 72 + 16 + 1 + 7, 72 + 16 + 1 + 7]),
    ],
)
def test_a_cycle_sends_the_predicted_bytes(
    wire_dtype: str, fragment_bytes: list[int], tmp_path: Path
) -> None:
    size = 3
    changes = {"num_fragments": 3, "wire_dtype": wire_dtype, "sync_every": 6, "overlap_steps": 2}
    expected = sum(fragment_bytes) * (size - 1)
    for outcome in run_ranks(bytes_of_cycles, size, tmp_path, changes):
        assert outcome == [expected, expected, 0]


def steps_told_to_stop(rank: int, size: int, asks_from: dict[int, int]) -> tuple[list[int], int]:
    """Return the steps at which this rank was told to stop, and what landed in `finish`.

    Args:
        rank: this rank.
        size: of the world.
        asks_from: by rank, the first step at which it wants to stop.
    """
    module = Net()
    diloco = start(module, world(rank, size), num_fragments=2, overlap_steps=1)
    first, told = asks_from.get(rank, math.inf), []
    for step in range(1, 12):
        diloco.requests.outgoing = lambda asks=step >= first: STOP * asks
        diloco.after_step()
        told += [step] if diloco.requests.take() else []
    diloco.requests.outgoing = lambda: STOP * (rank == 2)
    diloco.finish()
    return told, diloco.requests.take()


@pytest.mark.parametrize(
    ("asks_from", "told"),
    [
        ({}, []),
        ({1: 6}, [7, 9, 11]),  # leaves with fragment 1 after step 6, lands after step 7
        ({0: 7, 2: 9}, [9, 11]),
        ({2: 11}, []),
    ],
)
def test_one_replica_that_wants_to_stop_tells_all_at_the_same_step(
    asks_from: dict[int, int], told: list[int], tmp_path: Path
) -> None:
    """Launches after steps 4, 6, 8, 10, landings a step later; without a launch nothing travels."""
    assert run_ranks(steps_told_to_stop, 3, tmp_path, asks_from) == [(told, STOP)] * 3


def test_nobody_stops_a_finish_that_nobody_asked_for() -> None:
    _, diloco = after_some_steps(5)
    diloco.finish()
    assert diloco.requests.take() == 0
    diloco.requests.outgoing = lambda: STOP
    diloco.finish()
    assert diloco.requests.take() == STOP
