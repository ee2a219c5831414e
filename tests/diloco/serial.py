"""The serial twin: Streaming DiLoCo in one process, replicas played by a for-loop.

Written from Algorithm 2 of arXiv:2501.18512, on purpose without the package:
dictionaries of tensors by name, no flat buffers, no schedule object, no channel. Messages are kept
in a list until they land.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

Step = Callable[[int, int], None]  # (replica, step): one inner step of that replica


class SerialDiLoCo:
    def __init__(
        self,
        modules: Sequence[nn.Module],
        inner_step: Step,
        fragments: Sequence[Sequence[str]],
        sync_every: int,
        overlap_steps: int,
        mix: float,
        make_outer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        through_the_wire: Callable[[Tensor], Tensor] = lambda delta: delta,
    ) -> None:
        self.modules, self.inner_step, self.fragments = modules, inner_step, fragments
        self.sync_every, self.overlap_steps, self.mix = sync_every, overlap_steps, mix
        self.through_the_wire = through_the_wire
        start = dict(modules[0].named_parameters())
        self.outer = {
            name: nn.Parameter(start[name].detach().float().clone())
            for fragment in fragments
            for name in fragment
        }
        self.optimizers = [
            make_outer([self.outer[name] for name in fragment]) for fragment in fragments
        ]
        self.on_the_way: list[
            tuple[int, int, list[dict[str, Tensor]]]
        ] = []  # lands at, fragment, a delta per replica
        self.step = 0

    def run_step(self) -> None:
        self.step += 1
        for m in range(len(self.modules)):
            self.inner_step(m, self.step)
        for p in range(len(self.fragments)):
            offset = p * self.sync_every // len(self.fragments)
            if (
                self.step >= self.sync_every + offset
                and (self.step - offset) % self.sync_every == 0
            ):
                self.on_the_way.append((self.step + self.overlap_steps, p, self.deltas(p)))
        for due in [entry for entry in self.on_the_way if entry[0] == self.step]:
            self.on_the_way.remove(due)
            self.land(due[1], due[2], self.mix)

    def finish(self) -> None:
        for _, p, deltas in self.on_the_way:
            self.land(p, deltas, self.mix)
        self.on_the_way = []
        for p in range(len(self.fragments)):
            self.take_the_mean(p, self.deltas(p))

    @torch.no_grad()
    def take_the_mean(self, p: int, deltas: list[dict[str, Tensor]]) -> None:
        for name in self.fragments[p]:
            locals_ = [module.get_parameter(name) for module in self.modules]
            if len(locals_) > 1:
                total = deltas[0][name].clone()
                for delta in deltas[1:]:
                    total = total + delta[name]
                mean = self.outer[name] - total / len(deltas)
                for local in locals_:
                    local.copy_(mean)
            self.outer[name].copy_(locals_[0])

    @torch.no_grad()
    def deltas(self, p: int) -> list[dict[str, Tensor]]:
        return [
            {
                name: self.through_the_wire(self.outer[name] - module.get_parameter(name).float())
                for name in self.fragments[p]
            }
            for module in self.modules
        ]

    @torch.no_grad()
    def land(self, p: int, deltas: list[dict[str, Tensor]], mix: float) -> None:
        for name in self.fragments[p]:
            total = deltas[0][name].clone()
            for delta in deltas[1:]:
                total = total + delta[name]
            self.outer[name].grad = total / len(deltas)
        self.optimizers[p].step()
        for name in self.fragments[p]:
            for module in self.modules:
                local = module.get_parameter(name)
                if mix == 0.0:
                    local.copy_(self.outer[name])
                elif mix < 1.0:
                    local.copy_(torch.lerp(local.float(), self.outer[name], 1.0 - mix))
