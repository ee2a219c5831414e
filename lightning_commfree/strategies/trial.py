"""A trial fit within a fit, as Lightning's learning-rate finder runs one: plain inner steps.

Every rank trains on its own from where it is; nothing is counted, launched or landed, and each gets
back its own weights and optimizer state. Lightning, which saves before the trial and restores after
it, would give all of them rank 0's.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from lightning_commfree.lightning_internals import Patches
from lightning_commfree.strategies.pace import OutsideOfFit

if TYPE_CHECKING:
    from lightning_commfree.strategies.base import ReplicaStrategy


def let_finders_try(strategy: ReplicaStrategy) -> None:
    """Make the search of every `LearningRateFinder` of the Trainer, `Tuner`'s too, a trial fit.

    Args:
        strategy: whose fit begins.
    """
    for callback in strategy.module.trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, LearningRateFinder):
            find = partial(_try, strategy, callback.lr_find)
            strategy.patches.put(callback, "lr_find", find)


def _try(strategy: ReplicaStrategy, find: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    module, patches = strategy.module, Patches()
    weights = [tensor.detach().to("cpu", copy=True) for tensor in _tensors(module)]
    states = [deepcopy(optimizer.state_dict()) for optimizer in strategy.optimizers]

    @torch.no_grad()
    def put_weights_back(*_: Any, **__: Any) -> None:
        for tensor, before in zip(_tensors(module), weights, strict=True):
            tensor.copy_(before)

    def put_states_back(*_: Any) -> None:
        DDPStrategy.load_optimizer_state_dict(strategy, {"optimizer_states": states})

    patches.put(strategy, "save_checkpoint", partial(DDPStrategy.save_checkpoint, strategy))
    # when Lightning restores them: a learning rate that it has found comes after that
    patches.put(strategy, "load_model_state_dict", put_weights_back)
    patches.put(strategy, "load_optimizer_state_dict", put_states_back)
    fit, strategy.now = strategy.now, OutsideOfFit()
    try:
        with strategy.ledger.during(strategy.ledger.phase):
            find(*args, **kwargs)
    finally:
        strategy.now = fit
        patches.remove()


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]
