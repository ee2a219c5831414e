"""Replicas that join, leave and die, in forked processes, equal the serial twin bit for bit."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.exchange import View
from lightning_commfree.comm.ledger import Ledger
from lightning_commfree.diloco import CODECS, StreamingDiLoCo, split_into_fragments
from lightning_commfree.diloco.codec import decode_all
from lightning_commfree.diloco.exchange import TAG, cheaper_exchange
from lightning_commfree.diloco.transport import FixedTransport
from lightning_commfree.elastic import membership
from lightning_commfree.elastic.algorithm import ElasticDiLoCo
from lightning_commfree.elastic.membership import Limits
from tests.diloco.training import ADAMW, State, state_of
from tests.elastic.elastic_job import (
    At,
    Job,
    Replicas,
    Result,
    die_after_landing,
    die_as_donor,
    die_before_asking,
    die_in_configure,
    die_in_last_round,
    die_in_message,
    die_when_a_joiner_is_behind,
    each,
    killing,
    leave,
    lose_a_result,
    settings_of,
    stop,
    train,
    wait_stopped,
)
from tests.elastic.elastic_serial import ElasticTwin, Log
from tests.world import run_ranks


class Blocks(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(4))


SMALL = partial(Blocks, 6)  # every fragment is gathered
LARGE = partial(Blocks, 40)  # three replicas send it in two phases


def through(wire: str, values: Tensor) -> Tensor:
    codec = CODECS[wire]
    payload = torch.empty(codec.num_bytes(values.numel()), dtype=torch.uint8)
    codec.encode(values.contiguous(), out=payload)
    return decode_all(codec, payload, torch.empty(values.numel()))


def two_phases(wire: str, members: int, numel: int) -> bool:
    channel = Channel([0], 0, Ledger())
    view = View(0, tuple(range(members)), channel)
    return cheaper_exchange(view, CODECS[wire], numel).route.two_phase


def log_of(results: dict[str, Result]) -> Log:
    """Merge what the replicas report; they must never have been in two views of one flight."""
    views: dict[int, Sequence[int]] = {}
    joins: dict[int, list[int]] = {}
    rejoins = {result.slot: result.rejoined for result in results.values() if result.rejoined}
    for result in results.values():
        for flight, members in result.views:
            assert views.setdefault(flight, members) == members, f"two views of flight {flight}"
        if result.joined is not None:
            joins.setdefault(result.slot, []).append(result.joined)
    return Log(views, joins, rejoins=rejoins)


def play_twin(job: Job, log: Log) -> dict[int, State]:
    settings, module = settings_of(job), job.make_module()
    codec = CODECS[str(settings.wire_dtype)]
    fragments = split_into_fragments(module, settings.num_fragments, settings.fragment_pattern)
    twin = ElasticTwin(
        job.make_module,
        ADAMW,
        settings.outer_optimizer,
        train,
        [fragment.parameters for fragment in fragments],
        settings.sync_every,
        settings.overlap_steps,
        settings.mix,
        partial(through, settings.wire_dtype),
        partial(two_phases, settings.wire_dtype),
        lambda slot: job.weights[slot],
        codec.error_feedback,
        partial(through, "fp4") if codec.error_feedback else None,
    )
    return {slot: state_of(module) for slot, module in twin.play(log, job.steps).items()}


def assert_equal_the_twin(job: Job, results: dict[str, Result], taken: Any = None) -> Log:
    errors = {name: result.error for name, result in results.items() if result.error}
    assert not errors, errors
    log = log_of(results)
    log.taken = taken
    states = play_twin(job, log)
    assert states.keys() == {result.slot for result in results.values()}
    for name, result in results.items():
        for key, tensor in states[result.slot].items():
            assert torch.equal(result.state[key], tensor), f"{name}: {key}"
    first = next(iter(results.values())).state
    for result in results.values():
        assert all(torch.equal(result.state[key], tensor) for key, tensor in first.items())
    return log


CHANGES: dict[str, Any] = {"sync_every": 6, "num_fragments": 2, "overlap_steps": 2}


def skip_none(diloco: ElasticDiLoCo, step: int) -> None:
    diloco._membership.is_launched = lambda flight: False  # type: ignore[method-assign]


def fixed(rank: int, size: int, job: Job) -> tuple[State, int]:
    ledger = Ledger()
    module, settings = job.make_module(), settings_of(job)
    fragments = split_into_fragments(module, settings.num_fragments, settings.fragment_pattern)
    channel = Channel.open([list(range(size))], rank, ledger)
    diloco = StreamingDiLoCo(module, fragments, settings, FixedTransport(channel))
    optimizer = ADAMW(module.parameters())
    for step in range(1, job.steps + 1):
        train(module, rank, step)
        optimizer.step()
        diloco.after_step()
    diloco.finish()
    return state_of(module), ledger.bytes_by_tag[TAG]


@pytest.mark.parametrize(
    ("wire", "make_module", "by_time"),
    [("fp32", SMALL, False), ("int8", LARGE, False), ("fp4", LARGE, False), ("fp4", LARGE, True)],
)
def test_a_fixed_view_equals_streaming_diloco_in_bits_and_bytes(
    wire: str, make_module: Any, by_time: bool, tmp_path: Path
) -> None:
    changes = {**CHANGES, "wire_dtype": wire}
    job = Job(20, changes, make_module, step_s=0.0, by_time=by_time, before_step=skip_none)
    results = Replicas(job, tmp_path, "abc").results()
    expected = run_ranks(fixed, 3, tmp_path, job)
    for result, (state, num_bytes) in zip(results.values(), expected, strict=True):
        assert not result.error
        assert result.bytes_sent == num_bytes
        assert all(torch.equal(result.state[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize(
    ("wire", "make_module", "changes"),
    [
        ("fp32", SMALL, {"overlap_steps": 0}),
        ("fp4", LARGE, {"overlap_steps": 1}),
        ("int8", LARGE, {"overlap_steps": 5, "num_fragments": 3}),  # several in flight
        ("bf16", LARGE, {"overlap_steps": 2}),
        ("int2", SMALL, {"overlap_steps": 2}),  # with error feedback
    ],
)
def test_a_kill_and_a_restart_equal_the_twin(
    wire: str, make_module: Any, changes: dict[str, Any], tmp_path: Path
) -> None:
    job = Job(
        80,
        {**CHANGES, "wire_dtype": wire, **changes},
        make_module,
        step_s=0.02,
        before_step=killing(1, 16),
    )
    replicas = Replicas(job, tmp_path, "abc")
    replicas.wait_dead("b")
    replicas.start("d")
    results = replicas.results()
    log = assert_equal_the_twin(job, results)
    assert results["d"].joined is not None
    assert results["d"].slot == 1
    assert results["a"].inner_steps == results["c"].inner_steps == 80, "no step is lost"
    assert {len(members) for members in log.views.values()} == {2, 3}


def test_nobody_waits_for_slow_joiners_of_which_two_come_at_once(tmp_path: Path) -> None:
    job = Job(180, {**CHANGES, "wire_dtype": "fp4", "sync_every": 12}, LARGE, step_s=0.02)
    replicas = Replicas(job, tmp_path, "ab")
    time.sleep(0.3)
    replicas.start("c", delay_s=1.2)
    replicas.start("d", delay_s=1.2)
    results = replicas.results()
    log = assert_equal_the_twin(job, results)
    joined = [results[name].joined for name in "cd"]
    assert all(flight is not None and flight > 3 for flight in joined)
    assert (0, 1, 2, 3) in log.views.values()
    assert max(joined) - min(joined) <= 4, "a joiner that has missed a flight takes the next one"
    assert max(results["a"].waits_s) < 1.0


@pytest.mark.parametrize(
    "end",
    [
        die_before_asking,
        partial(die_in_message, name="all_to_all"),
        partial(die_in_message, name="all_gather"),
        die_in_last_round,
    ],
)
def test_survivors_of_a_kill_at_any_phase_equal_the_twin(end: Any, tmp_path: Path) -> None:
    job = Job(24, {**CHANGES, "wire_dtype": "int8"}, LARGE, before_step=At(2, 14, end))
    replicas = Replicas(job, tmp_path, "abc")
    results = replicas.results()
    assert results.keys() == {"a", "b"}
    log = assert_equal_the_twin(job, results)
    assert log.views[0] == (0, 1, 2)
    assert log.views[max(log.views)] == (0, 1)
    assert max(results["a"].waits_s) < 3


@pytest.mark.parametrize("end", [die_before_asking, partial(die_in_message, name="all_to_all")])
def test_survivors_ask_in_the_place_of_a_member_whose_process_has_ended(
    end: Any, tmp_path: Path
) -> None:
    """The rendezvous would wait for its heartbeat."""
    job = Job(24, {**CHANGES, "wire_dtype": "int8"}, LARGE, before_step=At(2, 14, end))
    results = Replicas(job, tmp_path, "abc", notices=False).results()
    assert results.keys() == {"a", "b"}
    log = assert_equal_the_twin(job, results)
    assert log.views[0] == (0, 1, 2)
    assert log.views[max(log.views)] == (0, 1)


def test_survivors_of_a_kill_while_a_view_connects_equal_the_twin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # long enough for a busy machine: a view of living members must not fail
    monkeypatch.setattr(membership, "_CONNECT", timedelta(seconds=6))
    ends = [killing(1, 14), At(2, 14, die_in_configure)]
    job = Job(24, {**CHANGES, "wire_dtype": "int8"}, LARGE, before_step=each(ends))
    results = Replicas(job, tmp_path, "abcd").results()
    assert results.keys() == {"a", "d"}
    log = assert_equal_the_twin(job, results)
    assert log.views[0] == (0, 1, 2, 3)
    assert log.views[max(log.views)] == (0, 3)


def test_survivors_repeat_a_flight_that_only_a_dead_member_has_completed(tmp_path: Path) -> None:
    ends = [At(0, 15, lose_a_result), At(1, 15, lose_a_result), At(2, 15, die_after_landing)]
    job = Job(24, {**CHANGES, "wire_dtype": "int8"}, LARGE, before_step=each(ends))
    results = Replicas(job, tmp_path, "abc").results()
    assert results.keys() == {"a", "b"}
    log = assert_equal_the_twin(job, results)
    assert log.views[2] == (0, 1, 2)
    assert log.views[3] == (0, 1), "launched after step 15"


def test_a_member_fetches_the_result_that_it_alone_has_lost(tmp_path: Path) -> None:
    job = Job(24, {**CHANGES, "wire_dtype": "int8"}, LARGE, before_step=At(1, 14, lose_a_result))
    results = Replicas(job, tmp_path, "abc").results()
    assert_equal_the_twin(job, results)
    assert len(results["b"].views) == len(results["a"].views) - 1


def test_a_joiner_whose_donor_dies_asks_another_member(tmp_path: Path) -> None:
    job = Job(80, CHANGES, LARGE, step_s=0.02, before_step=At(0, 8, die_as_donor))
    replicas = Replicas(job, tmp_path, "abc")
    time.sleep(0.3)
    replicas.start("d")
    results = replicas.results()
    assert results.keys() == {"b", "c", "d"}
    assert_equal_the_twin(job, results)
    assert results["d"].joined is not None


def test_a_member_that_is_left_alone_waits_for_min_replicas(tmp_path: Path) -> None:
    job = Job(60, CHANGES, SMALL, step_s=0.02, limits=Limits(2, 8), before_step=killing(1, 16))
    replicas = Replicas(job, tmp_path, "ab")
    replicas.wait_dead("b")
    time.sleep(0.5)  # it asks several times
    replicas.start("d")
    results = replicas.results(20.0)
    assert results.keys() == {"a", "d"}
    log = assert_equal_the_twin(job, results)
    assert set(log.views.values()) == {(0, 1)}


@pytest.mark.parametrize(
    ("step", "end", "delay_s"), [(45, leave, 1.5), (6, die_when_a_joiner_is_behind, 0.3)]
)
def test_members_that_wait_for_a_joiner_get_it_although_it_is_behind(
    step: int, end: Any, delay_s: float, tmp_path: Path
) -> None:
    """Its messages are old when it has them, and the members cannot complete another flight."""
    job = Job(100, CHANGES, SMALL, step_s=0.02, limits=Limits(2, 8), before_step=At(1, step, end))
    replicas = Replicas(job, tmp_path, "ab")
    time.sleep(0.3)
    replicas.start("d", messages_delay_s=delay_s)
    results = replicas.results(20.0)
    assert results.keys() == {"a", "d"}
    assert_equal_the_twin(job, results)
    assert results["d"].joined is not None


def test_a_replica_that_was_stopped_learns_that_the_others_went_on(tmp_path: Path) -> None:
    job = Job(80, CHANGES, LARGE, step_s=0.02)
    replicas = Replicas(job, tmp_path, "abc")
    time.sleep(0.6)
    stopped = replicas.processes["b"].pid
    os.kill(stopped, signal.SIGSTOP)
    time.sleep(0.3)
    replicas.server.lose("b")
    time.sleep(2.0)
    os.kill(stopped, signal.SIGCONT)
    results = replicas.results()
    assert "The other replicas continued without this one" in results.pop("b").error
    assert_equal_the_twin(job, results)


@pytest.mark.parametrize(
    ("wire", "make_module", "changes"),
    [
        ("fp4", LARGE, {"overlap_steps": 1}),
        ("int2", SMALL, {"overlap_steps": 2}),  # with error feedback
    ],
)
def test_a_replica_that_was_stopped_joins_again_with_its_steps_and_its_optimizer(
    wire: str, make_module: Any, changes: dict[str, Any], tmp_path: Path
) -> None:
    changes = {**CHANGES, "wire_dtype": wire, **changes}
    act = At(1, 18, stop)  # nothing is in flight then
    job = Job(200, changes, make_module, step_s=0.02, may_rejoin=True, before_step=act)
    replicas = Replicas(job, tmp_path, "abc")
    wait_stopped(replicas.processes["b"])
    replicas.server.lose("b")
    time.sleep(1.0)
    os.kill(replicas.processes["b"].pid, signal.SIGCONT)
    results = replicas.results()
    b = results["b"]
    assert (b.joined, len(b.rejoined), b.error) == (None, 1, "")
    assert b.inner_steps < results["a"].inner_steps == 200
    assert not b.discarded
    log = assert_equal_the_twin(job, results, replicas.taken())
    assert {len(members) for members in log.views.values()} == {2, 3}
    assert max(results["a"].waits_s) < 3


def test_members_of_a_restarted_rendezvous_do_not_split(tmp_path: Path) -> None:
    job = Job(60, CHANGES, LARGE, step_s=0.02)
    replicas = Replicas(job, tmp_path, "abc")
    time.sleep(0.6)
    replicas.server.restart()
    results = replicas.results()
    log = assert_equal_the_twin(job, results)
    assert set(log.views.values()) == {(0, 1, 2)}


def test_replicas_of_unequal_weight_equal_the_twin(tmp_path: Path) -> None:
    job = Job(30, CHANGES, LARGE, step_s=0.0, weights=(1, 3, 4))
    assert_equal_the_twin(job, Replicas(job, tmp_path, "abc").results())


TIMED: Any = {"pace": (1, 1, 3), "by_time": True, "step_s": 0.02}  # slot 2 is slow


@pytest.mark.parametrize(
    ("wire", "make_module", "changes"),
    [
        ("fp32", SMALL, {"overlap_steps": 0}),
        ("int8", LARGE, {"overlap_steps": 5, "num_fragments": 3}),  # several in flight
        ("int2", SMALL, {"overlap_steps": 2}),
    ],
)
def test_by_time_a_slow_replica_skips_steps_and_a_kill_and_a_join_equal_the_twin(
    wire: str, make_module: Any, changes: dict[str, Any], tmp_path: Path
) -> None:
    changes = {**CHANGES, "sync_every": 9, "wire_dtype": wire, **changes}
    job = Job(120, changes, make_module, before_step=killing(1, 30), **TIMED)
    replicas = Replicas(job, tmp_path, "abc")
    replicas.wait_dead("b")
    replicas.start("d")
    results = replicas.results()
    log = assert_equal_the_twin(job, results, replicas.taken())
    assert results["d"].joined is not None
    assert results["d"].slot == 1
    assert {len(members) for members in log.views.values()} == {2, 3}
    assert results["c"].inner_steps < 0.75 * results["a"].inner_steps


def test_a_replica_continues_alone_and_takes_in_another(tmp_path: Path) -> None:
    job = Job(80, CHANGES, SMALL, step_s=0.02, before_step=killing(0, 16))
    replicas = Replicas(job, tmp_path, "ab")
    replicas.wait_dead("a")
    replicas.start("c")
    results = replicas.results()
    log = assert_equal_the_twin(job, results)
    assert {(0, 1), (1,)} <= set(log.views.values())
    assert results["c"].slot == 0


def test_more_replicas_than_slots_are_refused(tmp_path: Path) -> None:
    job = Job(60, CHANGES, SMALL, step_s=0.02, limits=Limits(1, 2))
    replicas = Replicas(job, tmp_path, "ab")
    time.sleep(0.3)
    replicas.start("c")
    results = replicas.results()
    assert "All 2 slots are taken (`max_replicas`)" in results["c"].error
    assert not results["a"].error


def half_frozen() -> nn.Module:
    module = SMALL()
    module.get_parameter("blocks.0.bias").requires_grad_(False)
    return module


def freeze(diloco: ElasticDiLoCo) -> None:
    diloco._module.get_parameter("blocks.0.bias").requires_grad_(False)


def thaw(diloco: ElasticDiLoCo) -> None:
    diloco._module.get_parameter("blocks.0.bias").requires_grad_(True)
    with diloco.stepping():
        pass


@pytest.mark.parametrize(
    ("make_module", "act", "said"),
    [
        (SMALL, freeze, "The parameters ['blocks.0.bias'] were frozen during the fit. Elastic"),
        (half_frozen, thaw, "The parameters ['blocks.0.bias'] became trainable during the fit."),
    ],
)
def test_parameters_frozen_or_thawed_later_are_refused(
    make_module: Any, act: Any, said: str, tmp_path: Path
) -> None:
    job = Job(20, CHANGES, make_module, before_step=each([At(slot, 6, act) for slot in (0, 1)]))
    for result in Replicas(job, tmp_path, "ab").results().values():
        assert said in result.error
