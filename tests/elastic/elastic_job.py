"""An elastic job of forked processes: a rendezvous that knows who lives, and what replicas play.

`ScriptedRendezvous` stands in for a lighthouse: its server sees a replica die when its connection
breaks, at once, or after `lose`. `LocalTransfer` stands in for the state server.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_commfree.comm.ledger import Ledger
from lightning_commfree.diloco import DiLoCoSettings, split_into_fragments
from lightning_commfree.elastic.algorithm import ElasticDiLoCo
from lightning_commfree.elastic.membership import (
    DEAD,
    JOINING,
    ElasticMembership,
    Limits,
    Member,
    Quorum,
)
from tests.diloco.training import ADAMW, DEFAULTS, State, state_of

_FORK = multiprocessing.get_context("fork")


# -- who lives


class RendezvousServer:
    """A process that answers a quorum as soon as all have asked that were in the last one and live.

    Args:
        folder: for its socket.
        founders: how many must ask for the first quorum.
        notices: whether it sees that a process has ended; otherwise, when another replica says so.
    """

    def __init__(self, folder: Path, founders: int, notices: bool = True) -> None:
        self.address = str(folder / "rendezvous")
        ready = _FORK.Event()
        self.process = _FORK.Process(target=_serve, args=(self.address, founders, notices, ready))
        self.process.daemon = True
        self.process.start()
        assert ready.wait(10)

    def lose(self, begin: str) -> None:
        """Take a replica for dead, as a lighthouse does when its heartbeat expires.

        Args:
            begin: of its name.
        """
        with Client(self.address) as client:
            client.send(("lose", begin))

    def restart(self) -> None:
        """Forget everything, like a lighthouse that is killed and started again."""
        with Client(self.address) as client:
            client.send(("restart", None))

    def close(self) -> None:
        self.process.terminate()
        self.process.join()


class _Server:
    def __init__(self, address: str, founders: int, notices: bool) -> None:
        self.notices, self.unnoticed, self.reported = notices, set[str](), set[str]()
        self.listener = Listener(address, backlog=64)
        self.raw: Any = self.listener._listener._socket  # type: ignore[attr-defined]
        self.founders, self.number = founders, 0
        self.beats: dict[Any, str] = {}  # replica by connection
        self.asked: dict[str, tuple[Member, list[Any]]] = {}
        self.last: set[str] = set()
        self.lost: dict[str, Any] = {}  # connections, by replica
        self.fresh: list[Any] = []  # connections of which nothing is known yet

    def serve(self) -> None:
        while True:
            for connection in wait([self.raw, *self.beats, *self.fresh]):
                if connection is self.raw:
                    self.fresh.append(self.listener.accept())
                else:
                    self.read(connection)
            self.answer()

    def read(self, connection: Any) -> None:
        try:
            kind, value = connection.recv()
        except (EOFError, OSError):
            replica = self.beats.pop(connection, None)
            if self.notices:
                self.forget(replica)
            elif replica is not None and replica not in self.reported:
                self.unnoticed.add(replica)
            with suppress(ValueError):
                self.fresh.remove(connection)
            return
        self.fresh.remove(connection)
        getattr(self, kind)(connection, value)

    def beat(self, connection: Any, replica: str) -> None:
        self.beats[connection] = replica

    def forget(self, replica: str | None) -> None:
        if replica not in self.beats.values():
            self.asked.pop(str(replica), None)

    def lose(self, _: Any, begin: str) -> None:
        found = {name: c for c, name in self.beats.items() if name.startswith(begin)}
        self.lost |= found
        for name, connection in found.items():
            del self.beats[connection]
            self.forget(name)

    def restart(self, _: Any, __: Any) -> None:
        for _, connections in self.asked.values():
            for connection in connections:
                connection.close()
        self.asked, self.last, self.number, self.founders = {}, set(), 0, 1

    def ages(self, connection: Any, _: Any) -> None:
        connection.send(dict.fromkeys(self.lost, 99.0))

    def ask(self, connection: Any, member: Member) -> None:
        if member.replica in self.lost:  # it beats again
            self.beats[self.lost.pop(member.replica)] = member.replica
        if member.status == DEAD:
            self.reported.add(member.replica)
            self.unnoticed.discard(member.replica)
        waiting = self.asked[member.replica][1] if member.replica in self.asked else []
        self.asked[member.replica] = member, [*waiting, connection]

    def answer(self) -> None:
        waited_for = self.last & {*self.beats.values(), *self.unnoticed}
        if not waited_for <= self.asked.keys() or len(self.asked) < max(self.founders, 1):
            return
        self.founders = 1
        self.number += self.asked.keys() != self.last
        self.last = {*self.asked}
        quorum = Quorum(self.number, tuple(self.asked[name][0] for name in sorted(self.asked)))
        for _, connections in self.asked.values():
            for connection in connections:
                with suppress(OSError):
                    connection.send(quorum)
                connection.close()
        self.asked = {}


def _serve(address: str, founders: int, notices: bool, ready: Any) -> None:
    server = _Server(address, founders, notices)
    ready.set()
    server.serve()


class ScriptedRendezvous:
    def __init__(self, address: str) -> None:
        self.address = address
        self.beat: Connection | None = None
        self.pending: list[Connection] = []
        self.closed = False

    def quorum(self, mine: Member) -> Quorum:
        while not self.closed:
            try:
                if self.beat is None:
                    self.beat = Client(self.address)
                    self.beat.send(("beat", mine.replica))
                client = Client(self.address)
                self.pending.append(client)
                client.send(("ask", mine))
                answer: Quorum = client.recv()
                self.pending.remove(client)
                return answer
            except (EOFError, OSError):  # the server was restarted
                time.sleep(0.05)
        raise RuntimeError("The rendezvous is closed.")

    def heartbeats(self) -> dict[str, float]:
        with Client(self.address) as client:
            client.send(("ages", None))
            ages: dict[str, float] = client.recv()
            return ages

    def close(self) -> None:
        self.closed = True
        for connection in [self.beat, *self.pending]:
            if connection is not None:
                connection.close()


# -- what a joiner needs


class LocalTransfer:
    """A socket that answers with pickles; delays, before a joiner has the answer, make it slow."""

    def __init__(
        self, folder: Path, replica: str, delay_s: float = 0.0, messages_delay_s: float = 0.0
    ) -> None:
        self.address = str(folder / f"state_{replica}")
        self.delay_s, self.messages_delay_s = delay_s, messages_delay_s
        self.listener = Listener(self.address, backlog=64)

    def serve(self, snapshot: Callable[[], Any], messages: Callable[[int], Any]) -> None:
        self.serving = snapshot, messages

        def answer() -> None:
            while True:
                with suppress(EOFError, OSError), self.listener.accept() as connection:
                    first = connection.recv()
                    try:
                        now = self.serving
                        found = now[0]() if first is None else now[1](first)
                    except LookupError as error:
                        found = error
                    connection.send_bytes(pickle.dumps(found))

        threading.Thread(target=answer, daemon=True).start()

    def fetch(self, address: str, first: int | None) -> Any:
        try:
            with Client(address) as client:
                client.send(first)
                found = pickle.loads(client.recv_bytes())
        except (EOFError, OSError) as error:
            raise ConnectionError(address) from error
        if isinstance(found, LookupError):
            raise found
        return found

    def fetch_snapshot(self, address: str) -> Any:
        found = self.fetch(address, None)
        time.sleep(self.delay_s)
        return found

    def fetch_messages(self, address: str, first: int) -> Any:
        found = self.fetch(address, first)
        time.sleep(self.messages_delay_s)
        return found

    def close(self) -> None:
        pass


# -- a replica


@dataclass
class Job:
    """What all replicas of a job play."""

    steps: int = 40
    changes: dict[str, Any] = field(default_factory=dict)
    make_module: Callable[[], nn.Module] = nn.Module
    step_s: float = 0.01
    limits: Limits = Limits()
    weights: tuple[int, ...] = (1,) * 8  # of an inner step, by slot
    pace: tuple[int, ...] = (1,) * 8  # times `step_s`, by slot
    by_time: bool = False
    may_rejoin: bool = False
    before_step: Callable[[ElasticDiLoCo, int], None] = lambda diloco, step: None


@dataclass
class Result:
    slot: int = -1
    joined: int | None = None  # its first flight
    rejoined: list[int] = field(default_factory=list)  # flights
    discarded: float = 0.0
    inner_steps: int = 0
    state: State = field(default_factory=dict)
    views: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)  # of each step's landings
    bytes_sent: int = 0
    error: str = ""


def train(module: nn.Module, slot: int, step: int) -> None:
    """Backward of a loss that depends on slot and step alone, exact on any machine."""
    generator = torch.Generator().manual_seed(1000 * slot + step)
    module.zero_grad()
    for parameter in module.parameters():
        parameter.grad = parameter.detach() + torch.randn(parameter.shape, generator=generator)


def settings_of(job: Job) -> DiLoCoSettings:
    return DiLoCoSettings(**{**DEFAULTS, **job.changes})


def replica(job: Job, address: str, name: str, folder: Path, *delays_s: float) -> Result:
    """Play one replica from its begin to its end."""
    ledger = Ledger()
    membership = ElasticMembership(
        ScriptedRendezvous(address),
        LocalTransfer(folder, name, *delays_s),
        name,
        ledger,
        limits=job.limits,
        timeout=timedelta(seconds=30),
        by_time=job.by_time,
    )
    module, settings = job.make_module(), settings_of(job)
    fragments = split_into_fragments(module, settings.num_fragments, settings.fragment_pattern)
    diloco = ElasticDiLoCo(module, fragments, settings, membership)
    result = Result()
    try:
        diloco.begin(settings.fingerprint())
        result.joined = diloco.joined
        slot = result.slot = membership.record.slot
        diloco.weight_per_step = job.weights[slot]
        diloco.last_step, diloco.may_rejoin = job.steps, job.may_rejoin
        optimizer, taken = ADAMW(module.parameters()), folder / f"steps_{name}"
        while diloco.step < job.steps:
            step = diloco.step + 1
            job.before_step(diloco, step)
            train(module, slot, step)
            optimizer.step()
            with taken.open("a") as file:  # also of a replica that is killed
                file.write(f"{slot} {step}\n")
            time.sleep(job.step_s * job.pace[slot])
            start_s = time.monotonic()
            diloco.after_step()
            result.waits_s.append(time.monotonic() - start_s)
            if job.may_rejoin:
                diloco.wait_in_flight()  # as a checkpoint does
        diloco.finish()
        result.state = state_of(module)
    except (RuntimeError, ValueError) as error:
        result.error = f"{type(error).__name__}: {error}"
    diloco.close()
    result.views, result.inner_steps = diloco.views, diloco.inner_steps
    result.rejoined, result.discarded = diloco.rejoined, diloco.discarded
    result.bytes_sent = ledger.bytes_sent
    return result


def _play(job: Job, address: str, name: str, folder: Path, *delays_s: float) -> None:
    torch.set_num_threads(1)
    result = replica(job, address, name, folder, *delays_s)
    torch.save(result, folder / f"writing_{name}")
    (folder / f"writing_{name}").rename(folder / f"result_{name}")
    time.sleep(0.05)
    os._exit(0)  # a gloo group that lost a member may take its whole timeout to come down


def wait_stopped(process: Any) -> None:
    """Wait until a process has received SIGSTOP."""
    stat = Path(f"/proc/{process.pid}/stat")
    end_s = time.monotonic() + 30
    while stat.read_text().split()[2] != "T":
        assert time.monotonic() < end_s
        time.sleep(0.02)


class Replicas:
    """The processes of a job."""

    def __init__(
        self, job: Job, folder: Path, founders: Sequence[str], notices: bool = True
    ) -> None:
        self.job, self.folder = job, folder
        self.server = RendezvousServer(folder, len(founders), notices)
        self.processes: dict[str, Any] = {}
        for name in founders:
            self.start(name)

    def start(self, name: str, delay_s: float = 0.0, messages_delay_s: float = 0.0) -> None:
        arguments = self.job, self.server.address, name, self.folder, delay_s, messages_delay_s
        self.processes[name] = _FORK.Process(target=_play, args=arguments, daemon=True)
        self.processes[name].start()

    def wait_dead(self, name: str) -> None:
        self.processes[name].join(30)
        assert self.processes[name].exitcode == -signal.SIGKILL

    def taken(self) -> dict[int, set[int]]:
        """Return the steps of the schedule that were trained, by slot."""
        found: dict[int, set[int]] = {}
        for path in self.folder.glob("steps_*"):
            for line in path.read_text().splitlines():
                slot, step = map(int, line.split())
                found.setdefault(slot, set()).add(step)
        return found

    def results(self, limit_s: float = 40.0) -> dict[str, Result]:
        """Wait for all processes; return the results of those that were not killed, by name."""
        deadline = time.monotonic() + limit_s
        for process in self.processes.values():
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
        self.server.close()
        paths = {name: self.folder / f"result_{name}" for name in self.processes}
        return {
            name: torch.load(path, weights_only=False)
            for name, path in paths.items()
            if path.exists()
        }


# -- how a replica ends, or almost: hooks for `Job.before_step`


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class At:
    """Calls `act(diloco)` in the founder in `slot`, before a step or the next one that it takes."""

    slot: int
    step: int
    act: Callable[[ElasticDiLoCo], object]
    is_done: bool = False

    def __call__(self, diloco: ElasticDiLoCo, step: int) -> None:
        due = step >= self.step and diloco.slot == self.slot and diloco.joined is None
        if due and not self.is_done:
            self.is_done = True
            self.act(diloco)


def stop(diloco: ElasticDiLoCo) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def killing(slot: int, step: int) -> At:
    return At(slot, step, lambda diloco: die())


def each(acts: Sequence[At]) -> Callable[[ElasticDiLoCo, int], None]:
    def act(diloco: ElasticDiLoCo, step: int) -> None:
        for one in acts:
            one(diloco, step)

    return act


def before(owner: Any, name: str, act: Callable[[], object]) -> None:
    """Call `act` before the method `name` of an object runs."""
    method = getattr(owner, name)

    def acting(*args: Any, **kwargs: Any) -> Any:
        act()
        return method(*args, **kwargs)

    setattr(owner, name, acting)


def die_before_asking(diloco: ElasticDiLoCo) -> None:
    before(diloco._membership.rendezvous, "quorum", die)


def die_in_message(diloco: ElasticDiLoCo, name: str) -> None:
    """Die before a phase is sent: `all_to_all` is the first of two, `all_gather` the second."""
    channel = diloco._membership.view().channel
    before(channel, name, die)


def die_in_last_round(diloco: ElasticDiLoCo) -> None:
    before(diloco, "_finish_fragment", die)


def die_in_configure(diloco: ElasticDiLoCo) -> None:
    before(diloco._membership, "_connect", die)


def die_after_landing(diloco: ElasticDiLoCo) -> None:
    land = diloco.land

    def land_and_die(p: int) -> bool:
        land(p)
        die()
        return False

    diloco.land = land_and_die  # type: ignore[method-assign]


def die_when_a_joiner_is_behind(diloco: ElasticDiLoCo) -> None:
    """Die in an exchange that a joiner has asked to be part of, one or more exchanges too late."""
    membership = diloco._membership

    def act() -> None:
        joiners = [m for m in membership._quorum.members if m.status == JOINING]
        if any(0 <= m.flights < membership.record.flights for m in joiners):
            die()

    before(membership.view().channel, "all_gather", act)


def leave(diloco: ElasticDiLoCo) -> None:
    """Leave the job as after SIGTERM."""
    diloco.drain(5.0)
    diloco.close()
    os._exit(0)


def die_as_donor(diloco: ElasticDiLoCo) -> None:
    transfer: Any = diloco._membership.transfer
    transfer.serving = die, transfer.serving[1]


def lose_a_result(diloco: ElasticDiLoCo) -> None:
    """Fail after an exchange has ended, which the others have completed then."""
    channel, lost = diloco._membership.view().channel, []
    gather = channel.all_gather

    def gather_and_fail(*args: Any) -> Any:
        def fail(received: Any) -> Any:
            if not lost:
                lost.append(received)
                raise RuntimeError("lost")
            return received

        return gather(*args).then(fail)

    channel.all_gather = gather_and_fail  # type: ignore[method-assign]
