"""One process of a replica under a Trainer: elastic, Streaming DiLoCo or DDP."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, Strategy
from typing_extensions import override

from benchmarks.chaos.plan import DDP, LEAST, OURS, REPLICAS, RESTARTED, STREAMING, Log, Plan
from lightning_commfree import ElasticDiLoCoStrategy, StreamingDiLoCoStrategy
from recipes.training.pretraining import build_data, build_module
from recipes.training.report import CHECKPOINT_FOLDER
from recipes.training.resume import find_checkpoint
from recipes.training.run import factory
from recipes.training.stopping import StopOnSignal


class Recorder(pl.Callback):
    """Log every step, and make it take its time.

    Args:
        log: of this process.
        step_s: what the forward takes at least, so that speed does not depend on the machine.
        elastic: whether steps survive this process by an exchange, instead of a checkpoint.
    """

    def __init__(self, log: Log, step_s: float, elastic: bool) -> None:
        self._log, self._step_s, self._elastic = log, step_s, elastic
        self._first: int | None = None  # step at which this process begins
        self._positions: list[int] = []  # in the fit, after each step of this process
        self._launched: dict[int, int] = {}  # position at the launch of a flight
        self._arrived: dict[int, list[int]] = {}  # of these, by fragment, those in a mean
        self._saved = 0
        self._begun_s = 0.0

    @override
    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if self._elastic:
            strategy: Any = trainer.strategy
            diloco = strategy._elastic
            self._arrived = {p: [] for p in range(len(diloco.fragments))}
            diloco.note = self._follow

    def _follow(self, what: str, *about: Any) -> None:
        if what == "launch":
            flight, _, position, sent = about
            if sent:
                self._launched[flight] = position
        elif what == "land":
            flight, listed, _ = about
            if listed:
                self._arrived[flight % len(self._arrived)].append(self._launched[flight])

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._begun_s = time.time()
        if self._first is None:  # not earlier: a joiner gets its position in `on_train_start`
            self._first = self._saved = trainer.global_step

    @override
    def on_before_backward(self, *_: Any) -> None:
        time.sleep(max(0.0, self._begun_s + self._step_s - time.time()))

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._positions.append(trainer.global_step)
        self._write(trainer)

    @override
    def on_save_checkpoint(self, trainer: pl.Trainer, *_: Any) -> None:
        self._saved = trainer.global_step  # complete before the next row

    @override
    def on_exception(self, trainer: pl.Trainer, *_: Any) -> None:
        # a checkpoint was saved, or exchanges in flight complete
        if trainer.received_sigterm or not self._elastic:
            self._write(trainer, drained=True)

    def _write(self, trainer: pl.Trainer, drained: bool = False) -> None:
        if self._first is None:
            return
        step, useful = trainer.global_step, float(len(self._positions))
        if self._elastic:
            launches = {p: list(positions) for p, positions in self._arrived.items()}
            if drained:  # the others average what is in the store
                for flight, position in self._launched.items():
                    launches[flight % len(launches)].append(position)
            kept = arrived(self._positions, [*launches.values()])
        else:
            kept = self._saved - self._first
        self._log.write(step, useful, kept)


def arrived(positions: Sequence[int], launches: Sequence[Sequence[int]]) -> float:
    """Return how many steps of a process have arrived, averaged over the fragments.

    Args:
        positions: in the fit, after each step of the process.
        launches: by fragment, positions of the launches whose messages are in a mean. A message
            contains all steps until its launch.
    """
    latest = [max(one, default=-1) for one in launches]
    return sum(bisect_right(positions, at) for at in latest) / len(latest)


def strategy_of(plan: Plan) -> Strategy:
    """Return the strategy of a method."""
    if plan.method in OURS:
        return ElasticDiLoCoStrategy(
            store=plan.meeting,
            max_replicas=REPLICAS,
            min_replicas=LEAST,
            sync_every=plan.sync_every,
            overlap_steps=plan.overlap_steps,
        )
    if plan.method == STREAMING:
        return StreamingDiLoCoStrategy(sync_every=plan.sync_every, overlap_steps=plan.overlap_steps)
    assert plan.method == DDP
    return DDPStrategy()


def train(plan: Plan, replica: int, folder: Path, open_log: Callable[[], Log]) -> None:
    """Fit; under torchrun's restarts, from the last checkpoint on."""
    del replica
    pl.seed_everything(plan.config["seed"], verbose=False)
    data = build_data(plan.config)
    module = build_module(plan.config, data)
    restarted = plan.method in RESTARTED
    checkpoint = ModelCheckpoint(
        folder / CHECKPOINT_FOLDER,
        "step-{step}",
        auto_insert_metric_name=False,
        every_n_train_steps=plan.save_every,
        save_top_k=-1,
        save_on_train_epoch_end=False,
        enable_version_counter=False,
    )
    stop = StopOnSignal(str(folder))
    trainer = factory(plan.config["trainer"])(
        strategy=strategy_of(plan),
        devices=REPLICAS if restarted else 1,
        callbacks=[
            Recorder(open_log(), plan.step_s, not restarted),
            checkpoint,
            *([stop] if restarted else []),
        ],
        logger=False,
        enable_progress_bar=False,
    )
    path = None
    if restarted and any((folder / CHECKPOINT_FOLDER).glob("*.ckpt")):
        path = find_checkpoint("last", str(folder), trainer.max_steps)
    with stop.listening(trainer) if restarted else nullcontext():
        trainer.fit(module, datamodule=data, ckpt_path=path)
