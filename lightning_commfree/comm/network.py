"""How a process joins the others of its job, and reaches them until it leaves."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta

import torch

from lightning_commfree.comm.interface import GlooInterface, unreachable
from lightning_commfree.comm.ledger import Ledger
from lightning_commfree.comm.mesh import Mesh
from lightning_commfree.comm.replica_channels import Near, ReplicaChannels
from lightning_commfree.comm.unshared import Unshared
from lightning_commfree.comm.world import StoreError, join_restarted_world, leave_time_at_exit

SILENCE_S = 60.0  # a rank that is alone with what it begins says so after it


@dataclass(frozen=True)
class Member:
    """This process among the others of its job.

    Attributes:
        rank: global rank.
        size: ranks of the job.
        timeout: of an exchange.
        backend: of process groups on the rank's device.
        device: of the rank.
        meeting_point: address of the main machine, where there are several.
    """

    rank: int
    size: int
    timeout: timedelta
    backend: str
    device: torch.device
    meeting_point: str | None


class Network:
    """This process's way into a job, from `joining` to `leave`."""

    def __init__(self) -> None:
        self._sockets, self._interface = Unshared(), GlooInterface()
        self._channels: ReplicaChannels | None = None

    @property
    def channels(self) -> ReplicaChannels:
        """To all ranks, between replicas, within one.

        Raises:
            RuntimeError: they are not open.
        """
        if self._channels is None:
            raise RuntimeError("Channels are open between `setup_environment` and `teardown` only.")
        return self._channels

    @property
    def is_open(self) -> bool:
        """Whether the channels are."""
        return self._channels is not None

    @contextmanager
    def joining(self, member: Member) -> Iterator[None]:
        """Let the framework open its process group in the body.

        Raises:
            RuntimeError: machines do not reach each other; it says what to set.
        """
        if member.meeting_point is not None:
            self._interface.tell(member.meeting_point)
        leave_time_at_exit()
        try:
            # a rank that is killed is gone, whoever it has forked off
            with self._sockets.opening():
                join_restarted_world(
                    member.backend, member.rank, member.size, member.timeout, member.device
                )
                yield
        except RuntimeError as error:
            if member.meeting_point is not None and "gloo" in str(error).lower():
                raise RuntimeError(unreachable(error)) from error
            raise

    def open(
        self, mesh: Mesh, member: Member, ledgers: tuple[Ledger, Ledger], liveness: bool
    ) -> None:
        """Open the channels, if they are not; arguments as `ReplicaChannels.open` takes them.

        Raises:
            RuntimeError: some ranks have not come until the timeout.
        """
        if self._channels is None:
            near = Near(member.backend, member.device)
            with _waiting_for_all(member):
                self._channels = ReplicaChannels.open(
                    mesh, member.rank, ledgers, member.timeout, near, liveness=liveness
                )

    def naming_lost(self, what: str) -> AbstractContextManager[None]:
        """In the body, a collective of the framework's that fails names the rank that is gone."""
        if self._channels is None:
            return nullcontext()
        # a tensor on the wrong device fails here too, and is nobody's death
        return self._channels.world.naming_lost(what, computing=True)

    def leave(self) -> None:
        """Close the channels, and leave this process's environment as it was."""
        self._interface.take_back()
        if self._channels is not None:
            self._channels.close()
            self._channels = None


@contextmanager
def _waiting_for_all(member: Member) -> Iterator[None]:
    """In the body this rank waits for all others to begin the same."""
    if member.size == 1:
        yield
        return
    advice = (
        "`fit`, `validate`, `test` and `predict` must be called on all ranks, not under"
        f" `if rank == 0:`. The `timeout` is {member.timeout.total_seconds():g} s."
    )
    text = f"This rank waits for others to begin what it has begun. {advice}"
    timer = threading.Timer(SILENCE_S, warnings.warn, [text])
    timer.start()
    try:
        yield
    except StoreError as error:
        raise RuntimeError(f"Other ranks have not begun what this one has. {advice}") from error
    finally:
        timer.cancel()
        timer.join()  # a process that forks has no other thread then
