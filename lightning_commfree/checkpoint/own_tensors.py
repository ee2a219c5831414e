"""Tensors of the module that are neither trained nor averaged, and may differ from rank to rank.

Hooks move them: the weights of a mean teacher, counters, a queue, a cache. A checkpoint holds those
of rank 0, and of non-persistent buffers none. A rank's part has all persistent ones, of which those
that are equal to rank 0's are references that take no room, and such non-persistent ones as are not
what they were when the fit began. What is trained is not among them, nor floating-point buffers of
a checkpoint: the strategy restores them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_commfree.comm.digest import digest
from lightning_commfree.comm.parts import own


class OwnTensors:
    """Those of one fit.

    Args:
        module: as every fit finds it, on all ranks alike; nothing has been restored into it that
            only this rank knows.
        optimizers: of this rank; what they train is left out.
    """

    def __init__(self, module: nn.Module, optimizers: Iterable[Optimizer]) -> None:
        self._module = module
        self._optimizers = optimizers
        self._at_begin = _digests(self._split()[1])

    def state(self) -> dict[str, Tensor]:
        """Return what rank 0 may have otherwise: the module's own tensors, not copies."""
        persistent, others = self._split()
        now = _digests(others)
        changed = {
            name: tensor for name, tensor in others.items() if now[name] != self._at_begin.get(name)
        }
        return {name: tensor.detach() for name, tensor in {**persistent, **changed}.items()}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Put back what `state` returned; a buffer that has another size now is replaced."""
        tensors = {name: tensor for kind in self._split() for name, tensor in kind.items()}
        for name, saved in state.items():
            tensor = tensors.get(name)
            if tensor is not None and tensor.shape == saved.shape:
                tensor.copy_(saved)
            elif not isinstance(tensor, nn.Parameter):
                self._replace(name, saved if tensor is None else saved.to(tensor))

    def _replace(self, name: str, buffer: Tensor) -> None:
        owner, _, own_name = name.rpartition(".")
        module = self._module.get_submodule(owner)
        if own_name in module._buffers:
            module._buffers[own_name] = buffer

    def _split(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return what a checkpoint holds of rank 0, and what it does not hold."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        trained = {p for group in groups for p in group["params"] if p.requires_grad}
        kept = self._module.state_dict(keep_vars=True)
        persistent: dict[str, Tensor] = {}
        others: dict[str, Tensor] = {}
        for name, parameter in self._module.named_parameters():
            if parameter not in trained:
                persistent[name] = parameter
        for name, buffer in self._module.named_buffers():
            if name not in kept:
                others[name] = buffer
            elif not buffer.is_floating_point():
                persistent[name] = buffer
        return _with_values(persistent), _with_values(others)


def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the gradients that are there, by parameter; not copies."""
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def accumulate_further(module: nn.Module, gradients: Mapping[str, Tensor]) -> None:
    """Put back what `gradients_of` returned, ahead of a resumed fit's first batch."""
    for name, gradient in gradients.items():
        parameter = module.get_parameter(name)
        parameter.grad = gradient.to(parameter.device, parameter.dtype)


def _with_values(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: own(tensor)
        for name, tensor in tensors.items()
        if not (is_lazy(tensor) or tensor.is_meta) and tensor.layout == torch.strided
    }


def _digests(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    found = {name: digest(tensor.detach().contiguous()) for name, tensor in tensors.items()}
    return {name: int(value) for name, value in found.items()}
