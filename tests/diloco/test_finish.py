"""How a run ends: with the plain mean of the replicas' local weights, in both copies of all."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.job import DATA, REPLICA, replica_mesh
from lightning_commfree.comm.ledger import Ledger
from lightning_commfree.diloco import (
    CODECS,
    DiLoCoSettings,
    StreamingDiLoCo,
    split_into_fragments,
)
from lightning_commfree.diloco.transport import FixedTransport
from tests.diloco.training import (
    ADAMW,
    DEFAULTS,
    Net,
    State,
    after_some_steps,
    alone,
    assert_equal_states,
    backward,
    start,
    state_of,
    world,
)
from tests.world import run_ranks


def finish_twice(
    rank: int, size: int, changes: dict[str, Any], dtype: torch.dtype = torch.float32
) -> list[State]:
    """Return the weights before a `finish`, after it, after a second one, and the global copies."""
    module = Net(dtype)
    diloco = start(module, world(rank, size) if size > 1 else alone(), **changes)
    optimizer = ADAMW(module.parameters())
    for step in range(1, 8):
        backward(module, rank, step)
        optimizer.step()
        diloco.after_step()
    assert diloco.in_flight == []
    states = [state_of(module)]
    for _ in range(2):
        diloco.finish()
        states.append(state_of(module))
        assert diloco.weight_swap.local_equals_shared()
    states.append({"copies": torch.cat([f.global_copy.clone() for f in diloco.fragments])})
    diloco.close()
    return states


ENDS: list[tuple[int, dict[str, Any], torch.dtype]] = [
    (2, {"wire_dtype": "fp4"}, torch.float32),
    (3, {"wire_dtype": "int8", "num_fragments": 2, "overlap_steps": 0}, torch.float32),
    (2, {}, torch.bfloat16),
]


@pytest.mark.parametrize(("size", "changes", "dtype"), ENDS)
def test_a_fit_ends_with_the_plain_mean_of_the_local_weights(
    size: int, changes: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    """With an outer momentum, which would carry an outer step elsewhere, and moves nothing later.

    The mean is that of the wire: in fp4 a difference is rounded to a power of two.
    """
    ranks = run_ranks(finish_twice, size, tmp_path, changes, dtype)
    coarse = {"fp4": 1e-2, "int8": 1e-3}.get(changes.get("wire_dtype", ""), 1e-6)
    for before, once, twice, copies in ranks:
        assert_equal_states(once, ranks[0][1])
        assert_equal_states(twice, once)
        assert_equal_states(copies, ranks[0][3])
        for name, tensor in once.items():
            mean = torch.stack([states[0][name].float() for states in ranks]).mean(0)
            atol = 2e-3 if dtype == torch.bfloat16 else coarse
            torch.testing.assert_close(tensor.float(), mean, rtol=0, atol=atol)
        moved = max(float((once[n].float() - before[n].float()).abs().max()) for n in once)
        assert moved > 2 * coarse, "the replicas were apart"


@pytest.mark.parametrize("wire_dtype", list(CODECS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_one_replica_alone_ends_with_its_local_weights(wire_dtype: str, dtype: torch.dtype) -> None:
    before, once, twice, _ = finish_twice(0, 1, {"wire_dtype": wire_dtype}, dtype)
    assert_equal_states(once, before)
    assert_equal_states(twice, before)


def test_the_end_is_no_outer_step_for_the_outer_optimizer() -> None:
    _, diloco = after_some_steps(7)
    assert diloco.in_flight == []
    momenta = [deepcopy(f.state_dict()["optimizer"]["state"]) for f in diloco.fragments]
    diloco.finish()
    for fragment, before in zip(diloco.fragments, momenta, strict=True):
        after = fragment.state_dict()["optimizer"]["state"]
        assert before.keys() == after.keys()
        for i, state in before.items():
            assert torch.equal(after[i]["momentum_buffer"], state["momentum_buffer"])
    assert {landing.outer_lr for landing in diloco.landings.values()} == {1.0}


def test_training_may_continue_after_finish() -> None:
    """What is foreseen to be the last step need not be it; a landing of `finish` is done then."""
    module, diloco = after_some_steps(4)
    assert diloco.in_flight == [0]
    diloco.finish()
    landings = [fragment.landings for fragment in diloco.fragments]
    diloco.after_step()  # step 5, at which fragment 0 would have landed
    assert [fragment.landings for fragment in diloco.fragments] == landings
    for _ in range(8):
        diloco.after_step()
    later = [fragment.landings for fragment in diloco.fragments]
    assert [now - before for before, now in zip(landings, later, strict=True)] == [2, 2]


def finish_in_pairs(rank: int, size: int, replica_size: int) -> Any:
    """Replicas of several ranks; return the weights before and after `finish`, and a buffer."""
    mesh = replica_mesh(size, replica_size)
    between = Channel.open(mesh.groups(REPLICA), rank, Ledger())
    inside = Channel.open(mesh.groups(DATA), rank, Ledger())
    module = Net()
    module.register_buffer("mean", torch.zeros(3))
    settings = DiLoCoSettings(**{**DEFAULTS, "replica_size": replica_size})
    fragments = split_into_fragments(module, None, "strided")
    diloco = StreamingDiLoCo(module, fragments, settings, FixedTransport(between), inside)
    optimizer = ADAMW(module.parameters())
    for step in range(1, 4):
        backward(module, rank // replica_size, step)
        optimizer.step()
        diloco.after_step()
    module.mean.fill_(float(rank))
    before = state_of(module)
    diloco.finish()
    assert diloco.weight_swap.local_equals_shared()
    diloco.close()
    return before, state_of(module), module.mean.tolist()


def test_replicas_of_several_ranks_end_with_the_mean(tmp_path: Path) -> None:
    ranks = run_ranks(finish_in_pairs, 4, tmp_path, 2)
    for _, after, buffer in ranks:
        assert buffer == ranks[0][2]
        assert_equal_states(after, ranks[0][1])
        for name, tensor in after.items():
            mean = (ranks[0][0][name] + ranks[2][0][name]) / 2
            torch.testing.assert_close(tensor, mean, rtol=1e-5, atol=1e-7)
    assert not torch.equal(ranks[0][0]["head.weight"], ranks[2][0]["head.weight"])


def test_one_replica_of_two_ranks_ends_with_its_local_weights(tmp_path: Path) -> None:
    (before, after, buffer), (_, other, other_buffer) = run_ranks(finish_in_pairs, 2, tmp_path, 2)
    assert_equal_states(after, before)
    assert_equal_states(other, before)
    assert buffer == other_buffer, "every rank had one of its own"
