"""A replica that SIGTERM has stopped comes back with its own state, as if it had only paused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_commfree import ElasticDiLoCoStrategy
from lightning_commfree.elastic.algorithm import ElasticDiLoCo
from lightning_commfree.host import OnExceptionCheckpoint
from tests.elastic.fits import KILL, TERM, Fit, Fits, Indexed, Pace, fit, sends, wait_until
from tests.elastic.log_twin import (
    Job,
    Replica,
    assert_equal_the_twin,
    listed_in,
    play,
    start_ranks,
)
from tests.elastic.memory_store import MemoryStore
from tests.elastic.scripted_store import ScriptedStore
from tests.elastic.turns import Turns

WIRES = [("fp4", 0), ("int2", 3)]


def job_of(wire_dtype: str, overlap_steps: int, **settings: Any) -> Job:
    changes = {"wire_dtype": wire_dtype, "overlap_steps": overlap_steps}
    changes |= {"num_fragments": 2, "sync_every": 6}
    return Job(MemoryStore(), **{"steps": 50, "changes": changes, "step_s": 0.01, **settings})


def start(job: Job, turns: Turns, stops: dict[str, tuple[float, float]]) -> list[Replica]:
    """Start two replicas; `stops`: when one gets SIGTERM, and for how long it is away."""
    replicas = [Replica("r0", 0, job).start()]
    turns.sleep(0.001)  # r0 has slot 0
    replicas.append(Replica("r1", 1, job).start())
    begin_s = turns.now_s
    for one in sorted(stops, key=lambda name: stops[name]):
        at_s, away_s = stops[one]
        turns.sleep(begin_s + at_s - turns.now_s)
        replicas[int(one[1:])].terminate(away_s)
    play(replicas, 600.0)
    return replicas


@pytest.mark.parametrize(("wire_dtype", "overlap_steps"), WIRES)
@pytest.mark.parametrize("at_s", [(0.121, 0.121), (0.121, 0.14), (0.121, 1.0)])
def test_a_job_stopped_as_a_whole_equals_one_that_is_not(
    wire_dtype: str, overlap_steps: int, at_s: tuple[float, float], turns: Turns
) -> None:
    """However late the second one is stopped, and the first one comes back."""
    finals = []
    for stops in ({}, {"r0": (at_s[0], 9.0), "r1": (at_s[1], 2.0)}):
        job = job_of(wire_dtype, overlap_steps, min_replicas=2)
        replicas = start(job, turns, stops)
        assert [one.continued for one in replicas] == [[True]] * 2 if stops else [[]] * 2
        assert_equal_the_twin(replicas)
        finals.append(replicas[0].final)
        assert all(len(names) == 2 for names in listed_in(job.store))
    assert finals[0] is not None
    assert finals[1] is not None
    assert all(torch.equal(value, finals[1][name]) for name, value in finals[0].items())


@pytest.mark.parametrize(("wire_dtype", "overlap_steps"), WIRES)
@pytest.mark.parametrize("away_s", [0.0, 0.2, 2.0])
def test_a_replica_that_comes_back_later_keeps_its_optimizer_and_what_it_has_not_sent(
    wire_dtype: str, overlap_steps: int, away_s: float, turns: Turns
) -> None:
    """The twin, too, goes on with its own; messages that it needs are deleted after 2 s."""
    job = job_of(wire_dtype, overlap_steps, state_cycles=1, steps=120, step_s=0.05)
    replicas = start(job, turns, {"r1": (0.66, away_s)})
    assert replicas[1].continued == [True]
    assert_equal_the_twin(replicas)
    listed = listed_in(job.store)
    assert listed[-1] == ["r0", "r1'"]
    assert away_s == 0.0 or ["r0"] in listed
    states = [event for event in replicas[1].events if event[0] == "state"]
    assert len(states) == 1 + (away_s == 2.0)


def test_what_came_too_late_counts_later_also_after_a_return(turns: Turns) -> None:
    """Its rounding error must not count: error feedback goes on from before the message."""
    job = job_of("int2", 3, steps=120, grace_s=0.05)

    def rule(verb: str, key: str, request: Callable[[], Any]) -> Any:
        if (verb, key) == ("create", "x/4/r1"):
            late.terminate(0.0)
            turns.sleep(0.2)
        return request()

    late = Replica("r1", 1, job, store=ScriptedStore(job.store, rule))
    replicas = [Replica("r0", 0, job).start(), late.start()]
    play(replicas)
    assert late.continued == [True]
    assert listed_in(job.store)[4] == ["r0"]
    assert "x/4/r1" in job.store.objects | job.store.deleted
    assert_equal_the_twin(replicas)
    assert listed_in(job.store)[-1] == ["r0", "r1'"]


def test_a_replica_of_several_ranks_comes_back(turns: Turns) -> None:
    job = job_of("int2", 3, grace_s=30.0, min_replicas=2, ranks=2)

    def leave(diloco: ElasticDiLoCo, step: int) -> None:
        if step == 20:
            ranks[diloco.ranks.rank].terminate(1.0)

    others, ranks = start_ranks("r0", 0, job), start_ranks("r1", 1, job, leave)
    play([*others, *ranks])
    assert [one.continued for one in ranks] == [[True], [True]]
    assert_equal_the_twin([*others, *ranks])
    assert listed_in(job.store)[-1] == ["r0", "r1'"]


@pytest.mark.parametrize("is_same_job", [True, False])
def test_a_state_is_used_once_and_in_its_own_job(is_same_job: bool, turns: Turns) -> None:
    job = job_of("int2", 2)
    replicas = [Replica(f"r{i}", i, job).start() for i in range(2)]
    turns.sleep(0.131)
    replicas[1].terminate(0.1)
    turns.wait(lambda: replicas[1].own is not None)
    other = job if is_same_job else job_of("int2", 2)
    copy = Replica("copy", 1, other, own=replicas[1].own, events=[*replicas[1].events])
    copy.first_name = "r1"
    play([copy.start(), *replicas], 600.0)
    assert copy.continued == [is_same_job]
    assert replicas[1].continued == [not is_same_job]
    assert_equal_the_twin([copy, *replicas] if is_same_job else replicas)
    assert copy.final is not None


SETTINGS: dict[str, Any] = {
    "max_replicas": 2,
    "min_replicas": 2,
    "grace": 30.0,
    "sync_every": 6,
    "num_fragments": 2,
    "overlap_steps": 2,
    "wire_dtype": "int2",
}


class Dropping(Indexed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.nn.functional.dropout(x, 0.2, self.training))


def saving(folder: Path, paces: dict[str, Pace], **changes: Any) -> Any:
    """Return what plays a replica with a folder of its own for its state."""
    (folder / "store").mkdir(parents=True, exist_ok=True)

    def play(name: str) -> Fit:
        torch.manual_seed(ord(name))
        return fit(
            ElasticDiLoCoStrategy(f"file://{folder}/store", **{**SETTINGS, **changes}),
            paces.get(name, Pace()),
            make=Dropping,
            callbacks=[OnExceptionCheckpoint(folder / name)],
            enable_checkpointing=True,
            default_root_dir=folder,
            max_steps=40,
        )

    return play


def start_in_turn(play: Any, folder: Path) -> Fits:
    fits = Fits(play, folder, "a")
    wait_until((folder / "store/roster/0").exists)
    fits.start("b")
    return fits


def test_trainers_that_are_stopped_and_started_again_equal_those_that_are_not(
    tmp_path: Path,
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    expected = start_in_turn(saving(whole, {}), whole).results()
    first = start_in_turn(saving(parts, {"a": Pace(0.0, 19, sends(TERM))}), parts)
    assert first.wait("a") == 143
    first.processes["b"].terminate()  # it waits for the next exchange
    assert first.wait("b") == 143
    again = Fits(saving(parts, {}), parts, "b")
    wait_until(lambda: "Restored on all ranks" in again.output("b"))
    again.processes["b"].terminate()  # again, before its first step
    assert again.wait("b") == 143
    again.start("b")
    again.start("a")
    found = again.results()
    for name, one in found.items():
        assert not one.error, one.error
        assert "Training was not resumed exactly" not in one.output
        assert one.seen == expected[name].seen[-len(one.seen) :], "the same rows at the same steps"
        for key, value in expected[name].state.items():
            assert torch.equal(one.state[key], value), (name, key)
    assert not [*parts.glob("?/*.ckpt")], "they are for one return"


def test_a_state_that_is_out_of_date_is_not_used(tmp_path: Path) -> None:
    alone = {"min_replicas": 1, "grace": 0.05}
    for step, act, code in ((10, TERM, 143), (20, KILL, -KILL)):
        fits = Fits(saving(tmp_path, {"a": Pace(0.0, step, sends(act))}, **alone), tmp_path, "a")
        assert fits.wait("a") == code, fits.output("a")
    found = Fits(saving(tmp_path, {}, **alone), tmp_path, "a").results()["a"]
    assert "state of a replica that has left is not used" in found.output
    assert not found.error
    assert found.steps == 40
