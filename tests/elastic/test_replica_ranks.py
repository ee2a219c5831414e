"""`ElasticDiLoCoStrategy` with replicas of two ranks: a process each, and a store in a folder."""

from __future__ import annotations

import json
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_commfree import ElasticDiLoCoStrategy, StreamingDiLoCoStrategy
from lightning_commfree.host import ModelCheckpoint, pl
from lightning_commfree.layouts.fsdp import why_unavailable
from lightning_commfree.model.shards import local_tensor
from tests.diloco.training import State
from tests.elastic.fits import (
    KILL,
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
from tests.fit.causal_lm import CausalLM, words
from tests.fit.models import quiet_trainer
from tests.mortal import wait_stopped
from tests.world import run_ranks

WHY_NOT = why_unavailable()
INSIDE = [
    "ddp",
    pytest.param("fsdp", marks=pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))),
]
SETTINGS: dict[str, Any] = {
    "replica_size": 2,
    "sync_every": 6,
    "num_fragments": 2,
    "overlap_steps": 2,
    "wire_dtype": "fp4",
}


playing = partial(play_on, {"max_replicas": 3, "grace": 1.0, **SETTINGS})


def on_rank(rank: int, pace: Pace) -> Pace:
    """Return a pace that acts on one rank only."""
    return pace if int(os.environ["RANK"]) == rank else Pace(pace.step_s)


def assert_equal(fits: dict[str, Fit], *names: str) -> None:
    """The replicas' weights are equal, and each holds them on its ranks."""
    for rank in "01":
        first = fits[names[0] + rank]
        for name in names:
            one = fits[name + rank]
            assert not one.error, one.error
            for key, tensor in first.state.items():
                assert torch.equal(one.state[key], tensor), (name, rank, key)


def make(inside: str) -> pl.LightningModule:
    return CausalLM() if inside == "domino" else Indexed()


def loader(inside: str) -> DataLoader[Any]:
    return DataLoader(words(160), batch_size=2, shuffle=True) if inside == "domino" else data()


def fixed_fit(rank: int, size: int, inside: str) -> State:
    del rank, size
    module = make(inside)
    strategy = StreamingDiLoCoStrategy(inside=inside, **SETTINGS)
    quiet_trainer(strategy=strategy, devices=4, max_steps=40).fit(module, loader(inside))
    return {name: local_tensor(p).clone() for name, p in module.named_parameters()}


@pytest.mark.parametrize("inside", [*INSIDE, "domino"])
def test_without_failures_it_equals_streaming_diloco(
    inside: str, tmp_path: Path, store: Path
) -> None:
    expected = run_ranks(fixed_fit, 4, tmp_path, inside)
    settings = {"inside": inside, "max_replicas": 2, "min_replicas": 2, **SETTINGS}

    def play(name: str) -> Fit:
        strategy = ElasticDiLoCoStrategy(f"file://{store}", grace=30.0, **settings)
        here = {"make": partial(make, inside), "loaders": lambda: [loader(inside)]}
        return fit(strategy, Pace(0.01), max_steps=40, **here)

    found = Fits(play, tmp_path, "ab", 2).results(60.0)
    assert_equal(found, "a", "b")
    for rank in (0, 1):
        for name, tensor in expected[rank].items():
            assert torch.equal(found[f"a{rank}"].state[name], tensor), (rank, name)
    stored = json.loads((store / "config").read_bytes())["settings"]
    assert (stored["replica_size"], stored["inside"]) == ("2", repr(inside)), "others are refused"
    if inside != "domino":
        rows = {row for one in found.values() for row in one.seen[0][1]}
        assert len(rows) == 8, "each rank has its own data"


@pytest.mark.parametrize("inside", INSIDE)
def test_a_replica_ends_with_its_first_rank_that_dies_and_another_one_joins(
    inside: str, tmp_path: Path, store: Path
) -> None:
    def joined() -> bool:
        return any(2 in listed for listed in listed_in(store))

    def pace(name: str) -> Pace:
        if name == "b":
            return on_rank(1, Pace(0.02, 14, sends(KILL)))
        return Pace(0.02, 32 if name == "a" else -1, lambda trainer: wait_until(joined, 60.0))

    fits = Fits(playing(store, pace, 60, inside=inside), tmp_path, "ab", 2)
    assert fits.wait("b1") == -KILL
    assert fits.wait("b0") == 0
    fits.start("c")
    found = fits.results(90.0)
    assert "rank 1" in found["b0"].error
    assert_equal(found, "a", "c")
    assert {one.steps for name, one in found.items() if name != "b0"} == {60}
    assert 0 < found["c0"].trained == found["c1"].trained < 60


def test_a_replica_that_was_stopped_skips_the_same_steps_on_all_ranks(
    tmp_path: Path, store: Path
) -> None:
    def pace(name: str) -> Pace:
        if name == "a":
            return Pace(0.03, 70, lambda trainer: wait_until((tmp_path / "awake").exists))
        return Pace(0.03, 20, sends(STOP))

    fits = Fits(playing(store, pace, 110, grace=0.3), tmp_path, "ab", 2)
    stopped = [fits.processes[name] for name in ("b0", "b1")]
    for process in stopped:
        wait_stopped(process)
    time.sleep(1.5)
    for process in stopped:
        os.kill(process.pid, signal.SIGCONT)
    time.sleep(0.5)
    (tmp_path / "awake").touch()
    found = fits.results(60.0)
    assert_equal(found, "a", "b")
    assert {one.steps for one in found.values()} == {110}
    assert found["b0"].trained == found["b1"].trained < 110
    assert len({one.lr for one in found.values()}) == 1


def test_sigterm_to_one_rank_ends_the_replica(tmp_path: Path, store: Path) -> None:
    def pace(name: str) -> Pace:
        return on_rank(1, Pace(0.02, 19 if name == "b" else -1, sends(TERM)))

    play = playing(store, pace, 60, grace=20.0, min_replicas=2)
    fits = Fits(play, tmp_path, "abc", 2)
    assert fits.wait("b0") == fits.wait("b1") == 143
    found = fits.results(20.0)
    assert_equal(found, "a", "c")


@pytest.mark.parametrize("inside", INSIDE)
def test_one_replica_saves_and_its_file_starts_another_job(
    inside: str, tmp_path: Path, store: Path
) -> None:
    settings = {"inside": inside, "max_replicas": 2, "min_replicas": 2, **SETTINGS}

    def play(name: str) -> Fit:
        strategy = ElasticDiLoCoStrategy(f"file://{store}", **settings)
        saves = ModelCheckpoint(tmp_path, every_n_train_steps=14, save_top_k=-1)
        kwargs = {"callbacks": [saves], "enable_checkpointing": True, "max_steps": 22}
        return fit(strategy, Pace(0.01), loaders=lambda: [data(), data()], **kwargs)

    found = Fits(play, tmp_path, "ab", 2).results(60.0)
    assert_equal(found, "a", "b")
    path = next(str(one) for one in tmp_path.glob("*step=14*.ckpt"))
    again = tmp_path / "again"
    again.mkdir()

    def resume(name: str) -> Fit:
        strategy = ElasticDiLoCoStrategy(f"file://{again}", **settings)
        return fit(strategy, Pace(0.01), ckpt_path=path, max_steps=29)

    (tmp_path / "second").mkdir()
    found = Fits(resume, tmp_path / "second", "cd", 2).results(60.0)
    assert_equal(found, "c", "d")
    assert [one.seen[0][0] for one in found.values()] == [14] * 4
