"""`ElasticDiLoCoStrategy`: replicas with a Trainer each, in forked processes, and a folder."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler

from lightning_commfree import ElasticDiLoCoStrategy, StreamingDiLoCoStrategy
from lightning_commfree.elastic import log as log_module
from lightning_commfree.elastic import strategy as elastic_strategy
from lightning_commfree.host import ModelCheckpoint, StrategyRegistry, pl
from lightning_commfree.stores.store import open_store
from lightning_commfree.stores.tcp import serve
from tests.diloco.training import State, state_of
from tests.elastic.fits import (
    FORK,
    KILL,
    ROWS,
    STOP,
    TERM,
    Fit,
    Fits,
    Indexed,
    Pace,
    data,
    fit,
    listed_in,
    play_on,
    sends,
    wait_until,
)
from tests.fit.models import quiet_trainer
from tests.mortal import wait_stopped
from tests.world import free_port, run_ranks

URL = "tcp://127.0.0.1:29510"
SETTINGS: dict[str, Any] = {
    "max_replicas": 4,
    "grace": 1.0,
    "sync_every": 6,
    "num_fragments": 2,
    "overlap_steps": 2,
    "wire_dtype": "fp32",
}


playing = partial(play_on, SETTINGS)


def has_commits(store: Path, count: int) -> Callable[[], bool]:
    return lambda: (store / f"commit/{count - 1}").exists()


def rows_of(slot: int, step: int) -> list[int]:
    """The rows of a slot's batch, with which it takes the step after `step`."""
    sampler = DistributedSampler(range(ROWS), 4, slot, seed=0)  # type: ignore[arg-type]
    per_epoch = ROWS // 4 // 2
    sampler.set_epoch(step // per_epoch)
    start = 2 * (step % per_epoch)
    return [*sampler][start : start + 2]


def assert_equal(fits: dict[str, Fit], names: str) -> None:
    assert not any(one.error for one in fits.values()), [one.error for one in fits.values()]
    assert fits.keys() == {*names}
    first = next(iter(fits.values()))
    for name, one in fits.items():
        for key, tensor in first.state.items():
            assert torch.equal(one.state[key], tensor), (name, key)


FIXED = {"sync_every": 6, "num_fragments": 2, "wire_dtype": "fp4"}


def fixed_fit(rank: int, size: int, overlap_steps: int) -> State:
    del rank, size
    module = Indexed()
    strategy = StreamingDiLoCoStrategy(overlap_steps=overlap_steps, **FIXED)
    quiet_trainer(strategy=strategy, devices=2, max_steps=40).fit(module, data())
    return state_of(module)


@pytest.mark.parametrize(("overlap_steps", "sync"), [(0, "steps"), (2, "steps"), (2, "time")])
def test_without_failures_it_equals_streaming_diloco(
    overlap_steps: int, sync: str, tmp_path: Path, store: Path
) -> None:
    expected = run_ranks(fixed_fit, 2, tmp_path, overlap_steps)
    settings = {**FIXED, "overlap_steps": overlap_steps, "sync": sync, "grace": 30.0}
    play = playing(store, lambda name: Pace(0.01), 40, max_replicas=2, min_replicas=2, **settings)
    found = Fits(play, tmp_path, "ab").results()
    assert_equal(found, "ab")
    if all(one.trained == 40 for one in found.values()):  # by time, a replica may skip steps
        for name, tensor in expected[0].items():
            assert torch.equal(found["a"].state[name], tensor)
    else:
        assert sync == "time"


def test_a_replica_that_is_killed_and_started_again_joins(tmp_path: Path, store: Path) -> None:
    def pace(name: str) -> Pace:
        if name == "a":  # the others do not finish without the joiner
            return Pace(0.02, 80, lambda trainer: wait_until(lambda: joined(store, 3)))
        return Pace(0.02, 20, sends(KILL)) if name == "b" else Pace(0.02)

    fits = Fits(playing(store, pace, 140), tmp_path, "abc")
    assert fits.wait("b") == -KILL
    fits.start("d")
    found = fits.results()
    assert_equal(found, "acd")
    joiner = found["d"]
    assert 0 < joiner.trained < 140
    assert {one.steps for one in found.values()} == {140}
    assert len({one.lr for one in found.values()}) == 1, "the joiner's schedule is at its step"
    start = joiner.seen[0][0]
    for place, (_, rows) in enumerate(joiner.seen):  # its data have no gaps
        assert rows == rows_of(joiner.slot, start + place)


def joined(store: Path, slot: int) -> bool:
    return any(slot in listed for listed in listed_in(store))


def test_a_job_that_was_killed_as_a_whole_continues(tmp_path: Path, store: Path) -> None:
    fits = Fits(playing(store, lambda name: Pace(0.02, 50, sends(KILL)), 100), tmp_path, "ab")
    assert fits.wait("a") == fits.wait("b") == -KILL
    again = Fits(playing(store, lambda name: Pace(0.01), 100), tmp_path, "cd")
    found = again.results()
    assert_equal(found, "cd")
    assert all(one.seen[0][0] >= 24 for one in found.values()), "a state every 24 steps"


def test_sigterm_ends_one_replica_and_the_others_go_on(tmp_path: Path, store: Path) -> None:
    def pace(name: str) -> Pace:
        return Pace(0.02, 19 if name == "b" else -1, sends(TERM))

    fits = Fits(playing(store, pace, grace=20.0, min_replicas=2), tmp_path, "abc")
    assert fits.wait("b") == 143
    found = fits.results(15.0)  # less than the grace: nobody waits for it
    assert_equal(found, "ac")
    lengths = [len(listed) for listed in listed_in(store)]
    assert lengths[-1] == 2


def test_sigterm_is_honored_while_a_landing_waits(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert elastic_strategy._LEAVE_S < 20
    monkeypatch.setattr(elastic_strategy, "_LEAVE_S", 3.0)
    fits = Fits(playing(store, lambda name: Pace(), min_replicas=2), tmp_path, "a")
    wait_until(lambda: [*store.glob("x/0/*")])
    time.sleep(0.5)
    began_s = time.monotonic()
    fits.processes["a"].terminate()
    assert fits.wait("a") == 143
    assert time.monotonic() - began_s < 6


class StopAt(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step >= 25:
            trainer.should_stop = True


@pytest.mark.parametrize("sync", ["steps", "time"])
def test_one_stop_stops_all_and_a_late_replica_gets_the_final_weights(
    sync: str, tmp_path: Path, store: Path
) -> None:
    def play(name: str) -> Fit:
        strategy = ElasticDiLoCoStrategy(f"file://{store}", sync=sync, **SETTINGS)
        stops = [StopAt()] if name == "b" else []
        return fit(strategy, Pace(0.03), callbacks=stops, max_steps=600)

    fits = Fits(play, tmp_path, "ab")
    assert fits.wait("a") == fits.wait("b") == 0
    fits.start("late")
    found = fits.results()
    assert_equal(found, ["a", "b", "late"])  # type: ignore[arg-type]
    assert found["late"].trained == 0
    assert "has ended after step" in found["late"].output
    steps = {one.steps for one in found.values()}
    assert len(steps) == 1
    if sync == "steps":
        assert steps.pop() % 3 == 2, "landed what b sent at the next launch, every 3 steps"


def test_by_time_a_slow_replica_skips_steps_and_nobody_waits_for_it(
    tmp_path: Path, store: Path
) -> None:
    def pace(name: str) -> Pace:
        return Pace({"a": 0.03, "b": 0.09}[name])

    play = playing(store, pace, 60, sync="time", grace=20.0, min_replicas=2)
    found = Fits(play, tmp_path, "ab").results()
    assert_equal(found, "ab")
    fast, slow = found["a"], found["b"]
    assert fast.steps == slow.steps == 60
    assert fast.lr == slow.lr, "the schedule of the slow replica is at the same step"
    assert slow.trained < 0.75 * fast.trained
    for place, (_, rows) in enumerate(slow.seen):
        assert rows == rows_of(slow.slot, place), "its data have no gaps"


def test_a_late_replica_ends_with_the_others_by_epochs(tmp_path: Path, store: Path) -> None:
    def play(name: str) -> Fit:
        strategy = ElasticDiLoCoStrategy(f"file://{store}", **{**SETTINGS, "grace": 0.1})
        pause = Pace(0.02, 20 if name == "b" else -1, lambda trainer: time.sleep(1.5))
        return fit(strategy, pause, max_epochs=4)

    found = Fits(play, tmp_path, "ab").results()
    assert_equal(found, "ab")
    assert found["a"].steps == found["b"].steps == 120
    assert found["b"].trained < 120


class FullDisk(pl.Callback):
    """Makes saves of this replica fail."""

    def on_fit_start(self, trainer: pl.Trainer, *_: Any) -> None:
        def fail(*args: Any, **kwargs: Any) -> None:
            raise OSError(28, "No space left on device")

        trainer.strategy._resume._write = fail  # type: ignore[attr-defined]


def test_the_first_replica_validates_and_saves_and_a_file_starts_another_job(
    tmp_path: Path, store: Path
) -> None:
    def play(name: str) -> Fit:
        settings = {**SETTINGS, "sync_every": 7} if name == "other" else SETTINGS
        strategy = ElasticDiLoCoStrategy(f"file://{store}", min_replicas=2, **settings)
        saves = ModelCheckpoint(tmp_path / name, every_n_train_steps=10, save_top_k=-1)
        return fit(
            strategy,
            Pace(0.02, 30, lambda trainer: wait_until((tmp_path / "fit_other").exists)),
            loaders=lambda: [data(), data()],
            callbacks=[saves],
            enable_checkpointing=True,
            val_check_interval=10,
            max_steps=60,
        )

    fits = Fits(play, tmp_path, "a")
    wait_until(lambda: [*store.glob("roster/*")])
    fits.start("b")
    wait_until(has_commits(store, 1))
    fits.start("other")
    found = fits.results()
    text = "`sync_every` is 7 here and 6 there"
    assert text in found.pop("other").error
    assert_equal(found, "ab")
    assert found["a"].slot == 0
    assert len([*(tmp_path / "a").glob("*.ckpt")]) == 6
    assert not (tmp_path / "b").exists()
    assert found["a"].validations >= 6
    assert found["b"].validations == 0

    again = tmp_path / "again"
    again.mkdir()

    def resume(name: str) -> Fit:
        strategy = ElasticDiLoCoStrategy(f"file://{again}", min_replicas=2, **SETTINGS)
        path = next(str(one) for one in (tmp_path / "a").glob("*step=20*.ckpt"))
        return fit(strategy, Pace(0.01), ckpt_path=path, max_steps=51)

    (tmp_path / "second").mkdir()
    found = Fits(resume, tmp_path / "second", "cd").results()
    assert_equal(found, "cd")
    assert [one.steps for one in found.values()] == [51, 51]
    assert [one.seen[0][0] for one in found.values()] == [20, 20]


def test_a_replica_that_cannot_save_warns_and_trains_on(tmp_path: Path, store: Path) -> None:
    def play(name: str) -> Fit:
        strategy = ElasticDiLoCoStrategy(f"file://{store}", **SETTINGS)
        saves = ModelCheckpoint(tmp_path / name, every_n_train_steps=10)
        return fit(
            strategy,
            Pace(0.01),
            callbacks=[saves, FullDisk()],
            enable_checkpointing=True,
            max_steps=30,
        )

    found = Fits(play, tmp_path, "ab").results()
    assert_equal(found, "ab")
    assert "No space left on device" in found["a"].output + found["b"].output
    assert {one.steps for one in found.values()} == {30}


def test_there_are_no_more_replicas_than_slots(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_module, "_ANSWER_S", 2.5)
    monkeypatch.setattr(elastic_strategy, "_ASK_AGAIN_S", 0.5)

    def pace(name: str) -> Pace:
        if name == "a":
            return Pace(0.01, 40, lambda trainer: wait_until((tmp_path / "fit_c").exists))
        return Pace(0.01)

    def play(name: str) -> Fit:
        timeout = {"timeout": timedelta(seconds=1)} if name == "c" else {}
        return playing(store, pace, max_replicas=1, **timeout)(name)

    fits = Fits(play, tmp_path, "a")
    wait_until(has_commits(store, 1))
    fits.start("c")
    found = fits.results()
    assert "All 1 slots of the job" in found.pop("c").error
    assert_equal(found, "a")


def serve_until_killed(port: int) -> None:
    server = serve("127.0.0.1", port)
    time.sleep(300)
    del server


def test_replicas_meet_at_a_tcp_store(tmp_path: Path) -> None:
    port = free_port()
    server = FORK.Process(target=serve_until_killed, args=(port,), daemon=True)
    server.start()

    def play(name: str) -> Fit:
        settings = {**SETTINGS, "min_replicas": 2}
        strategy = ElasticDiLoCoStrategy(f"tcp://127.0.0.1:{port}", **settings)
        return fit(strategy, Pace(0.01), max_steps=40)

    found = Fits(play, tmp_path, "ab").results()
    server.kill()
    assert_equal(found, "ab")
    assert sorted(one.slot for one in found.values()) == [0, 1]


# What failed with quorums


def test_newcomers_join_while_the_founder_has_not_exchanged_anything(
    tmp_path: Path, store: Path
) -> None:
    def pace(name: str) -> Pace:
        if name == "a":  # slow to start, and newcomers outnumber it
            return Pace(0.0, 2, lambda trainer: wait_until(lambda: roster() == 3))
        return Pace(0.02)

    def roster() -> int:
        return len([*store.glob("roster/*")])

    fits = Fits(playing(store, pace, sync_every=30, min_replicas=3), tmp_path, "a")
    wait_until(lambda: roster() == 1)
    fits.start("b")
    fits.start("c")
    assert_equal(fits.results(), "abc")
    assert all(len(listed) == 3 for listed in listed_in(store))


def test_a_death_and_a_joiner_in_an_outage_of_the_store(tmp_path: Path, store: Path) -> None:
    def pace(name: str) -> Pace:
        if name == "c":
            return Pace(0.03, 40, lambda trainer: wait_until(lambda: joined(store, 3)))
        return Pace(0.03)

    opened: list[Any] = []

    def open_in_outage(url: str) -> Any:
        opened.append(open_store(url))
        if len(opened) == 2:  # one for messages, one for states
            (tmp_path / "joins").touch()
            wait_until(lambda: not store.exists())
        return opened[-1]

    def play(name: str) -> Fit:
        if name == "d":
            elastic_strategy.open_store = open_in_outage  # type: ignore[assignment]
        return playing(store, pace, 70)(name)

    fits = Fits(play, tmp_path, "abcd")
    wait_until(lambda: has_commits(store, 3)() and (tmp_path / "joins").exists())
    store.rename(tmp_path / "away")
    fits.processes["b"].kill()
    time.sleep(1.5)
    (tmp_path / "away").rename(store)
    found = fits.results()
    assert_equal(found, "acd")


def test_a_replica_that_was_stopped_catches_up_in_the_same_process(
    tmp_path: Path, store: Path
) -> None:
    def pace(name: str) -> Pace:
        if name == "a":
            return Pace(0.03, 70, lambda trainer: wait_until((tmp_path / "awake").exists))
        return Pace(0.03, 20, sends(STOP))

    fits = Fits(playing(store, pace, 110, grace=0.3), tmp_path, "ab")
    stopped = fits.processes["b"]
    wait_stopped(stopped)
    time.sleep(1.5)
    os.kill(stopped.pid, signal.SIGCONT)
    time.sleep(0.5)
    (tmp_path / "awake").touch()
    found = fits.results()
    assert_equal(found, "ab")
    back = found["b"]
    assert back.trained < back.steps == 110
    assert len({one.lr for one in found.values()}) == 1, "its schedule is at its step"
    rows = [row for _, rows in back.seen for row in rows]
    expected = [row for step in range(back.trained) for row in rows_of(back.slot, step)]
    assert rows == expected, "its data have no gap"


def listening() -> int:
    """Return on how many TCP ports this process listens."""
    inodes = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            inodes.add(os.readlink(entry))
        except OSError:  # the listing's own
            continue
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]
    ]
    return sum(one[3] == "0A" and f"socket:[{one[9]}]" in inodes for one in lines)


def test_no_replica_listens(tmp_path: Path, store: Path) -> None:
    def look(trainer: pl.Trainer) -> None:
        assert listening() == before

    before = listening()
    found = Fits(playing(store, lambda name: Pace(0.01, 20, look), 30), tmp_path, "ab").results()
    assert_equal(found, "ab")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"store": None}, "`store=None`, and the environment variable COMMFREE_STORE is not set"),
        ({"store": "10.0.0.1:29510"}, r"`store='10.0.0.1:29510'` is not the URL of a store"),
        ({"min_replicas": 9}, "`min_replicas=9` is above `max_replicas=8`"),
        ({"grace": -1}, "`grace=-1` must be 'auto' or a number of seconds"),
        ({"grace": "short"}, "`grace='short'` must be 'auto' or a number of seconds"),
        ({"sync": "never"}, "`sync='never'` is not valid"),
        ({"evaluate": "mean"}, "`evaluate='mean'` needs all replicas for validation"),
    ],
)
def test_a_bad_argument_is_refused_in_one_sentence(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ElasticDiLoCoStrategy(**{"store": URL, **arguments})


def test_it_is_registered_under_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMFREE_STORE", URL)
    for name in ("elastic_diloco", "elastic_diloco_fork", "elastic_diloco_spawn"):
        assert isinstance(StrategyRegistry.get(name), ElasticDiLoCoStrategy)


def test_a_trainer_with_another_number_of_ranks_is_refused() -> None:
    trainer = quiet_trainer(strategy=ElasticDiLoCoStrategy(URL), devices=2, max_steps=1)
    with pytest.raises(ValueError, match="This Trainer has 2 ranks, but `replica_size=1`"):
        trainer.strategy.setup_environment()


def test_by_time_a_fit_without_max_steps_is_refused(tmp_path: Path, store: Path) -> None:
    strategy = ElasticDiLoCoStrategy(f"file://{store}", sync="time", **SETTINGS)
    with pytest.raises(ValueError, match=r"`sync='time'` needs `Trainer\(max_steps=...\)`"):
        quiet_trainer(strategy=strategy, devices=1, max_epochs=1).fit(Indexed(), data())


def test_sigterm_is_honored_in_an_outage_at_a_landing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert elastic_strategy._LEAVE_S < 20
    monkeypatch.setattr(elastic_strategy, "_LEAVE_S", 1.0)
    store = tmp_path / "store"
    store.mkdir()

    def leave(trainer: Any) -> None:
        store.rename(tmp_path / "away")
        (tmp_path / "gone").touch()

    def play_one(name: str) -> Fit:
        strategy = ElasticDiLoCoStrategy(f"file://{store}", sync_every=6, overlap_steps=2)
        return fit(strategy, Pace(0.01, 20, leave), max_steps=10_000)

    fits = Fits(play_one, tmp_path, "a")
    wait_until((tmp_path / "gone").exists)
    time.sleep(0.5)  # it waits for an exchange now, or will
    fits.processes["a"].terminate()
    assert fits.wait("a") == 143
