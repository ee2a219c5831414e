"""`strategy=elastic_diloco`: replicas are commands of their own, and what they are refused."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from recipes.comparison.jobs import check_strategies
from recipes.training.elastic import check_replica
from recipes.training.length import apply_token_budget
from tests.forks import Fork
from tests.recipes.conftest import CONF
from tests.recipes.test_stopping import SMALL, stopped_at

STEPS, SAVED = 60, 30
ROWS, TOKENS = 8, 16  # of a micro-batch, of which a step has two
SLOW = "+callbacks.slow={_target_: tests.recipes.test_stopping.Slow, seconds: 0.02}"


class Replica:
    """A running `python -m recipes.pretrain`, in a fork of this process."""

    def __init__(self, folder: Path, name: str, *words: str) -> None:
        self.run, self.log = folder / name, folder / f"{name}.txt"
        command = [sys.executable, "-m", "recipes.pretrain", *SMALL, *words]
        command += [f"cache_dir={folder}/cache", f"hydra.run.dir={self.run}"]
        with self.log.open("a") as log:
            self._process = Fork(command, stdout=log)

    def wait_until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not done():
            assert self._process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.01)

    def terminate(self) -> None:
        self._process.terminate()

    def ends_with(self, code: int) -> str:
        assert self._process.wait(100) == code, self.log.read_text()
        return self.log.read_text()

    def summary(self) -> dict[str, Any]:
        return json.loads((self.run / "summary.json").read_text())


def test_a_replica_leaves_joins_again_and_ends_with_the_others(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    words = [
        "strategy=elastic_diloco",
        f"strategy.store={(tmp_path / 'store').as_uri()}",
        "strategy.sync_every=20",
        "strategy.min_replicas=2",  # the first one waits for the second, which comes back
        "trainer.devices=1",
        f"trainer.max_steps={STEPS}",
        f"checkpoint_every_n_steps={SAVED}",
        SLOW,
    ]
    first = Replica(tmp_path, "first", *words)
    first.wait_until(lambda: "Before training" in first.log.read_text())
    second = Replica(tmp_path, "second", *words)
    same = Replica(tmp_path, "first", *words)
    assert "Another replica writes its files to" in same.ends_with(1)
    second.wait_until(first.run.joinpath("checkpoints", f"step-{SAVED}.ckpt").exists)
    second.terminate()
    said = second.ends_with(128 + 15)
    assert "this replica leaves the job after its current step" in said
    assert stopped_at(said) < STEPS
    assert "To join them again, run the same command." in said
    again = Replica(tmp_path, "second", *words)
    found = [replica.ends_with(0) for replica in (first, again)]

    assert "slot 0 of the job" in found[0]
    assert "0" not in re.findall(r"slot (\d) of the job", found[1])
    one, two = first.summary(), again.summary()
    assert one["validation_loss"] == two["validation_loss"], "the same weights and all of the data"
    assert two["steps"] <= STEPS - 20, "its own, after it has joined again"
    assert one["steps"] <= STEPS
    for summary in (one, two):
        assert summary["tokens"] == summary["steps"] * 2 * ROWS * TOKENS
    saved = [(replica.run / "checkpoints" / "last.ckpt").exists() for replica in (first, again)]
    assert saved == [True, False], "the first replica saves"

    late = Replica(tmp_path, "late", *words)
    assert "trained          0 steps" in late.ends_with(0)
    assert late.summary()["validation_loss"] == one["validation_loss"]


def _composed(*words: str) -> Any:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        store = "strategy.store=file:///mnt/run"
        return compose("pretrain", ["run_dir=here", "strategy=elastic_diloco", store, *words])


def _check(*words: str, is_sweep: bool = False) -> None:
    check_replica(OmegaConf.to_container(_composed(*words), resolve=True), is_sweep)


def _compare() -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        check_strategies(["ddp", "elastic_diloco"])


ONE = "trainer.devices=1"
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "ranks": (_check, r"trainer.devices=2 and trainer.num_nodes=1 start 2. Set trainer.devices=1"),
    "nodes": (
        lambda: _check("strategy.replica_size=2", "trainer.num_nodes=2"),
        r"of strategy.replica_size=2, but .* start 4. Set trainer.devices=2 trainer.num_nodes=1",
    ),
    "resume": (
        lambda: _check(ONE, "ckpt_path=last"),
        "started again continues from strategy.store",
    ),
    "sweep": (lambda: _check(ONE, is_sweep=True), "one store is for one job"),
    "budget": (
        lambda: apply_token_budget(_composed("token_budget=2e6")),
        "token_budget=2,000,000 cannot be combined with strategy=elastic_diloco",
    ),
    "compare": (
        _compare,
        "elastic_diloco cannot be compared",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_replicas_cannot_do_is_refused(case: str) -> None:
    refused, sentence = REFUSED[case]
    with pytest.raises(ValueError, match=sentence):
        refused()


def test_replicas_of_several_ranks_pass() -> None:
    _check(ONE)
    _check("strategy.replica_size=2")
