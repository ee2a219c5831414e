"""All ranks of a job: how this one joins them, and what they tell each other, in a fit or not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from lightning.pytorch.strategies import DDPStrategy

from lightning_commfree.comm.job import Member, Network, ReplicaChannels, default_backend
from lightning_commfree.comm.stream_ends import StreamEnds
from lightning_commfree.strategies.stopping import stopped_by_hand

if TYPE_CHECKING:
    from lightning_commfree.strategies.base import ReplicaStrategy

T = TypeVar("T")


class Ranks(Network):
    """All ranks of a strategy's job, and this process's way to them.

    Args:
        strategy: of this rank.
        timeout: of an exchange.
    """

    def __init__(self, strategy: ReplicaStrategy, timeout: timedelta) -> None:
        super().__init__()
        self._strategy, self._timeout = strategy, timeout

    def join(self, lightnings: Callable[[], None]) -> None:
        """Join the job, in which Lightning opens its process group, and open the channels."""
        with self.joining(self._member()):
            lightnings()
        self._reach()

    def _reach(self) -> None:
        """Open the channels, until `leave`; collective."""
        strategy = self._strategy
        mesh, ledgers = strategy.inside.mesh(self.size), (strategy.ledger, strategy.group_ledger)
        self.open(mesh, self._member(), ledgers, strategy.liveness)

    @contextmanager
    def reaching(self) -> Iterator[ReplicaChannels]:
        """In the body the channels are open, in a fit or not; collective."""
        opens = not self.is_open
        self._reach()
        try:
            yield self.channels
        finally:
            if opens:
                self.leave()

    @property
    def rank(self) -> int:
        """This one's."""
        return self._strategy.global_rank

    @property
    def size(self) -> int:
        """How many they are."""
        return self._strategy.world_size

    def come(self) -> bool:
        """Return whether the others come to the collective that this rank has come to."""
        return not stopped_by_hand(self._strategy.lightning_module)

    def collective(self, what: str, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Return what a collective of Lightning's returns; its first argument if no others come.

        Raises:
            RuntimeError: a rank is gone; it is named.
        """
        if not self.come():
            return args[0] if args else None  # type: ignore[return-value]
        with self.naming_lost(what):
            return call(*args, **kwargs)

    def broadcast(self, value: T, src: int = 0) -> T:
        """Return the value of rank `src`; collective."""
        sent: T = self._strategy.broadcast(value, src)
        return sent

    def all_values(self, mine: int) -> list[int]:
        """Return a number of each rank, by rank; collective.

        It takes Lightning's process group, so it may run while a background thread exchanges
        something on a channel.
        """
        values = torch.zeros(self.size, dtype=torch.int64, device=self._strategy.root_device)
        values[self.rank] = mine
        with self.naming_lost("reduce"):
            total = DDPStrategy.reduce(self._strategy, values, reduce_op="sum")
        return [int(value) for value in total.tolist()]

    def all_flags(self, mine: bool) -> list[bool]:
        """Return the flags of all ranks, by rank; collective."""
        return [bool(value) for value in self.all_values(int(mine))]

    def stream_ends(self) -> StreamEnds:
        """Return this rank's view of where the streams of all ranks end; collective."""
        fit = f"{self.all_values(time.time_ns())[0]:x}"  # no other fit of the job has that name
        return StreamEnds(self.rank, self.size, fit, self._timeout)

    def _member(self) -> Member:
        """Return what this process is among the others; it gets its rank."""
        strategy, several = self._strategy, self._strategy.num_nodes > 1
        strategy.set_world_ranks()
        environment = strategy.cluster_environment
        device = strategy.root_device
        return Member(
            strategy.global_rank,
            strategy.world_size,
            self._timeout,
            strategy.process_group_backend or default_backend(device),
            device,
            environment.main_address if environment is not None and several else None,
        )
