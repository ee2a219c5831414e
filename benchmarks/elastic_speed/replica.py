"""The two replicas of a run: ordinary fits, whose steps take a set time, with a log."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import socket
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from typing_extensions import override

from lightning_commfree import ElasticDiLoCoStrategy, StreamingDiLoCoStrategy
from lightning_commfree.elastic.lighthouse import serve_lighthouse
from recipes.training.pretraining import build_data, build_module
from recipes.training.run import factory

REPLICAS = 2
_POLL_S = 0.01
_LIMIT_S = 200
_JOIN_TIMEOUT_S = 60.0
_HEARTBEAT_TIMEOUT_S = 5.0


class Plan(NamedTuple):
    """What the replicas of a run share."""

    config: dict[str, Any]  # of `recipes.pretrain`
    strategy: dict[str, Any]  # arguments of the strategy
    elastic: bool  # `ElasticDiLoCoStrategy`, or `StreamingDiLoCoStrategy`
    folder: Path  # for logs and weights; empty
    step_s: tuple[float, ...]  # what a step takes at least, by replica
    save_every: int = 0  # steps after which the first replica saves the outer weights; 0: never


class Row(NamedTuple):
    """A line of a replica's log, written after every step that it has taken."""

    at_s: float  # since both replicas began
    step: int  # of the common schedule


class Recorder(pl.Callback):
    """Wait for the other replica, make steps take their time, and write the log."""

    def __init__(self, plan: Plan, replica: int) -> None:
        self._plan, self._replica = plan, replica
        self._rows: list[Row] = []
        self._step_begun_s = self._begun_s = 0.0

    @override
    def on_train_start(self, *_: Any) -> None:
        folder = self._plan.folder
        (folder / f"{self._replica}.ready").touch()
        while not all((folder / f"{replica}.ready").exists() for replica in range(REPLICAS)):
            time.sleep(_POLL_S)
        self._begun_s = time.monotonic()

    @override
    def on_train_batch_start(self, *_: Any) -> None:
        self._step_begun_s = time.monotonic()

    @override
    def on_before_optimizer_step(self, *_: Any) -> None:
        # within the step: what a launch sends has been trained for this long
        least_s = self._plan.step_s[self._replica]
        time.sleep(max(0.0, self._step_begun_s + least_s - time.monotonic()))

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        before = self._rows[-1].step if self._rows else 0
        self._rows.append(Row(time.monotonic() - self._begun_s, trainer.global_step))
        every = self._plan.save_every
        if every and self._replica == 0 and trainer.global_step // every > before // every:
            strategy: Any = trainer.strategy
            with strategy.outer_weights():
                torch.save(pl_module.state_dict(), self._plan.folder / f"{len(self._rows)}.pt")

    @override
    def on_train_end(self, *_: Any) -> None:
        (self._plan.folder / f"{self._replica}.json").write_text(json.dumps(self._rows))


def fit(replica: int, port: int, plan: Plan) -> None:
    """Fit one replica; `port` is that of the lighthouse, or of torch's store."""
    for quiet in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(quiet).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*`isinstance\\(treespec, LeafSpec\\)` is deprecated")
    signal.alarm(_LIMIT_S)  # ends this process, even if the script that started it was killed
    torch.set_num_threads(1)
    pl.seed_everything(plan.config["seed"], verbose=False)
    data = build_data(plan.config)
    strategy: Any
    if plan.elastic:
        strategy = ElasticDiLoCoStrategy(
            f"http://127.0.0.1:{port}",
            max_replicas=REPLICAS,
            min_replicas=REPLICAS,
            heartbeat_timeout=_HEARTBEAT_TIMEOUT_S,
            **plan.strategy,
        )
    else:
        ranks = {"RANK": replica, "LOCAL_RANK": replica, "WORLD_SIZE": REPLICAS}
        ranks |= {"LOCAL_WORLD_SIZE": REPLICAS, "GROUP_RANK": 0, "MASTER_PORT": port}
        names = {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "bench"}
        os.environ.update({**{name: str(value) for name, value in ranks.items()}, **names})
        strategy = StreamingDiLoCoStrategy(**plan.strategy)
    trainer = factory(plan.config["trainer"])(
        strategy=strategy,
        devices=1 if plan.elastic else REPLICAS,
        callbacks=[Recorder(plan, replica)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(build_module(plan.config, data), datamodule=data)


def run(plan: Plan) -> list[list[Row]]:
    """Run both replicas to their end; return their logs.

    Raises:
        RuntimeError: a replica failed; it has printed its error.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    lighthouse = None
    if plan.elastic:
        lighthouse = serve_lighthouse("127.0.0.1", port, 1, _JOIN_TIMEOUT_S, _HEARTBEAT_TIMEOUT_S)
    # a server that has imported everything forks the replicas, with no thread of this process
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.elastic_speed.replica"])
    processes = [
        context.Process(target=fit, args=(replica, port, plan), daemon=True)
        for replica in range(REPLICAS)
    ]
    for process in processes:
        process.start()
    end_s = time.monotonic() + _LIMIT_S
    while any(one.is_alive() for one in processes) and time.monotonic() < end_s:
        if any(one.exitcode for one in processes):  # the other one would wait for it
            break
        time.sleep(_POLL_S)
    for process in processes:
        process.kill()
        process.join()
    if lighthouse is not None:
        lighthouse.shutdown()
    if failed := [replica for replica, one in enumerate(processes) if one.exitcode]:
        raise RuntimeError(f"replicas {failed} failed or took longer than {_LIMIT_S} s")
    logs = [json.loads((plan.folder / f"{r}.json").read_text()) for r in range(REPLICAS)]
    return [[Row(*row) for row in rows] for rows in logs]
