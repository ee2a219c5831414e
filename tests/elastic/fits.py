"""Trainers of an elastic job in forked processes, one per rank, with a store in a folder."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_commfree import ElasticDiLoCoStrategy
from lightning_commfree.host import pl
from lightning_commfree.model.shards import local_tensor
from tests.diloco.training import State
from tests.fit.models import Tiny, quiet_trainer
from tests.world import TIMEOUT, become_rank, free_port

FORK = multiprocessing.get_context("fork")
ROWS = 240


class Indexed(Tiny):
    """Records which rows it trains on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, list[int]]] = []  # step, rows

    def training_step(self, batch: Any, index: int) -> Tensor:
        x, y, rows = batch
        self.seen.append((self.trainer.global_step, rows.tolist()))
        return super().training_step((x, y), index)

    def validation_step(self, batch: Any, index: int) -> None:
        super().validation_step(batch[:2], index)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 1000)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def data() -> DataLoader[Any]:
    x = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(7))
    rows = TensorDataset(x, x.sin().sum(1, keepdim=True), torch.arange(ROWS))
    return DataLoader(rows, batch_size=2, shuffle=True)


class Pace(pl.Callback):
    """Takes time for each step, and calls `act(trainer)` after one."""

    def __init__(
        self, step_s: float = 0.0, at: int = -1, act: Callable[[pl.Trainer], object] = id
    ) -> None:
        self.step_s, self.at, self.act = step_s, at, act
        self.validations = 0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        time.sleep(self.step_s)
        if trainer.global_step >= self.at >= 0:
            self.at = -1
            self.act(trainer)

    def on_validation_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.validations += not trainer.sanity_checking


def sends(number: int) -> Callable[[pl.Trainer], object]:
    """Return what sends a signal to this process."""
    return lambda trainer: os.kill(os.getpid(), number)


@dataclass
class Fit:
    """What a replica reports."""

    error: str = ""
    slot: int = -1
    state: State = field(default_factory=dict)
    seen: list[tuple[int, list[int]]] = field(default_factory=list)
    validations: int = 0
    steps: int = 0
    lr: float = 0.0
    waited_s: float = 0.0
    output: str = ""

    @property
    def trained(self) -> int:
        """Number of steps that it has taken itself."""
        return len(self.seen)


def fit(
    strategy: ElasticDiLoCoStrategy,
    pace: Pace,
    ckpt_path: str | None = None,
    loaders: Callable[[], Sequence[Any]] = lambda: [data()],
    make: Callable[[], pl.LightningModule] = Indexed,
    **trainer_kwargs: Any,
) -> Fit:
    module = make()
    callbacks = [pace, *trainer_kwargs.pop("callbacks", ())]
    devices = strategy.settings.replica_size
    trainer = quiet_trainer(
        strategy=strategy, devices=devices, callbacks=callbacks, **trainer_kwargs
    )
    found = Fit()
    try:
        trainer.fit(module, *loaders(), ckpt_path=ckpt_path)
    except Exception:  # noqa: BLE001 - the parent looks at it
        found.error = traceback.format_exc()
    found.state = {name: local_tensor(p).clone() for name, p in module.named_parameters()}
    found.slot, found.seen = strategy.slot, getattr(module, "seen", [])
    found.waited_s = strategy.ledger.seconds_waited
    found.validations, found.steps = pace.validations, trainer.global_step
    with suppress(Exception):
        found.lr = trainer.optimizers[0].param_groups[0]["lr"]
    return found


def play_on(
    defaults: dict[str, Any],
    store: Path,
    paces: Callable[[str], Pace],
    max_steps: int = 60,
    **settings: Any,
) -> Callable[[str], Fit]:
    """Return what plays a rank, with the pace of its replica."""

    def play(name: str) -> Fit:
        strategy = ElasticDiLoCoStrategy(f"file://{store}", **{**defaults, **settings})
        return fit(strategy, paces(name), max_steps=max_steps)

    return play


def _play(
    play: Callable[[str], Fit], replica: str, name: str, folder: Path, world: tuple[int, int, int]
) -> None:
    torch.set_num_threads(1)
    if world[1] > 1:
        become_rank(*world, TIMEOUT)
    with (folder / f"output_{name}").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        sys.stdout = sys.stderr = output
        warnings.showwarning = lambda message, *_: print(message)  # pytest records them
        for logger in ("lightning.pytorch", "lightning_utilities.core.rank_zero", ""):
            logging.getLogger(logger).handlers = [logging.StreamHandler(output)]
        found = play(replica)  # after SIGTERM, this raises SystemExit
    torch.save(found, folder / f"writing_{name}")
    (folder / f"writing_{name}").rename(folder / f"fit_{name}")
    os._exit(0)


class Fits:
    """The processes of a job; `play(name)` fits a replica.

    The processes of a replica of several ranks are called "a0", "a1", ...
    """

    def __init__(
        self, play: Callable[[str], Fit], folder: Path, names: str = "", ranks: int = 1
    ) -> None:
        self.play, self.folder, self.ranks = play, folder, ranks
        self.processes: dict[str, Any] = {}
        for name in names:
            self.start(name)

    def start(self, name: str) -> None:
        port = free_port()
        for rank in range(self.ranks):
            own = f"{name}{rank}" if self.ranks > 1 else name
            arguments = self.play, name, own, self.folder, (rank, self.ranks, port)
            self.processes[own] = FORK.Process(target=_play, args=arguments, daemon=True)
            self.processes[own].start()

    def wait(self, name: str, limit_s: float = 30.0) -> int:
        """Wait for the end of a replica, and return its exit code."""
        self.processes[name].join(limit_s)
        code = self.processes[name].exitcode
        assert code is not None, f"{name} has not ended: {self.output(name)}"
        return int(code)

    def output(self, name: str) -> str:
        path = self.folder / f"output_{name}"
        return path.read_text() if path.exists() else ""

    def results(self, limit_s: float = 40.0) -> dict[str, Fit]:
        """Wait for all processes; return what those report that were not killed."""
        deadline = time.monotonic() + limit_s
        hung = []
        for name, process in self.processes.items():
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                hung.append(name)
                process.kill()
        assert not hung, [self.output(name) for name in hung]
        found = {}
        for name in self.processes:
            path = self.folder / f"fit_{name}"
            if path.exists():
                found[name] = torch.load(path, weights_only=False)
                found[name].output = self.output(name)
        return found


def wait_until(true: Callable[[], object], limit_s: float = 30.0) -> None:
    end_s = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end_s, "nothing happened"
        time.sleep(0.02)


def listed_in(store: Path) -> list[list[int]]:
    """Return the slots that were averaged, by flight."""
    roster = [json.loads(path.read_bytes()) for path in store.glob("roster/*")]
    slots = {name: slot for name, slot, *_ in roster if slot >= 0}
    flights = sorted((store / "commit").glob("*"), key=lambda path: int(path.name))
    return [[slots[name] for name, *_ in json.loads(path.read_bytes())] for path in flights]


KILL, TERM, STOP = signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP
