"""`ElasticDiLoCoStrategy`: replicas with a Trainer each, in forked processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler

from lightning_commfree import ElasticDiLoCoStrategy
from lightning_commfree.host import StrategyRegistry
from tests.strategies.elastic import (
    ROWS,
    Fit,
    Fits,
    Pace,
    RendezvousServer,
    Scripted,
    fit,
)
from tests.strategies.models import quiet_trainer

URL = "http://127.0.0.1:29510"
SETTINGS: dict[str, Any] = {
    "max_replicas": 4,
    "sync_every": 6,
    "num_fragments": 2,
    "overlap_steps": 2,
    "wire_dtype": "fp32",
}


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
    for one in found.values():
        assert [step for step, _ in one.seen] == [*range(140 - one.inner_steps, 140)]
        for step, rows in one.seen:
            assert rows == rows_of(one.slot, step)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"rendezvous": None}, r"`rendezvous=None` is not the URL of a lighthouse"),
        ({"rendezvous": "10.0.0.1:29510"}, "is not the URL of a lighthouse"),
        ({"min_replicas": 9}, "`min_replicas=9` is above `max_replicas=8`"),
        ({"heartbeat_timeout": 0.0}, "`heartbeat_timeout=0.0` must be above 0 seconds"),
        ({"sync": "time"}, "`sync='time'` is not implemented yet"),
        ({"sync": "never"}, "`sync='never'` is not valid"),
        ({"replica_size": 2}, "`replica_size=2` is not supported with elastic replicas yet"),
        ({"evaluate": "mean"}, "`evaluate='mean'` needs all replicas at the same time"),
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
    with pytest.raises(ValueError, match="This Trainer has 2 ranks, but elastic replicas need"):
        trainer.strategy.setup_environment()
