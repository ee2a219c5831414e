"""Join the job, open the channels between ranks, and run small collectives over all ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_commfree.comm.channel import abort_nccl
from lightning_commfree.comm.job import (
    Mesh,
    RankInfo,
    ReplicaChannels,
    delay_exit,
    existing_backend,
    join_restarted_world,
    joining,
    waiting_for_all,
    world_backend,
)
from lightning_commfree.comm.liveness import Guard
from lightning_commfree.comm.sockets import CloseOnFork, GlooInterface, connection_error
from lightning_commfree.host import DDPStrategy, SIGTERMException, TrainerStatus
from lightning_commfree.lightning_internals import set_world_backend

T = TypeVar("T")


class Ranks:
    """The ranks of a job: opens channels between them, and runs small collectives over them.

    `backend` is the user's `process_group_backend`. `mesh` returns the mesh for a given number of
    ranks, and `open_channels` opens this rank's channels.
    """

    def __init__(
        self,
        strategy: DDPStrategy,
        timeout: timedelta,
        backend: str | None,
        mesh: Callable[[int], Mesh],
        open_channels: Callable[[RankInfo], ReplicaChannels],
    ) -> None:
        self._strategy, self.timeout, self._backend = strategy, timeout, backend
        self._mesh, self._open_channels = mesh, open_channels
        self._sockets, self._interface = CloseOnFork(), GlooInterface()
        self._channels: ReplicaChannels | None = None

    # -- from joining the job to leaving it

    def join(self, create_group: Callable[[], None]) -> None:
        """Create Lightning's process group, then open the channels; collective.

        A `RuntimeError` names the setting if machines cannot reach each other, or says that ranks
        did not join within the timeout.
        """
        info = self._info()
        if info.main_address is not None:
            self._interface.select(info.main_address)
        delay_exit(hosts_store=info.rank == 0 and info.size > 1)
        backend = world_backend(self._mesh(info.size), info)
        if backend == "gloo" and existing_backend() == "nccl":
            rank_zero_warn(
                "torch's default process group uses nccl. It was created before this fit, which"
                " would have chosen gloo, because it connects machines. Lightning's barriers and"
                " metrics use it; exchanges between replicas use gloo in any case. If the link"
                ' between the machines is slow, create the group with gloo (`backend="gloo"` in'
                " `torch.distributed.init_process_group` or Ray's `TorchConfig`): GPUs that share"
                " a replica still use nccl."
            )
        set_world_backend(self._strategy, backend)
        try:
            # a killed rank's connections must break, even if its forked workers survive it
            with self._sockets.opening(), joining(info):
                join_restarted_world(info, backend)
                create_group()
        except RuntimeError as error:
            if info.main_address is not None and "gloo" in str(error).lower():
                raise RuntimeError(connection_error(error)) from error
            raise
        self._open()

    @contextmanager
    def with_channels(self) -> Iterator[ReplicaChannels]:
        """Context manager in which the channels are open, even outside a fit; collective."""
        was_closed = self._channels is None
        self._open()
        try:
            yield self.channels
        finally:
            if was_closed:
                self.leave()

    def leave(self) -> None:
        """Close the channels, and restore gloo's environment variable if `join` has changed it."""
        self._interface.restore()
        if self._channels is not None:
            self._channels.close(failed=self.interrupted)
            self._channels = None

    def _open(self) -> None:
        """Open the channels if they are not open; collective."""
        if self._channels is None:
            info = self._info()
            with waiting_for_all(info):
                self._channels = self._open_channels(info)

    @property
    def channels(self) -> ReplicaChannels:
        """The open channels; raises a `RuntimeError` if they are not open."""
        if self._channels is None:
            raise RuntimeError(
                "Channels are available only between `setup_environment` and `teardown`."
            )
        return self._channels

    @property
    def rank(self) -> int:
        """Global rank of this process."""
        return self._strategy.global_rank

    @property
    def size(self) -> int:
        """Number of ranks in the job."""
        return self._strategy.world_size

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C or an error is ending the fit: collectives may hang, and nothing is saved.

        SIGTERM does not count, because it stops all ranks after the same step.
        """
        module, error = self._strategy.lightning_module, sys.exc_info()[1]
        if module is None or error is None or isinstance(error, SIGTERMException):
            return False
        try:
            trainer = module.trainer
        except RuntimeError:  # in the launching process, no Trainer is attached
            return False
        # after the fit, a script that has caught the error may still save
        in_fit = trainer.state.stage is not None and trainer.world_size > 1
        return in_fit and trainer.state.status == TrainerStatus.INTERRUPTED

    # -- Lightning's collectives, over all ranks

    def naming_lost(self, what: str) -> AbstractContextManager[None]:
        """Context manager that names lost ranks in the error if a Lightning collective fails."""
        if self._channels is None:
            return nullcontext()
        # `computing`: a tensor on the wrong device fails too, without any rank being lost
        guard = Guard([rank for rank in range(self.size) if rank != self.rank], self._interrupt)
        return self._channels.world.peers.naming_lost(what, computing=True, guard=guard)

    def _interrupt(self) -> None:
        """Make collectives on Lightning's process group fail on this rank."""
        abort_nccl()
        self._sockets.disconnect()

    def guarded(self, what: str) -> AbstractContextManager[None]:
        """Context manager for computing a model with the ranks of a replica; errors name lost ones.

        If one of them is lost, the collectives of torch's DDP or FSDP fail within seconds.
        """
        if self._channels is None or self._channels.within.size == 1:
            return nullcontext()
        guard = self._channels.within.guard()
        return self._channels.world.peers.naming_lost(what, computing=True, guard=guard)

    def collective(self, what: str, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run Lightning's collective `call(*args)`; if `interrupted`, return `args[0]` instead.

        If a rank died, a `RuntimeError` names it.
        """
        if self.interrupted:
            return args[0] if args else None  # type: ignore[return-value]
        with self.naming_lost(what):
            return call(*args, **kwargs)

    def broadcast(self, value: T, src: int = 0) -> T:
        """Return rank `src`'s value on all ranks; collective."""
        sent: T = self._strategy.broadcast(value, src)
        return sent

    def all_rows(self, mine: Sequence[int]) -> list[list[int]]:
        """Gather a list of integers, equally long on all ranks, in rank order; collective.

        It uses Lightning's process group, so it
        may run while a background thread exchanges something on a channel.
        """
        shape = self.size, len(mine)
        values = torch.zeros(shape, dtype=torch.int64, device=self._strategy.root_device)
        values[self.rank] = torch.tensor(mine)
        with self.naming_lost("reduce"):
            total = DDPStrategy.reduce(self._strategy, values, reduce_op="sum")
        rows: list[list[int]] = total.tolist()
        return rows

    def all_values(self, mine: int) -> list[int]:
        """Gather an integer from every rank, in rank order; collective like `all_rows`."""
        return [value for (value,) in self.all_rows([mine])]

    def all_flags(self, mine: bool) -> list[bool]:
        """Gather a flag from every rank, in rank order; collective."""
        return [bool(value) for value in self.all_values(int(mine))]

    @contextmanager
    def fail_together(self) -> Iterator[None]:
        """Context manager that raises an error on all ranks if its block fails on any; collective.

        Ranks on which the block succeeds raise a `RuntimeError` with the error text of the first
        rank on which it failed.
        """
        failure = None
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised below
            failure = error
        failed = self.all_flags(failure is not None)
        if any(failed):
            text = self.broadcast(str(failure), failed.index(True))
            raise failure or RuntimeError(text)

    def _info(self) -> RankInfo:
        """Set Lightning's rank attributes, and return them with the connection settings."""
        strategy, several = self._strategy, self._strategy.num_nodes > 1
        strategy.set_world_ranks()
        environment = strategy.cluster_environment
        return RankInfo(
            strategy.global_rank,
            strategy.world_size,
            self.timeout,
            self._backend,
            strategy.root_device,
            environment.main_address if environment is not None and several else None,
            None if environment is None else environment.main_port,
        )
