"""Trainers of an elastic job in forked processes, one per replica."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
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
from tests.elastic.elastic_job import LocalTransfer, RendezvousServer, ScriptedRendezvous
from tests.fit.models import Tiny, quiet_trainer
from tests.world import free_port

FORK = multiprocessing.get_context("fork")
ROWS = 240


class Scripted(ElasticDiLoCoStrategy):
    """The strategy with a scripted rendezvous in place of a lighthouse."""

    def __init__(self, address: str, folder: Path, name: str, **kwargs: Any) -> None:
        super().__init__("http://127.0.0.1:1", **kwargs)
        self.scripted = ScriptedRendezvous(address), LocalTransfer(folder, name)

    def services(self, host: str, timeout_s: float) -> Any:
        return self.scripted


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


def shards_of(module: torch.nn.Module) -> State:
    return {name: local_tensor(p).clone() for name, p in module.named_parameters()}


def data() -> DataLoader[Any]:
    x = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(7))
    rows = TensorDataset(x, x.sin().sum(1, keepdim=True), torch.arange(ROWS))
    return DataLoader(rows, batch_size=2, shuffle=True)


class Pace(pl.Callback):
    """Takes time for each step, and kills the process after one."""

    def __init__(self, step_s: float, dies_after: int | None, number: int = 9) -> None:
        self.step_s, self.dies_after, self.number = step_s, dies_after, number
        self.validations = 0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        time.sleep(self.step_s)
        if trainer.global_step == self.dies_after:
            os.kill(os.getpid(), self.number)

    def on_validation_start(self, *_: Any) -> None:
        self.validations += 1


@dataclass
class Fit:
    """What a replica reports."""

    error: str = ""
    slot: int = -1
    joined: int | None = None
    rejoined: list[int] = field(default_factory=list)
    state: State = field(default_factory=dict)
    seen: list[tuple[int, list[int]]] = field(default_factory=list)
    validations: int = 0
    steps: int = 0
    inner_steps: int = 0
    files: list[str] = field(default_factory=list)
    lr: float = 0.0
    views: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    waited_s: float = 0.0


def fit(
    strategy: ElasticDiLoCoStrategy,
    pace: Pace,
    make_module: Callable[[], Indexed] = Indexed,
    ckpt_path: str | None = None,
    loaders: Callable[[], Sequence[Any]] = lambda: [data()],
    **trainer_kwargs: Any,
) -> Fit:
    module = make_module()
    callbacks = [pace, *trainer_kwargs.pop("callbacks", ())]
    devices = strategy.settings.replica_size
    trainer = quiet_trainer(
        strategy=strategy, devices=devices, callbacks=callbacks, **trainer_kwargs
    )
    found = Fit()

    class Look(pl.Callback):
        def on_train_end(self, *_: Any) -> None:
            if strategy._diloco is not None:
                found.joined = strategy._elastic.joined
                found.rejoined = strategy._elastic.rejoined
                found.inner_steps = strategy._elastic.inner_steps
                found.views = strategy._elastic.views

    trainer.callbacks.append(Look())  # type: ignore[attr-defined]
    try:
        trainer.fit(module, *loaders(), ckpt_path=ckpt_path)
    except Exception:  # noqa: BLE001 - the parent looks at it
        found.error = traceback.format_exc()
    found.slot, found.state, found.seen = strategy.slot, shards_of(module), module.seen
    found.waited_s = strategy.ledger.seconds_waited
    found.validations, found.steps = pace.validations, trainer.global_step
    with suppress(Exception):
        found.lr = trainer.optimizers[0].param_groups[0]["lr"]
    return found


def _play(play: Callable[[str], Fit], name: str, folder: Path, rank: dict[str, str]) -> None:
    torch.set_num_threads(1)
    os.environ.update(rank)
    found = play(name)
    torch.save(found, folder / f"writing_{name}")
    (folder / f"writing_{name}").rename(folder / f"fit_{name}")
    os._exit(0)


def torchrun(rank: int, size: int, port: int) -> dict[str, str]:
    """Return the environment of a rank that torchrun has started; nothing for a single one."""
    if size == 1:
        return {}
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "TORCHELASTIC_RUN_ID": "test",
    }


class Fits:
    """The processes of a job; `play(name)` fits a replica."""

    def __init__(self, play: Callable[[str], Fit], folder: Path) -> None:
        self.play, self.folder = play, folder
        self.processes: dict[str, Any] = {}

    def start(self, name: str, ranks: int = 1) -> None:
        """Start a replica; its ranks are called "a0", "a1" if there are several."""
        port = free_port()
        for rank in range(ranks):
            one = name if ranks == 1 else f"{name}{rank}"
            arguments = self.play, one, self.folder, torchrun(rank, ranks, port)
            self.processes[one] = FORK.Process(target=_play, args=arguments, daemon=True)
            self.processes[one].start()

    def wait_dead(self, name: str, number: int = signal.SIGKILL) -> None:
        self.processes[name].join(30)
        assert self.processes[name].exitcode in (-number, 0)

    def results(self, limit_s: float = 50.0) -> dict[str, Fit]:
        deadline = time.monotonic() + limit_s
        for process in self.processes.values():
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
        found = {}
        for name in self.processes:
            path = self.folder / f"fit_{name}"
            if path.exists():
                found[name] = torch.load(path, weights_only=False)
        return found


__all__ = ["Fit", "Fits", "Indexed", "Pace", "RendezvousServer", "Scripted", "data", "fit"]
