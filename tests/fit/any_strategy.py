"""A tiny fit of each of the three strategies, with checkpoints."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_commfree import (
    DistributedLion,
    DistributedLionStrategy,
    DominoTPStrategy,
    StreamingDiLoCoStrategy,
)
from lightning_commfree.host import pl
from tests.fit import causal_lm
from tests.fit.models import Noisy, Recorder, dataset, quiet_trainer

KINDS = ("diloco", "lion", "domino")
TIMEOUT = timedelta(seconds=20)


class Voter(Noisy):
    def configure_optimizers(self) -> Any:
        return DistributedLion(self.parameters(), lr=0.02)


def make_strategy(kind: str, size: int) -> Any:
    if kind == "diloco":
        return StreamingDiLoCoStrategy(sync_every=2, num_fragments=2, timeout=TIMEOUT)
    if kind == "lion":
        return DistributedLionStrategy(timeout=TIMEOUT)
    return DominoTPStrategy(size, "batch", timeout=TIMEOUT)  # "auto" may differ by run


def fit(
    kind: str,
    size: int,
    *callbacks: pl.Callback,
    max_steps: int = 4,
    liveness: bool = True,
    **kwargs: Any,
) -> Recorder:
    """Train for some steps; `on` gives Trainer arguments, the rest goes to `fit`."""
    recorder, strategy = Recorder(), make_strategy(kind, size)
    strategy.liveness = liveness
    trainer = quiet_trainer(
        strategy=strategy,
        devices=size,
        callbacks=[recorder, *callbacks],
        max_steps=max_steps,
        **kwargs.pop("on", {}),
    )
    data = causal_lm.words(40) if kind == "domino" else dataset(40)
    module = {"diloco": Noisy, "lion": Voter, "domino": causal_lm.CausalLM}[kind]()
    trainer.fit(module, DataLoader(data, batch_size=2, shuffle=True), **kwargs)
    return recorder


class Saving(pl.Callback):
    """Saves to one path after every step, or with `{step}` in its name to one path a step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(str(self.path).format(step=trainer.global_step))


def same(one: Any, other: Any) -> bool:
    """Whether two nested states hold the same bits."""
    if isinstance(one, torch.Tensor):
        alike = isinstance(other, torch.Tensor) and one.dtype == other.dtype
        return alike and torch.equal(one, other)
    if isinstance(one, dict):
        alike = isinstance(other, dict) and one.keys() == other.keys()
        return alike and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        alike = type(one) is type(other) and len(one) == len(other)
        return alike and all(map(same, one, other))
    return bool(one == other)
