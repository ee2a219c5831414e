"""`ElasticDiLoCoStrategy`: replicas with a Trainer each, in forked processes."""

from __future__ import annotations

import os
import signal
import socket
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler

from lightning_commfree import ElasticDiLoCoStrategy, StreamingDiLoCoStrategy
from lightning_commfree.elastic.lighthouse import serve_lighthouse
from lightning_commfree.host import ModelCheckpoint, StrategyRegistry, pl
from tests.diloco.training import State
from tests.elastic.elastic_job import wait_stopped
from tests.elastic.fits import (
    FORK,
    ROWS,
    Fit,
    Fits,
    Indexed,
    Pace,
    RendezvousServer,
    Scripted,
    data,
    fit,
    shards_of,
)
from tests.fit.models import quiet_trainer
from tests.world import free_port, run_ranks

pytestmark = pytest.mark.skipif(
    find_spec("torchft") is None, reason="needs torchft: `pip install -e '.[elastic]'`"
)

URL = "http://127.0.0.1:29510"
SETTINGS: dict[str, Any] = {
    "max_replicas": 4,
    "sync_every": 6,
    "num_fragments": 2,
    "overlap_steps": 2,
    "wire_dtype": "fp32",
}


def serve(port: int) -> None:
    server = serve_lighthouse("127.0.0.1", port, 1, 60.0, 2.0)
    time.sleep(300)
    server.shutdown()


def rows_of(slot: int, step: int) -> list[int]:
    """The rows of a slot's batch, with which it takes the step after `step`."""
    sampler = DistributedSampler(range(ROWS), 4, slot, seed=0)  # type: ignore[arg-type]
    per_epoch = ROWS // 4 // 2
    sampler.set_epoch(step // per_epoch)
    start = 2 * (step % per_epoch)
    return [*sampler][start : start + 2]


def assert_equal(fits: dict[str, Fit]) -> None:
    assert not any(one.error for one in fits.values()), [one.error for one in fits.values()]
    first = next(iter(fits.values()))
    for name, one in fits.items():
        for key, tensor in first.state.items():
            assert torch.equal(one.state[key], tensor), (name, key)


def test_a_replica_that_is_killed_and_started_again_joins(tmp_path: Path) -> None:
    server = RendezvousServer(tmp_path, 3)

    def play(name: str) -> Fit:
        strategy = Scripted(server.address, tmp_path, name, **SETTINGS)
        return fit(strategy, Pace(0.02, 20 if name == "b" else None), max_steps=140)

    fits = Fits(play, tmp_path)
    for name in "abc":
        fits.start(name)
    fits.wait_dead("b")
    fits.start("d")
    found = fits.results()
    server.close()
    assert found.keys() == {"a", "c", "d"}, [one.error for one in found.values()]
    assert_equal(found)
    joiner = found["d"]
    assert joiner.joined is not None
    assert joiner.slot == 1
    assert joiner.steps == found["a"].steps == 140
    assert found["a"].inner_steps == found["c"].inner_steps == 140, "no step is lost"
    assert 0 < joiner.inner_steps < 140
    assert len({one.lr for one in found.values()}) == 1, "the joiner's schedule is at its step"
    for one in found.values():
        assert [step for step, _ in one.seen] == [*range(140 - one.inner_steps, 140)]
        for step, rows in one.seen:
            assert rows == rows_of(one.slot, step)


def test_three_replicas_meet_at_a_lighthouse(tmp_path: Path) -> None:
    """With nothing scripted: torchft's lighthouse and heartbeats, and the state server."""
    port = free_port()
    lighthouse = FORK.Process(target=serve, args=(port,), daemon=True)
    lighthouse.start()

    def play(name: str) -> Fit:
        strategy = ElasticDiLoCoStrategy(
            f"http://127.0.0.1:{port}", min_replicas=2, heartbeat_timeout=2.0, **SETTINGS
        )
        return fit(strategy, Pace(0.1, 25 if name == "b" else None), max_steps=110)

    fits = Fits(play, tmp_path)
    for name in "abc":
        fits.start(name)
    fits.wait_dead("b")
    fits.start("d")
    found = fits.results()
    lighthouse.kill()
    assert found.keys() == {"a", "c", "d"}
    assert_equal(found)
    assert found["d"].joined is not None
    assert any(len(slots) == 3 for flight, slots in found["d"].views)
    assert max(one.waited_s for one in found.values()) < 12


def test_sigterm_drains_a_replica_and_the_others_go_on(tmp_path: Path) -> None:
    server = RendezvousServer(tmp_path, 3)

    def play(name: str) -> Fit:
        strategy = Scripted(server.address, tmp_path, name, **SETTINGS)
        dies = 19 if name == "b" else None  # flight 4 was launched after step 18
        return fit(strategy, Pace(0.02, dies, signal.SIGTERM), max_steps=40)

    fits = Fits(play, tmp_path)
    for name in "abc":
        fits.start(name)
    fits.wait_dead("b", signal.SIGTERM)
    found = fits.results()
    server.close()
    assert found.keys() == {"a", "c"}
    assert_equal(found)
    views = dict(found["a"].views)
    assert views[4] == (0, 1, 2)
    assert views[5] == (0, 2)


def test_a_replica_that_was_stopped_joins_again_in_the_same_process(tmp_path: Path) -> None:
    server = RendezvousServer(tmp_path, 3)

    def play(name: str) -> Fit:
        strategy = Scripted(server.address, tmp_path, name, **SETTINGS)
        pace = Pace(0.05, 20 if name == "b" else None, signal.SIGSTOP)  # nothing is in flight
        return fit(strategy, pace, max_steps=200)

    fits = Fits(play, tmp_path)
    for name in "abc":
        fits.start(name)
    stopped = fits.processes["b"]
    wait_stopped(stopped)
    server.lose(f"{socket.gethostname()}-{stopped.pid}-")
    time.sleep(2.5)
    os.kill(stopped.pid, signal.SIGCONT)
    found = fits.results()
    server.close()
    assert found.keys() == {"a", "b", "c"}
    assert_equal(found)
    back = found["b"]
    assert (back.joined, len(back.rejoined)) == (None, 1)
    assert back.steps == found["a"].steps == found["a"].inner_steps == 200
    assert back.inner_steps < 200
    assert len({one.lr for one in found.values()}) == 1, "its schedule is at its step"
    rows = [row for _, rows in back.seen for row in rows]
    expected = [row for step in range(back.inner_steps) for row in rows_of(back.slot, step)]
    assert rows == expected, "its data have no gap"


def test_by_time_a_slow_replica_skips_steps_and_nobody_waits_for_it(tmp_path: Path) -> None:
    server = RendezvousServer(tmp_path, 2)

    def play(name: str) -> Fit:
        strategy = Scripted(server.address, tmp_path, name, sync="time", **SETTINGS)
        return fit(strategy, Pace({"a": 0.02, "b": 0.06}[name], None), max_steps=120)

    fits = Fits(play, tmp_path)
    for name in "ab":
        fits.start(name)
    found = fits.results()
    server.close()
    assert_equal(found)
    fast, slow = found["a"], found["b"]
    assert fast.steps == slow.steps == 120
    assert fast.lr == slow.lr, "the schedule of the slow replica is at the same step"
    assert slow.inner_steps < 0.75 * fast.inner_steps
    assert fast.waited_s < 0.5 * 120 * 0.04, "it would wait so long if every step were waited for"
    for place, (_, rows) in enumerate(slow.seen):
        assert rows == rows_of(slow.slot, place), "its data have no gaps"


def test_by_time_a_stop_stops_all_after_the_same_step_and_a_file_restarts_the_job(
    tmp_path: Path,
) -> None:
    server = RendezvousServer(tmp_path, 2)

    def play(name: str) -> Fit:
        strategy = Scripted(server.address, tmp_path, name, sync="time", **SETTINGS)
        pace = Pace({"a": 0.06, "b": 0.02}[name], None)
        stops = [Stop()] if name == "a" else []
        saves = [ModelCheckpoint(tmp_path / name, every_n_train_steps=6, save_last=True)]
        return fit(
            strategy, pace, callbacks=[*saves, *stops], enable_checkpointing=True, max_steps=90
        )

    fits = Fits(play, tmp_path)
    for name in "ab":
        fits.start(name)
    found = fits.results()
    server.close()
    assert_equal(found)
    assert found["a"].steps == found["b"].steps
    assert 25 < found["a"].steps < 40

    (tmp_path / "again").mkdir()
    server = RendezvousServer(tmp_path / "again", 2)

    def resume(name: str) -> Fit:
        strategy = Scripted(server.address, tmp_path / "again", name, sync="time", **SETTINGS)
        path = str(tmp_path / "a" / "last.ckpt")
        pace = Pace({"a": 0.01, "b": 0.03}[name], None)
        return fit(strategy, pace, ckpt_path=path, max_steps=60)

    fits = Fits(resume, tmp_path / "again")
    for name in "ab":
        fits.start(name)
    again = fits.results()
    server.close()
    assert_equal(again)
    assert [one.steps for one in again.values()] == [60, 60]
    assert again["a"].seen[0][0] == again["b"].seen[0][0] >= 24


def test_by_time_a_fit_without_max_steps_is_refused(tmp_path: Path) -> None:
    def play(name: str) -> Fit:
        strategy = Scripted("nowhere", tmp_path, name, sync="time", **SETTINGS)
        return fit(strategy, Pace(0.0, None), max_epochs=1)

    fits = Fits(play, tmp_path)
    fits.start("a")
    assert "`sync='time'` needs `Trainer(max_steps=...)`" in fits.results()["a"].error


class Stop(pl.Callback):
    """Stops a fit after step 25, or later if a file must exist first."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step >= 25 and (self.path is None or self.path.exists()):
            trainer.should_stop = True


def test_the_first_member_saves_one_stop_stops_all_and_a_file_restarts_the_job(
    tmp_path: Path,
) -> None:
    server = RendezvousServer(tmp_path, 2)

    def play(name: str) -> Fit:
        settings = {**SETTINGS, "sync_every": 7} if name == "other" else SETTINGS
        strategy = Scripted(server.address, tmp_path, name, **settings)
        saves = ModelCheckpoint(tmp_path / name, every_n_train_steps=10, save_last=True)
        return fit(
            strategy,
            Pace(0.03, None),
            loaders=lambda: [data(), data()],
            callbacks=[saves, *([Stop(tmp_path / "fit_other")] if name == "b" else [])],
            enable_checkpointing=True,
            val_check_interval=10,
            max_steps=600,
        )

    fits = Fits(play, tmp_path)
    fits.start("a")
    fits.start("b")
    while not (tmp_path / "a").exists():
        assert fits.processes["a"].is_alive()
        time.sleep(0.02)
    fits.start("other")
    fits.processes["a"].join(40)
    fits.start("late")
    found = fits.results()
    server.close()

    assert "`sync_every` is 7 here, 6 there" in found.pop("other").error
    assert "The job at this rendezvous is over" in found.pop("late").error
    assert_equal(found)
    steps = found["a"].steps
    assert steps == found["b"].steps >= 29
    assert steps % 3 == 2, "landed what b sent at the next launch; one is due every 3 steps"
    assert (tmp_path / "a" / "last.ckpt").exists()
    assert not (tmp_path / "b").exists()
    assert found["a"].validations > found["b"].validations

    (tmp_path / "again").mkdir()
    server = RendezvousServer(tmp_path / "again", 2)

    def resume(name: str) -> Fit:
        strategy = Scripted(server.address, tmp_path / "again", name, **SETTINGS)
        path = str(tmp_path / "a" / "last.ckpt")
        return fit(strategy, Pace(0.01, None), ckpt_path=path, max_steps=steps + 31)

    fits = Fits(resume, tmp_path / "again")
    for name in "ab":
        fits.start(name)
    found = fits.results()
    server.close()
    assert_equal(found)
    assert [one.steps for one in found.values()] == [steps + 31] * 2
    assert found["a"].seen[0][0] == found["b"].seen[0][0] > 19


TWO_RANKS = {**SETTINGS, "max_replicas": 2, "replica_size": 2, "inside": "fsdp"}


def fixed_fit(rank: int, size: int) -> State:
    del rank, size
    settings = {name: value for name, value in TWO_RANKS.items() if name != "max_replicas"}
    module = Indexed()
    strategy = StreamingDiLoCoStrategy(**settings)
    quiet_trainer(strategy=strategy, devices=4, max_steps=14).fit(module, data())
    return shards_of(module)


def test_replicas_of_two_fsdp_ranks_equal_streaming_diloco_and_take_in_another(
    tmp_path: Path,
) -> None:
    expected = run_ranks(fixed_fit, 4, tmp_path)
    server = RendezvousServer(tmp_path, 2)

    def play(name: str) -> Fit:
        strategy = Scripted(server.address, tmp_path, name, **TWO_RANKS)
        return fit(strategy, Pace(0.0, None), max_steps=14)

    fits = Fits(play, tmp_path)
    for name in "ab":
        fits.start(name, ranks=2)
    found = fits.results()
    server.close()
    assert found.keys() == {"a0", "a1", "b0", "b1"}
    for one, state in zip(found.values(), expected, strict=True):
        assert not one.error
        assert all(torch.equal(one.state[key], tensor) for key, tensor in state.items())

    (tmp_path / "kill").mkdir()
    server = RendezvousServer(tmp_path / "kill", 2)

    def die(name: str) -> Fit:
        strategy = Scripted(server.address, tmp_path / "kill", name, **TWO_RANKS)
        return fit(strategy, Pace(0.1, 20 if name[0] == "b" else None), max_steps=60)

    fits = Fits(die, tmp_path / "kill")
    for name in "ab":
        fits.start(name, ranks=2)
    fits.wait_dead("b0")
    fits.wait_dead("b1")
    fits.start("c", ranks=2)
    found = fits.results()
    server.close()
    assert found.keys() == {"a0", "a1", "c0", "c1"}
    for rank in "01":
        assert_equal({name: one for name, one in found.items() if name[1] == rank})
    assert found["c0"].joined == found["c1"].joined
    assert found["c0"].joined is not None
    assert found["c0"].slot == found["c1"].slot == 1


def test_sigterm_on_a_rank_stops_the_ranks_of_its_replica(tmp_path: Path) -> None:
    server = RendezvousServer(tmp_path, 2)

    def play(name: str) -> Fit:
        settings = {**SETTINGS, "replica_size": 2}
        strategy = Scripted(server.address, tmp_path, name, **settings)
        dies = 13 if name == "b1" else None
        return fit(strategy, Pace(0.02, dies, signal.SIGTERM), max_steps=40)

    fits = Fits(play, tmp_path)
    for name in "ab":
        fits.start(name, ranks=2)
    for name in ("b0", "b1"):
        fits.wait_dead(name, signal.SIGTERM)
    found = fits.results()
    server.close()
    assert found.keys() == {"a0", "a1"}
    assert_equal(found)
    views = dict(found["a0"].views)
    assert views[2] == (0, 1), "launched after step 12; landed after 14, when both stop"
    assert views[max(views)] == (0,)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"rendezvous": None}, r"`rendezvous=None` is not the URL of a lighthouse"),
        ({"rendezvous": "10.0.0.1:29510"}, "is not the URL of a lighthouse"),
        ({"min_replicas": 9}, "`min_replicas=9` is above `max_replicas=8`"),
        ({"heartbeat_timeout": 0.0}, "`heartbeat_timeout=0.0` must be greater than 0"),
        (
            {"sync": "time", "replica_size": 2},
            "`sync='time'` does not support `replica_size=2` yet",
        ),
        ({"sync": "never"}, "`sync='never'` is not valid"),
        ({"evaluate": "mean"}, "`evaluate='mean'` needs all replicas for validation"),
    ],
)
def test_a_bad_argument_is_refused_in_one_sentence(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ElasticDiLoCoStrategy(**{"rendezvous": URL, **arguments})


def test_it_is_registered_under_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMFREE_RENDEZVOUS", URL)
    for name in ("elastic_diloco", "elastic_diloco_fork", "elastic_diloco_spawn"):
        assert isinstance(StrategyRegistry.get(name), ElasticDiLoCoStrategy)


def test_without_torchft_an_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torchft", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lightning-commfree\[elastic\]'"):
        ElasticDiLoCoStrategy(URL)


def test_a_trainer_with_several_ranks_is_refused() -> None:
    trainer = quiet_trainer(strategy=ElasticDiLoCoStrategy(URL), devices=2, max_steps=1)
    with pytest.raises(ValueError, match="This Trainer has 2 ranks, but `replica_size=1`"):
        trainer.strategy.setup_environment()
