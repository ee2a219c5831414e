"""Every way to start: by registered name, as an instance, under torchrun; each ends with the same
weights."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.strategies import StrategyRegistry
from torch.distributed.run import main as torchrun

import lightning_commfree
from tests.fit.models import Tiny, assert_saves_its_weights, loader, quiet_trainer
from tests.world import free_port

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("train_script.py")
NAMES = ("streaming_diloco", "distributed_lion", "domino_tp")


def run_script(folder: Path, name: str) -> list[dict[str, Any]]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), name, str(folder)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{name}_*.json"))]


def fit_here(strategy: Any, folder: Path) -> list[float]:
    """Train as the script does, in ranks that this process starts; return the weights."""
    module = Tiny()
    trainer = quiet_trainer(strategy=strategy, devices=2, max_epochs=1)
    before = torch.cat([p.detach().flatten() for p in module.parameters()])
    trainer.fit(module, loader(10 * 2 * 2), loader(4))
    weights = torch.cat([p.detach().flatten() for p in module.parameters()])
    assert trainer.world_size == 2
    assert not torch.equal(weights, before), "the parent gets the trained weights back"
    assert_saves_its_weights(trainer, module, folder)
    return weights.tolist()


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The weights after `Trainer(strategy="streaming_diloco_fork")` in this very process."""
    return fit_here("streaming_diloco_fork", tmp_path_factory.mktemp("forked"))


def test_names_are_registered() -> None:
    ours = {f"{name}{start}" for name in NAMES for start in ("", "_fork", "_spawn")}
    assert ours <= set(StrategyRegistry.available_strategies())
    lightning_commfree.strategies.register_strategies()  # a second call changes nothing


@pytest.mark.parametrize(
    "kind",
    [
        lightning_commfree.StreamingDiLoCoStrategy,
        lightning_commfree.DistributedLionStrategy,
        lightning_commfree.DominoTPStrategy,
    ],
)
def test_a_strategy_pickles_as_spawned_ranks_need_it(kind: Any) -> None:
    assert vars(pickle.loads(pickle.dumps(kind()))).keys() == vars(kind()).keys()


def test_a_trainer_pickles_before_its_ranks_are_there(tmp_path: Path) -> None:
    """With its strategy and the launcher, as Lightning's own does."""
    trainer = quiet_trainer(strategy="streaming_diloco", devices=2)
    assert trainer.strategy.launcher is not None
    torch.save(trainer, tmp_path / "trainer.pt")
    loaded = torch.load(tmp_path / "trainer.pt", weights_only=False)
    assert loaded.strategy.launcher is not None


def test_fabric_does_not_know_the_names() -> None:
    with pytest.raises(ValueError, match="invalid strategy name: `strategy='streaming_diloco'`"):
        Fabric(accelerator="cpu", devices=1, strategy="streaming_diloco")


def test_name_with_popen(tmp_path: Path, forked: list[float]) -> None:
    for outcome in run_script(tmp_path, "streaming_diloco"):
        assert outcome["world_size"] == 2
        assert outcome["strategy"] == "StreamingDiLoCoStrategy"
        assert outcome["weights"] == forked


@pytest.mark.parametrize("attempt", ["0", "1"], ids=["once", "again"])
def test_torchrun(
    attempt: str, tmp_path: Path, forked: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it starts all ranks again because one has died.

    Its store outlives the ranks then, and still holds the addresses of the dead ones. Agent and
    ranks are forks, which are spared the imports; those of `test_name_with_popen` are new.
    """
    if attempt == "1":
        monkeypatch.setenv("DIES_ONCE", "1")
    options = ["--run-path", "--start-method=fork", "--nproc_per_node=2", "--max-restarts=1"]
    words = [f"--master_port={free_port()}", str(SCRIPT), ",".join(NAMES), str(tmp_path)]
    agent = multiprocessing.get_context("fork").Process(target=torchrun, args=([*options, *words],))
    agent.start()
    agent.join(200)
    agent.kill()
    assert agent.exitcode == 0
    for name in NAMES:
        one, other = (json.loads(path.read_text()) for path in sorted(tmp_path.glob(f"{name}_*")))
        assert one["attempt"] == other["attempt"] == attempt
        assert one["weights"] == other["weights"]
        assert name != "streaming_diloco" or one["weights"] == forked


def test_instance_with_spawn(tmp_path: Path, forked: list[float]) -> None:
    strategy = lightning_commfree.StreamingDiLoCoStrategy(start_method="spawn")
    assert fit_here(strategy, tmp_path) == forked
