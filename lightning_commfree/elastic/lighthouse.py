"""Rendezvous for elastic replicas, based on torchft's lighthouse.

Only this module imports torchft. It uses three parts of torchft: the lighthouse itself, the
`quorum` method of its client, and `ManagerServer`, which sends heartbeats on a Rust thread, so that
a replica whose interpreter is busy does not appear dead. A heartbeat takes 363 bytes including
headers and acknowledgments, so a replica sends 0.4 kB/s (`tests/elastic/test_elastic_network.py`
measures this); a quorum takes about 1 kB per replica.

The other modules rely on this behavior of the lighthouse:

- It responds as soon as all members of the last quorum have requested a new one. If some have not,
  it waits until their heartbeats are older than its timeout or, if they are alive, for
  `join_timeout`.
- It responds only if more than half of the replicas that send heartbeats have requested a quorum.
- When it restarts, it forgets all replicas and numbers quorums from 1 again.

Anyone who can reach its port can call `POST /replica/<id>/kill`, without a password. The lighthouse
forwards the request to the address that the replica has registered. Our replicas register the
address of their state server, which does not implement this request. Their `ManagerServer` does
implement it, so it listens on a random address in 127.0.0.0/8. If it listened on a fixed address
such as 127.0.0.1, an attacker could register that address and kill a replica that runs on the
lighthouse's machine.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import threading
import time
from datetime import timedelta
from types import ModuleType
from typing import Any

from lightning_commfree.comm.sockets import hang_up, tcp_sockets
from lightning_commfree.elastic.board import ABSENT_STEP, read_board
from lightning_commfree.elastic.membership import ABSENT, Member, Quorum
from lightning_commfree.elastic.state_server import public_address

HEARTBEAT_SECONDS = 1.0
_CONNECT = timedelta(seconds=2)  # timeout for one attempt to connect to the lighthouse
_FIRST_CONTACT_S = 60.0  # how long to wait for a lighthouse that starts together with the replicas
_WAITED_S = 5.0  # a call that fails after more than this time had reached the lighthouse
_RETRY_S = 0.2
_HANG_UP_S = 2.0  # how long to wait for a call to end after its connection was closed
log = logging.getLogger(__name__)


class LighthouseRendezvous:
    """A `Rendezvous` that uses the lighthouse at `url`, such as "http://10.0.0.1:29510".

    Args:
        url: URL of the lighthouse.
        timeout_s: how long a quorum request may take, and how long the lighthouse may be
            unreachable.
    """

    def __init__(self, url: str, timeout_s: float = 1800.0) -> None:
        self.url, self.timeout_s = url, timeout_s
        self._torchft = _torchft()
        self._lock = threading.Lock()
        self._heartbeat: Any = None  # a ManagerServer
        self._replica = ""  # the first that requests a quorum; it sends these heartbeats
        self._client: Any = None
        self._connections: dict[int, int] = {}  # inodes of the client's sockets, by descriptor
        self._was_there = False
        self._closed = threading.Event()
        self._answered = threading.Condition()
        self._asking: set[threading.Thread] = set()

    def quorum(self, mine: Member) -> Quorum:
        """Request a quorum for the replica `mine.replica`, and block until it is complete.

        Raises:
            RuntimeError: no lighthouse responds at the URL, the lighthouse was unreachable or
                formed no quorum for longer than the timeout, or `close` was called.
        """
        answer: list[Quorum | RuntimeError] = []

        def ask() -> None:
            try:
                answer.append(self._ask(mine))
            except RuntimeError as error:
                answer.append(error)
            with self._answered:
                self._asking.discard(threading.current_thread())
                self._answered.notify_all()

        # use a separate thread, because a call into Rust cannot be interrupted
        thread = threading.Thread(target=ask, name="lighthouse-quorum", daemon=True)
        with self._answered:
            self._asking.add(thread)
            thread.start()
            self._answered.wait_for(lambda: answer or self._closed.is_set())
        if not answer or self._closed.is_set():
            raise RuntimeError("The rendezvous was closed while this replica waited for a quorum.")
        if isinstance(answer[0], RuntimeError):
            raise answer[0]
        return answer[0]

    def heartbeats(self) -> dict[str, float]:
        """Return the seconds since each replica's last heartbeat, without joining a quorum.

        Raises:
            ConnectionError: the lighthouse does not respond.
        """
        return read_board(self.url).heartbeats

    def close(self) -> None:
        """Stop sending heartbeats, and close the connection to the lighthouse.

        A `quorum` call that is pending in another thread raises a `RuntimeError`.
        """
        atexit.unregister(self.close)
        self._closed.set()
        with self._lock:
            if self._heartbeat is not None:
                self._heartbeat.shutdown()
            self._heartbeat = self._client = None
            # End pending calls into Rust now: a thread that returns from Rust while the interpreter
            # exits would abort the process.
            for descriptor, inode in self._connections.items():
                hang_up(descriptor, inode)
        with self._answered:
            self._answered.notify_all()
            self._answered.wait_for(lambda: not self._asking, _HANG_UP_S)

    def _ask(self, mine: Member) -> Quorum:
        failing_s = start_s = time.monotonic()
        while not self._closed.is_set():
            asked_s = time.monotonic()
            left_s = start_s + self.timeout_s - asked_s
            client = None
            try:
                client = self._connect(mine.replica)
                found = client.quorum(
                    replica_id=mine.replica,
                    timeout=timedelta(seconds=max(left_s, 0.001)),
                    address=public_address(mine.states[0]) if mine.states else "",
                    store_address=mine.store,
                    step=ABSENT_STEP if mine.status in ABSENT else mine.step,
                    world_size=max(len(mine.states), 1),
                    data=mine._asdict(),
                )
                self._was_there = True
                return _quorum(found)
            except (RuntimeError, TimeoutError) as error:
                now = time.monotonic()
                if now - start_s >= self.timeout_s:
                    raise RuntimeError(
                        f"The lighthouse at {self.url} did not form a quorum within"
                        f" {self.timeout_s:g} s: either another replica is alive but has not"
                        " requested one, or fewer than `--min-replicas` replicas are running. Run"
                        f" `commfree-lighthouse status {self.url}` to list them."
                    ) from error
                if self._client is client:
                    self._client = None  # so that `_connections` belong to the current client
                if mine.replica != self._replica:  # a restarted lighthouse need not know about it
                    raise RuntimeError(
                        f"The request on behalf of {mine.replica} failed ({error})."
                    ) from error
                if now - asked_s > _WAITED_S:
                    failing_s, self._was_there = now, True  # the lighthouse was reachable until now
                patience_s = self.timeout_s if self._was_there else _FIRST_CONTACT_S
                if now - failing_s >= patience_s:
                    raise RuntimeError(
                        f"No lighthouse is responding at {self.url} ({error}). Start one there with"
                        " `commfree-lighthouse --bind ADDRESS`, or correct `rendezvous`."
                    ) from error
                self._closed.wait(_RETRY_S)
        raise RuntimeError("The rendezvous is closed.")

    def _connect(self, replica: str) -> Any:
        """Return the lighthouse client; create it and start sending heartbeats if necessary."""
        with self._lock:
            if self._closed.is_set():
                raise RuntimeError("The rendezvous is closed.")
            self._replica = self._replica or replica
            if self._client is None:
                before = tcp_sockets()
                self._client = self._torchft.LighthouseClient(self.url, _CONNECT)
                self._connections = dict(tcp_sockets().items() - before.items())
                atexit.register(self.close)
            if self._heartbeat is None:
                self._heartbeat = self._torchft.ManagerServer(
                    replica_id=replica,
                    lighthouse_addr=self.url,
                    hostname="localhost",
                    bind=f"{_loopback()}:0",
                    store_addr="",
                    world_size=1,
                    heartbeat_interval=timedelta(seconds=HEARTBEAT_SECONDS),
                    connect_timeout=_CONNECT,
                    quorum_retries=0,
                )
            return self._client


def serve_lighthouse(
    host: str, port: int, min_replicas: int, join_timeout_s: float, heartbeat_timeout_s: float
) -> Any:
    """Start a lighthouse in this process, and return it; its `shutdown()` method stops it.

    Args:
        host: address to listen on.
        port: port to listen on; 0 lets the kernel choose one.
        min_replicas: minimum number of replicas in a quorum.
        join_timeout_s: how long a quorum waits for replicas that are alive but have not requested
            it.
        heartbeat_timeout_s: time without a heartbeat after which a replica is considered dead.

    Raises:
        ModuleNotFoundError: torchft is not installed.
        OSError: the address cannot be used.
        ValueError: an argument is out of range.
    """
    if heartbeat_timeout_s < 2 * HEARTBEAT_SECONDS:
        raise ValueError(
            f"`--heartbeat-timeout {heartbeat_timeout_s:g}` is too short: replicas send a heartbeat"
            f" every {HEARTBEAT_SECONDS:g} s, so use at least {2 * HEARTBEAT_SECONDS:g}."
        )
    if join_timeout_s < heartbeat_timeout_s:
        raise ValueError(
            f"`--join-timeout {join_timeout_s:g}` is too short: an exchange might go ahead without"
            " replicas that are alive. Use at least the heartbeat timeout,"
            f" {heartbeat_timeout_s:g}."
        )
    if min_replicas < 1:
        raise ValueError(f"`--min-replicas` must be at least 1, got {min_replicas}.")
    try:
        return _torchft().LighthouseServer(
            bind=f"{host}:{port}",
            min_replicas=min_replicas,
            join_timeout_ms=round(1e3 * join_timeout_s),
            heartbeat_timeout_ms=round(1e3 * heartbeat_timeout_s),
        )
    except RuntimeError as error:
        raise OSError(
            f"Cannot listen on {host}:{port} ({error}). Choose another `--port`, or set `--bind` to"
            " one of this machine's addresses (run `ip address` to list them)."
        ) from error


def _loopback() -> str:
    """Return a random loopback address, which other machines cannot reach."""
    return ".".join(["127", *(str(1 + secrets.randbelow(254)) for _ in range(3))])


def _torchft() -> ModuleType:
    # by default, torchft logs every quorum with its tokens; it reads the log level when imported
    is_set = "RUST_LOG" in os.environ
    if not is_set:
        os.environ["RUST_LOG"] = "warn"
    try:
        from torchft import coordination  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "Elastic replicas need torchft: `pip install 'lightning-commfree[elastic]'`. It is"
            " available only for Linux on x86_64."
        ) from error
    finally:
        if not is_set:
            del os.environ["RUST_LOG"]
    module: ModuleType = coordination
    return module


def _quorum(found: Any) -> Quorum:
    """Convert torchft's quorum to a `Quorum`.

    Omit participants whose data is not a valid `Member` record, and log a warning about each.
    """
    members = []
    for participant in found.participants:
        try:
            members.append(_member(participant.replica_id, participant.data))
        except (KeyError, TypeError, ValueError):
            log.warning(
                "Another program is using this lighthouse for its own quorums (as '%s'). It will be"
                " ignored; run a separate lighthouse for it.",
                participant.replica_id,
            )
    return Quorum(int(found.quorum_id), tuple(members))


def _member(replica: str, data: Any) -> Member:
    """Convert a replica's parsed JSON record to a `Member`.

    Raises:
        ValueError, TypeError, KeyError: the record is not valid.
    """
    member = Member(**{**data, "states": tuple(map(str, data["states"]))})
    expected = Member(replica)
    if member.replica != replica or any(
        not isinstance(value, type(like)) for value, like in zip(member, expected, strict=True)
    ):
        raise ValueError("not a valid replica record")
    return member
