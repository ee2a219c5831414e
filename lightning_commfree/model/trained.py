"""Which parameters a fit trains: those that an optimizer holds and that are not frozen now.

A parameter that requires gradients but is in no optimizer (the copy in an `AveragedModel`, the
target network in BYOL or DQN) is not trained: the module's own code updates it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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


class Freezing:
    """Records which parameters hooks freeze or unfreeze during a fit, for a resume.

    Create it when the fit begins.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._at_begin = self._flags()

    def changed(self) -> dict[str, bool]:
        """Return `requires_grad` of the parameters for which it has changed since the fit began."""
        return {n: now for n, now in self._flags().items() if now != self._at_begin.get(n, now)}

    def restore(self, changed: Mapping[str, bool]) -> None:
        """Repeat the changes that `changed` returned in an earlier fit."""
        for name, parameter in self._module.named_parameters():
            parameter.requires_grad_(changed.get(name, parameter.requires_grad))

    def _flags(self) -> dict[str, bool]:
        return {name: p.requires_grad for name, p in self._module.named_parameters()}
