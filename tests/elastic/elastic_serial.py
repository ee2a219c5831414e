"""The serial twin of an elastic job: all replicas in one process, given the membership log.

Like `serial`, it is written without the package, except for the codecs. The outer step of a flight
is taken when it is launched, because nothing reads its result before the landing except a replica
that joins in between, and that one has replayed it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


@dataclass
class Replica:
    module: nn.Module
    optimizer: torch.optim.Optimizer
    since: list[int]  # by fragment, the inner steps until the last landing
    taken: int = 0  # inner steps
    residuals: dict[int, Tensor] = field(default_factory=dict)  # by fragment
    outer: dict[int, list[Tensor]] = field(default_factory=dict)  # by fragment, as it last landed
    in_flight: dict[int, tuple[int, list[Tensor]]] = field(default_factory=dict)  # by fragment


@dataclass
class Log:
    """What decides a run: the slots in every flight, the flights at which slots joined, or joined
    again after the others had gone on without them, and the steps of the schedule that a slot has
    trained; None: all."""

    views: Mapping[int, Sequence[int]]
    joins: Mapping[int, Sequence[int]] = field(default_factory=dict)  # slot: flights
    taken: Mapping[int, set[int]] | None = None  # slot: steps
    rejoins: Mapping[int, Sequence[int]] = field(default_factory=dict)  # slot: flights


@dataclass
class ElasticTwin:
    make_module: Callable[[], nn.Module]
    make_inner: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    make_outer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    train: Callable[[nn.Module, int, int], None]  # backward of (module, slot, step)
    fragments: Sequence[Sequence[str]]
    sync_every: int
    overlap_steps: int
    mix: float
    through: Callable[[Tensor], Tensor]  # the wire, for a flat fragment
    rounds_twice: Callable[[int, int], bool]  # whether (members, values) go in two phases
    weight_of: Callable[[int], int] = lambda slot: 1  # of an inner step
    feedback: float = 0.0  # weight of a rounding error in the next message
    through_last: Callable[[Tensor], Tensor] | None = None  # in the last round, if not `through`

    def __post_init__(self) -> None:
        start = self.make_module()
        # tensor by tensor, as elsewhere: vectorized kernels round the ends of tensors differently
        self.outer = [
            [nn.Parameter(start.get_parameter(name).detach().clone()) for name in names]
            for names in self.fragments
        ]
        self.optimizers = [self.make_outer(outer) for outer in self.outer]
        self.replicas: dict[int, Replica] = {}
        self.away: dict[int, Replica] = {}  # will join again
        self.flight = 0

    def play(self, log: Log, steps: int) -> dict[int, nn.Module]:
        """Return the modules of the replicas that finish, by slot."""
        for slot in log.views[0]:
            self.add(slot)
        for step in range(1, steps + 1):
            for slot, replica in [*self.replicas.items(), *self.away.items()]:
                if log.taken is None or step in log.taken[slot]:
                    self.inner_step(replica, slot, step)
            for p in range(len(self.fragments)):
                offset = p * self.sync_every // len(self.fragments)
                cycles, rest = divmod(step - offset, self.sync_every)
                if cycles >= 1 and not rest:
                    self.launch(log, p, step)
            self.land_due(step)
        self.land_due(steps + self.overlap_steps)
        for p, names in enumerate(self.fragments):
            self.feedback, self.through = 0.0, self.through_last or self.through
            mean = self.mean(log, p)
            for replica in self.replicas.values():
                put(replica.module, names, self.split(p, joined(self.outer[p]) - mean))
        return {slot: replica.module for slot, replica in self.replicas.items()}

    def land_due(self, latest: int) -> None:
        for replica in self.replicas.values():
            for p in [p for p, (due, _) in replica.in_flight.items() if due <= latest]:
                self.land(replica, p)

    def add(self, slot: int) -> None:
        module = self.make_module()
        for outer, names in zip(self.outer, self.fragments, strict=True):
            put(module, names, outer)
        inner = self.make_inner(list(module.parameters()))
        outer = {p: [one.detach().clone() for one in outer] for p, outer in enumerate(self.outer)}
        self.replicas[slot] = Replica(module, inner, [0] * len(self.fragments), outer=outer)

    @torch.no_grad()
    def take_back(self, slot: int) -> None:
        replica = self.replicas[slot] = self.away.pop(slot)
        for p, names in enumerate(self.fragments):
            local = [replica.module.get_parameter(name) for name in names]
            unsent = joined(replica.outer[p]) - joined(local)
            put(replica.module, names, self.split(p, joined(self.outer[p]) - unsent))
        replica.residuals.clear()

    def inner_step(self, replica: Replica, slot: int, step: int) -> None:
        self.train(replica.module, slot, step)
        replica.optimizer.step()
        replica.taken += 1

    def launch(self, log: Log, p: int, step: int) -> None:
        flight = self.flight
        for outer, gradient in zip(self.outer[p], self.split(p, self.mean(log, p)), strict=True):
            outer.grad = gradient
        self.optimizers[p].step()
        landed = [outer.detach().clone() for outer in self.outer[p]]
        for slot in log.views[flight]:
            self.replicas[slot].in_flight[p] = step + self.overlap_steps, landed

    def enter_view(self, log: Log) -> Sequence[int]:
        """Take in those that join, and leave out those that do not take part in the next flight."""
        members = log.views[self.flight]
        for slot in members:
            if self.flight in log.joins.get(slot, ()):
                self.add(slot)
            if self.flight in log.rejoins.get(slot, ()):
                self.take_back(slot)
        for slot, replica in self.replicas.items():
            if slot not in members and any(j > self.flight for j in log.rejoins.get(slot, ())):
                self.away[slot] = replica
        self.replicas = {slot: self.replicas[slot] for slot in sorted(members)}
        return members

    def mean(self, log: Log, p: int) -> Tensor:
        """Return the mean over the members of the next flight."""
        members = self.enter_view(log)
        rows, weights = [], []
        for slot, replica in self.replicas.items():
            rows.append(self.delta(p, replica))
            weights.append((replica.taken - replica.since[p]) * self.weight_of(slot))
        counted = [m for m, weight in enumerate(weights) if weight] or [*range(len(rows))]
        rows, weights = [rows[m] for m in counted], [weights[m] for m in counted]
        if len(set(weights)) == 1:
            total = rows[0].clone()
            for row in rows[1:]:
                total = total + row
            mean = total / len(rows)
        else:
            mean = torch.zeros_like(rows[0])
            for row, weight in zip(rows, weights, strict=True):
                mean = mean + row * (weight / sum(weights))
        if self.rounds_twice(len(members), mean.numel()):
            mean = self.through(mean)
        self.flight += 1
        return mean

    def delta(self, p: int, replica: Replica) -> Tensor:
        parameters = [replica.module.get_parameter(name) for name in self.fragments[p]]
        delta = joined(self.outer[p]) - joined(parameters)
        if not self.feedback:
            return self.through(delta)
        delta += replica.residuals.get(p, torch.zeros_like(delta)) * self.feedback
        sent = self.through(delta)
        replica.residuals[p] = delta - sent
        return sent

    def split(self, p: int, values: Tensor) -> list[Tensor]:
        pieces = values.split([outer.numel() for outer in self.outer[p]])
        return [piece.view_as(o) for piece, o in zip(pieces, self.outer[p], strict=True)]

    @torch.no_grad()
    def land(self, replica: Replica, p: int) -> None:
        _, outers = replica.in_flight.pop(p)
        for name, outer in zip(self.fragments[p], outers, strict=True):
            local = replica.module.get_parameter(name)
            local.copy_(torch.lerp(local, outer, 1.0 - self.mix))
        replica.since[p], replica.outer[p] = replica.taken, outers


def joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


@torch.no_grad()
def put(module: nn.Module, names: Sequence[str], values: Sequence[Tensor]) -> None:
    for name, value in zip(names, values, strict=True):
        module.get_parameter(name).copy_(value)
