"""Outer steps under trial: the library does not have them, because they must first win here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import SGD
from typing_extensions import override

from lightning_commfree.diloco import StreamingDiLoCo
from lightning_commfree.diloco.exchange import Arrival


class RestartedSGD(SGD):
    """SGD that forgets its momentum every `restart_every` steps (arXiv:2605.28585).

    Args:
        params: as for any optimizer.
        restart_every: steps between two restarts.
        **settings: of `torch.optim.SGD`.
    """

    def __init__(self, params: Any, restart_every: int, **settings: Any) -> None:
        super().__init__(params, **settings)
        self._restart_every = restart_every
        self.param_groups[0].setdefault("taken", 0)  # saved in checkpoints

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        if group["taken"] % self._restart_every == 0:
            for state in self.state.values():
                state["momentum_buffer"] = None
        super().step(closure)
        group["taken"] += 1


class RadialDiLoCo(StreamingDiLoCo):
    """Streaming DiLoCo that averages directions and norms apart (radial averaging).

    The mean of M outer gradients is shorter than they are, the more so the less they agree. Here it
    gets the mean of their norms, fragment by fragment (after arXiv:2604.21428).
    """

    _ending = False

    @override
    def _receive(self, p: int) -> Arrival:
        arrival = super()._receive(p)
        if self._ending:  # the mean of the local weights, which must not be scaled
            return arrival
        *norms, of_mean = arrival.norms.sqrt().tolist()
        scale = sum(norms) / len(norms) / of_mean if of_mean else 1.0
        return arrival._replace(mean=torch.mul(arrival.mean, scale))

    @override
    def _finish_fragment(self, p: int) -> None:
        self._ending = True
        try:
            super()._finish_fragment(p)
        finally:
            self._ending = False
