"""SIGTERM to a rank that the Trainer has forked: the launching process ends as the ranks do."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from lightning_commfree import (
    DominoTPStrategy,
    StreamingDiLoCoStrategy,
)
from lightning_commfree.host import SIGTERMException, callbacks, pl
from tests.fit import causal_lm
from tests.fit.models import Tiny, loader, quiet_trainer

STRATEGIES: dict[str, Any] = {
    "diloco": lambda: StreamingDiLoCoStrategy(sync_every=4, start_method="fork"),
    "domino": lambda: DominoTPStrategy(start_method="fork"),
}


class TermIn(pl.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step + 1 == self.step and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def launch(name: str, folder: Path) -> None:
    """Exit with a code that tells how `fit` ended."""
    module: Any = {"diloco": Tiny, "domino": causal_lm.CausalLM}[name]()
    data = causal_lm.loader(64, 2) if name == "domino" else loader(200)
    hooks = [TermIn(3), callbacks.OnExceptionCheckpoint(folder)]
    trainer = quiet_trainer(
        strategy=STRATEGIES[name](),
        devices=2,
        max_steps=30,
        enable_checkpointing=True,
        callbacks=hooks,
    )
    try:
        trainer.fit(module, data)
    except SIGTERMException:
        as_it_was = all(callback in trainer.callbacks for callback in hooks)
        os._exit(3 if as_it_was else 4)
    os._exit(5)


def end_of(launching: Any) -> int | None:
    """The exit code, None for one that has to be killed; with its ranks."""
    launching.join(timeout=60)
    code = launching.exitcode
    if code is None:
        for process in [*psutil.Process(launching.pid).children(recursive=True), launching]:
            process.kill()
    return code


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_launching_process_ends_with_the_same_exception(name: str, tmp_path: Path) -> None:
    launching = multiprocessing.get_context("fork").Process(target=launch, args=(name, tmp_path))
    launching.start()
    assert end_of(launching) == 3, "None: it still waits for a result"
    saved = torch.load(tmp_path / "on_exception.ckpt", weights_only=True)
    assert 3 <= saved["global_step"] < 10, "saved by the ranks, and not again by who launched them"


class Leaving(Tiny):
    def training_step(self, *args: Any) -> Any:
        raise SystemExit


def launch_leaving() -> None:
    try:
        strategy = StreamingDiLoCoStrategy(start_method="fork")
        quiet_trainer(strategy=strategy, devices=2).fit(Leaving(), loader(8))
    except SIGTERMException:
        os._exit(4)
    except SystemExit:
        os._exit(3)


def test_any_orderly_end_without_a_result_is_one() -> None:
    launching = multiprocessing.get_context("fork").Process(target=launch_leaving)
    launching.start()
    assert end_of(launching) == 3
