"""Elastic replicas of two ranks that share a model with Domino."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_commfree import StreamingDiLoCoStrategy
from tests.diloco.training import State
from tests.elastic.fits import Fit, Fits, Pace, RendezvousServer, Scripted, fit, shards_of
from tests.fit.causal_lm import CausalLM, words
from tests.fit.models import quiet_trainer
from tests.world import run_ranks

# not imported: ranks must not be forked from a process with torchft's threads
pytestmark = pytest.mark.skipif(
    find_spec("torchft") is None, reason="needs torchft: `pip install -e '.[elastic]'`"
)

SETTINGS: dict[str, Any] = {
    "sync_every": 6,
    "num_fragments": 2,
    "overlap_steps": 2,
    "wire_dtype": "fp32",
    "replica_size": 2,
    "inside": "domino",
}


class Seen(CausalLM):
    seen: list[Any] = []  # reported by `fit`


def module() -> Seen:
    torch.manual_seed(5)
    return Seen()


def data() -> DataLoader[Any]:
    return DataLoader(words(160), batch_size=2, shuffle=True)


def fixed_fit(rank: int, size: int) -> State:
    del rank, size
    model, strategy = module(), StreamingDiLoCoStrategy(**SETTINGS)
    quiet_trainer(strategy=strategy, devices=4, max_steps=14).fit(model, data())
    return shards_of(model)


def test_replicas_of_two_domino_ranks_equal_streaming_diloco_and_take_in_another(
    tmp_path: Path,
) -> None:
    expected = run_ranks(fixed_fit, 4, tmp_path)
    elastic = {**SETTINGS, "max_replicas": 2}

    def play(folder: Path, address: str, steps: int, dies_after: int | None, name: str) -> Fit:
        strategy = Scripted(address, folder, name, **elastic)
        pace = Pace(0.1 if dies_after else 0.0, dies_after if name[0] == "b" else None)
        return fit(strategy, pace, module, loaders=lambda: [data()], max_steps=steps)

    server = RendezvousServer(tmp_path, 2)
    fits = Fits(partial(play, tmp_path, server.address, 14, None), tmp_path)
    for name in "ab":
        fits.start(name, ranks=2)
    found = fits.results()
    server.close()
    for one, state in zip(found.values(), expected, strict=True):
        assert not one.error, one.error
        assert all(torch.equal(one.state[key], tensor) for key, tensor in state.items())

    folder = tmp_path / "kill"
    folder.mkdir()
    server = RendezvousServer(folder, 2)
    fits = Fits(partial(play, folder, server.address, 60, 20), folder)
    for name in "ab":
        fits.start(name, ranks=2)
    fits.wait_dead("b0")
    fits.wait_dead("b1")
    fits.start("c", ranks=2)
    found = fits.results()
    server.close()
    assert found.keys() == {"a0", "a1", "c0", "c1"}
    assert not any(one.error for one in found.values()), [one.error for one in found.values()]
    for rank in "01":
        for key, tensor in found[f"a{rank}"].state.items():
            assert torch.equal(found[f"c{rank}"].state[key], tensor), key
    assert found["c0"].joined == found["c1"].joined
    assert found["c0"].joined is not None
