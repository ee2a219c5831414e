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
        inner_optimizers: Sequence[torch.optim.Optimizer] = (),  # given: a sick replica abstains
    ) -> None:
        self.inner_optimizers = inner_optimizers
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
            tuple[int, int, list[dict[str, Tensor]], bool]
        ] = []  # lands at, fragment, a delta per replica, whether the outer optimizer starts anew
        self.step = self.begins = 0
        self.just_left: set[int] = set()  # when the pace changed
        self.new_pace: set[int] = set()  # fragments that have not left since the pace changed
        self.make_outer = make_outer
        self.offsets = [p * sync_every // len(fragments) for p in range(len(fragments))]

    def leaves(self, p: int, step: int) -> bool:
        since = step - self.begins - self.offsets[p]
        # after a change of pace, only those that have just left wait for a whole cycle again
        soonest = 0 if self.begins and p not in self.just_left else self.sync_every
        return since >= soonest and since % self.sync_every == 0

    def change_pace(self, sync_every: int, overlap_steps: int) -> None:
        """After a step at which fragment 0 has left."""
        assert self.leaves(0, self.step)
        self.just_left = {p for p in range(len(self.fragments)) if self.leaves(p, self.step)}
        count = len(self.fragments)
        # those in flight land first; those that share a step leave after fragment 0, not with it
        later = max(self.overlap_steps - overlap_steps, 1 if count > sync_every else 0)
        self.begins, self.sync_every = self.step + later, sync_every
        self.overlap_steps = overlap_steps
        self.offsets = [p * sync_every // count for p in range(count)]
        self.new_pace = {*range(count)}

    def thaw(self, names: Sequence[str]) -> None:
        """Between two steps. What is thawed becomes a fragment, which counts its cycles from the
        step at which the next of the others leaves."""
        for name in names:
            start = self.modules[0].get_parameter(name).detach().float().clone()
            self.outer[name] = nn.Parameter(start)
        step = self.step + 1
        while not any(self.leaves(p, step) for p in range(len(self.fragments))):
            step += 1
        self.fragments = [*self.fragments, names]
        self.offsets.append(step)
        self.optimizers.append(self.make_outer([self.outer[name] for name in names]))

    def run_step(self) -> None:
        self.step += 1
        for m in range(len(self.modules)):
            self.inner_step(m, self.step)
        for p in range(len(self.fragments)):
            if self.leaves(p, self.step):
                lands = self.step + self.overlap_steps
                self.on_the_way.append((lands, p, self.deltas(p), p in self.new_pace))
                self.new_pace.discard(p)
        for due in [entry for entry in self.on_the_way if entry[0] == self.step]:
            self.on_the_way.remove(due)
            self.land(due[1], due[2], self.mix, due[3])

    def finish(self) -> None:
        for _, p, deltas, anew in self.on_the_way:
            self.land(p, deltas, self.mix, anew)
        self.on_the_way = []
        for p in range(len(self.fragments)):
            self.take_the_mean(p, self.deltas(p))

    @torch.no_grad()
    def take_the_mean(self, p: int, deltas: list[dict[str, Tensor]]) -> None:
        for name in self.fragments[p]:
            locals_ = [module.get_parameter(name) for module in self.modules]
            if len(locals_) > 1:
                counted = [delta[name] for delta in self.healthy(deltas)]
                mean = self.outer[name] - self.mean(counted)
                for local in locals_:
                    local.copy_(mean)
            self.outer[name].copy_(locals_[0])
        for m, delta in enumerate(deltas):
            if self.abstains(delta):
                self.forget(m, self.fragments[p])

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
    def land(self, p: int, deltas: list[dict[str, Tensor]], mix: float, anew: bool = False) -> None:
        if anew:
            self.optimizers[p].state.clear()
        for name in self.fragments[p]:
            self.outer[name].grad = self.mean([delta[name] for delta in self.healthy(deltas)])
        self.optimizers[p].step()
        for m, module in enumerate(self.modules):
            weight = 0.0 if self.abstains(deltas[m]) else mix
            for name in self.fragments[p]:
                local = module.get_parameter(name)
                if weight == 0.0:
                    local.copy_(self.outer[name])
                elif weight < 1.0:
                    local.copy_(torch.lerp(local.float(), self.outer[name], 1.0 - weight))
            if self.abstains(deltas[m]):
                self.recover(m, p)

    def mean(self, tensors: Sequence[Tensor]) -> Tensor:
        total = tensors[0].clone()
        for tensor in tensors[1:]:
            total = total + tensor
        return total / len(tensors)

    def abstains(self, delta: dict[str, Tensor]) -> bool:
        finite = all(bool(tensor.isfinite().all()) for tensor in delta.values())
        return bool(self.inner_optimizers) and not finite

    def healthy(self, deltas: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        return [delta for delta in deltas if not self.abstains(delta)]

    def recover(self, m: int, p: int) -> None:
        """The replica also takes the other fragments in which it holds NaN; its inner optimizer
        forgets what it knows of parameters in all of them, where that is not finite."""
        for q, names in enumerate(self.fragments):
            local = {name: self.modules[m].get_parameter(name) for name in names}
            if q != p and not self.abstains(local):
                continue
            for name, parameter in local.items():
                parameter.copy_(self.outer[name])
            self.forget(m, names)

    def forget(self, m: int, names: Sequence[str]) -> None:
        for parameter in map(self.modules[m].get_parameter, names):
            state = self.inner_optimizers[m].state.get(parameter, {})
            if not all(bool(torch.as_tensor(t).isfinite().all()) for t in state.values()):
                del self.inner_optimizers[m].state[parameter]
