"""A trial fit within a fit, as Lightning's learning-rate finder runs one: plain inner steps.

Every rank trains on its own from where it is; nothing is counted, launched or landed, and each gets
back its own weights and optimizer state. Lightning, which saves before the trial and restores after
it, would give all of them rank 0's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.strategies import DDPStrategy

from lightning_commfree.patches import Patches
from lightning_commfree.strategies._phases import CountingStrategy

# of a strategy; in a trial they do what they do without gradient sync
_PLAIN = (
    "lightning_module_state_dict",
    "load_checkpoint",
    "on_train_end",
    "on_train_start",
    "on_validation_end",
    "on_validation_start",
    "optimizer_step",
    "remove_checkpoint",
    "save_checkpoint",
)


def let_finders_try(strategy: CountingStrategy, trainer: pl.Trainer, patches: Patches) -> None:
    """Make the search of every `LearningRateFinder` of the Trainer, `Tuner`'s too, a trial fit.

    Args:
        strategy: whose ranks hold different weights. Its `_settled` puts others into the module.
        trainer: has the callbacks; its fit begins.
        patches: removed when the fit ends.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, LearningRateFinder):
            find = partial(_find, strategy, callback.lr_find)
            patches.put(callback, "lr_find", find)


def _find(strategy: CountingStrategy, find: Any, *args: Any, **kwargs: Any) -> None:
    with _trial(strategy):
        find(*args, **kwargs)


@contextmanager
def _trial(strategy: CountingStrategy) -> Iterator[None]:
    module, phase, patches = strategy.lightning_module, strategy.ledger.phase, Patches()
    assert module is not None, "a fit runs"
    weights = {name: tensor.to("cpu", copy=True) for name, tensor in _tensors(module).items()}
    states = [deepcopy(optimizer.state_dict()) for optimizer in strategy.optimizers]

    def put_weights_back(*_: Any, **__: Any) -> None:
        with torch.no_grad():
            for name, tensor in _tensors(module).items():
                tensor.copy_(weights[name])

    def put_states_back(*_: Any) -> None:
        DDPStrategy.load_optimizer_state_dict(strategy, {"optimizer_states": states})

    for name in _PLAIN:
        patches.put(strategy, name, partial(getattr(DDPStrategy, name), strategy))
    # when Lightning restores them: a learning rate that it has found comes after that
    patches.put(strategy, "load_model_state_dict", put_weights_back)
    patches.put(strategy, "load_optimizer_state_dict", put_states_back)
    patches.put(strategy, "_settled", nullcontext)
    try:
        yield
    finally:
        patches.remove()
        strategy.ledger.phase = phase


def _tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor.detach() for name, tensor in named}
