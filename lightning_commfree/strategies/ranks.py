"""All ranks of a job: how this process joins them, and small exchanges between all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
from lightning.pytorch.strategies import DDPStrategy

from lightning_commfree.comm.job import Member, Mesh, Network, ReplicaChannels, default_backend
from lightning_commfree.comm.ledger import Ledger
from lightning_commfree.strategies.signals import stopped_by_hand

T = TypeVar("T")


class Layout(NamedTuple):
    """How a strategy's channels are opened."""

    mesh: Mesh
    ledgers: tuple[Ledger, Ledger]  # of what is sent to other replicas, and within one
    liveness: bool  # ranks find out which one is lost


class Ranks(Network):
    """The ranks of a strategy's job, in a fit or outside of one.

    Args:
        strategy: of this rank.
        timeout: of an exchange.
        layout: returns how the channels are opened.
    """

    def __init__(
        self, strategy: DDPStrategy, timeout: timedelta, layout: Callable[[], Layout]
    ) -> None:
        super().__init__()
        self._strategy, self._timeout, self._layout = strategy, timeout, layout

    def join(self, lightnings: Callable[[], None]) -> None:
        """Let Lightning (`lightnings`) open its process group, and open the channels."""
        with self.joining(self._member()):
            lightnings()
        self._reach()

    def _reach(self) -> None:
        """Open the channels, until `leave`; collective."""
        layout = self._layout()
        self.open(layout.mesh, self._member(), layout.ledgers, layout.liveness)

    @contextmanager
    def reaching(self) -> Iterator[ReplicaChannels]:
        """Keep the channels open in the body, in a fit or outside of one; collective."""
        opens = not self.is_open
        self._reach()
        try:
            yield self.channels
        finally:
            if opens:
                self.leave()

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self._strategy.global_rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._strategy.world_size

    def come(self) -> bool:
        """Return whether the other ranks take part in a collective: not after Ctrl-C."""
        return not stopped_by_hand(self._strategy.lightning_module)

    def collective(self, what: str, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run a collective of Lightning; return its first argument if the others do not take part.

        Raises:
            RuntimeError: a rank died; it is named.
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

    def _member(self) -> Member:
        """Return this process's place in the job; Lightning sets its rank here."""
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
