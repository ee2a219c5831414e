"""Which parameters a fit trains: those that an optimizer holds and that are not frozen now.

A parameter that requires gradients but is in no optimizer (the copy in an `AveragedModel`, the
target network in BYOL or DQN) is not trained: the module's own code updates it.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.optim import Optimizer


def trained_parameters(
    module: nn.Module, optimizers: Iterable[Optimizer] = ()
) -> dict[str, nn.Parameter]:
    """Return the parameters of `module` that are trained now, by name.

    If the optimizers hold none of the module's parameters (because there is none, or because they
    hold copies), every parameter that requires gradients counts as trained.
    """
    named = dict(module.named_parameters())
    held = {p for one in optimizers for group in one.param_groups for p in group["params"]}
    in_optimizer = {name: p for name, p in named.items() if p in held} or named
    return {name: p for name, p in in_optimizer.items() if p.requires_grad}
