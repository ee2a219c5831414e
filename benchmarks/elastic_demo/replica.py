"""One replica of the demo: an ordinary fit, with a log that survives SIGKILL."""

from __future__ import annotations

import hashlib
import json
import logging
import signal
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import nn
from typing_extensions import override

from lightning_commfree import ElasticDiLoCoStrategy
from recipes.training.pretraining import build_data, build_module
from recipes.training.run import factory

_POLL_S = 0.02
_LIMIT_S = 400


class Plan(NamedTuple):
    """What all replicas of a run share."""

    config: dict[str, Any]  # of `recipes.pretrain`
    strategy: dict[str, Any]  # arguments of `ElasticDiLoCoStrategy`
    folder: Path  # for logs and results
    step_s: float  # a step takes at least this long
    hold_step: int  # a replica waits after this step until all others have joined


class Row(NamedTuple):
    """A line of a replica's log, written after every step."""

    at_s: float  # of the machine's monotonic clock, which all processes share
    step: int  # of the common schedule
    loss: float  # training loss of this replica, nats per token
    members: int  # of the latest exchange in which this replica took part; 0 before the first


class Recorder(pl.Callback):
    """Wait for the other founders, then write the log.

    Args:
        path: of the log.
        plan: of the run. The fit begins when "go" exists in its folder, and goes on after its
            `hold_step` when "joined" does, so that no machine ends the fit before a replica joins.
    """

    def __init__(self, path: Path, plan: Plan) -> None:
        self._path, self._plan = path, plan
        self._begun_s = 0.0

    @override
    def setup(self, *_: Any, **__: Any) -> None:
        self._path.with_suffix(".ready").touch()
        self._wait_for("go")
        self._file = self._path.open("w", buffering=1)  # by line: SIGKILL loses none

    @override
    def on_train_batch_start(self, *_: Any) -> None:
        self._begun_s = time.monotonic()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *_: Any
    ) -> None:
        time.sleep(max(0.0, self._begun_s + self._plan.step_s - time.monotonic()))
        strategy: Any = trainer.strategy
        transport = strategy._elastic.transport
        members = len(transport.view.members) if transport.has_landed else 0
        row = Row(time.monotonic(), trainer.global_step, float(outputs["loss"]), members)
        self._file.write(json.dumps(row) + "\n")
        if trainer.global_step >= self._plan.hold_step:
            self._wait_for("joined")

    def _wait_for(self, name: str) -> None:
        while not (self._plan.folder / name).exists():
            time.sleep(_POLL_S)


def fit(name: str, plan: Plan) -> None:
    """Fit one replica, and write its weights and their hash; SIGTERM ends it with code 143."""
    for quiet in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(quiet).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*`isinstance\\(treespec, LeafSpec\\)` is deprecated")
    signal.alarm(_LIMIT_S)  # ends this process, even if the script that started it was killed
    torch.set_num_threads(1)
    pl.seed_everything(plan.config["seed"], verbose=False)
    data = build_data(plan.config)
    module = build_module(plan.config, data)
    strategy = ElasticDiLoCoStrategy(**plan.strategy)
    trainer = factory(plan.config["trainer"])(
        strategy=strategy,
        callbacks=[Recorder(plan.folder / f"{name}.jsonl", plan)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, datamodule=data)
    torch.save(module.state_dict(), plan.folder / f"{name}.pt")
    result = {"step": trainer.global_step, "hash": hash_of(module)}
    (plan.folder / f"{name}.json").write_text(json.dumps(result))


def hash_of(module: nn.Module) -> str:
    """Return the SHA-256 of all parameters, by name and bit."""
    found = hashlib.sha256()
    for name, p in module.named_parameters():
        found.update(name.encode())
        found.update(p.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a log so far; a line that is still being written is left out."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [Row(*json.loads(line)) for line in lines if line.endswith("\n")]
