"""Failure detection: name the lost rank when a collective fails or does not end.

A failed collective does not say which rank failed. gloo reports "connection closed by peer" on the
neighbors of a dead rank, the neighbors leave, and their own neighbors then blame them. So every
rank beats in the job's own key-value store (torch's TCPStore at `MASTER_ADDR`), and a rank whose
exchange fails looks there before it raises:

1. Rank 1 is killed. The exchange breaks on rank 0, which reads the heartbeats of all ranks.
2. Ranks 2 and 3 keep beating, rank 1 does not. After `GONE_SECONDS` rank 0 stores the verdict
   "rank 1 is gone" (the first verdict wins) and raises a `PeerLostError`.
3. Ranks 2 and 3 read the verdict with their next heartbeat and raise the same error.

How long it takes
-----------------
======================================= ======================================================
a rank is killed (SIGKILL, OOM)         `GONE_SECONDS` after gloo reports the broken connection
a rank raised an error and left         one heartbeat: it says so when it closes its channels
a rank hangs (SIGSTOP, deadlocked GIL)  `HUNG_SECONDS` of silence, if its machine still answers
the process of the store dies (rank 0,  one heartbeat; the error names rank 0, and every rank
or torchrun's agent on its machine)     finds out by itself
a whole machine is silent               the channel's timeout: it may be a link that is down,
                                        which exchanges survive
======================================= ======================================================

What it costs
-------------
No port, no listener, no protocol of ours: one more client connection to the store, and one daemon
thread from the opening of the first channel to its close, or to that of rank 0. A heartbeat writes
about 100 bytes and reads about 100; with requests and TCP/IP headers 1.3 kB/s per rank (measured)
go to and from the machine of rank 0, and nothing passes between other ranks. Only while a rank has
waited for more than `SUSPECT_SECONDS` does it read the heartbeats of all ranks, 0.2 kB/s for each.
Keys carry random tokens that the ranks exchange over the channel (8 bytes each), so that the keys
of an earlier fit, or of an attempt before a torchrun restart, mislead nobody. Training threads
never touch the store: it may hang.

Switched off
------------
`Channel.open(..., liveness=False)`, or the attribute `liveness = False` of a strategy before `fit`.
Errors of exchanges then pass as they are, and a death may be noticed only after the timeout. The
same holds where the process group has no TCPStore (`init_method="file://..."`).
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist

TAG = "peers"
"""The ledger's tag for the exchange of tokens."""

HEARTBEAT_SECONDS = 0.5
SUSPECT_SECONDS = 1.0  # of waiting, after which a rank looks at the others' heartbeats
GONE_SECONDS = 3.0  # of silence when an exchange has broken: the job is over in any case
# Of silence while the exchange may still end. Longer: a rank may hold Python's lock for seconds,
# for example to pickle a large data set, and must not lose the job by it.
HUNG_SECONDS = 6.0
ADVICE = "Restart all ranks from the last checkpoint."

_CONNECT = timedelta(seconds=60)  # to a store that has answered this process already
_WANTED_S = 2.0  # how long a rank goes on reading all heartbeats after it was last asked to
_SLICE = timedelta(seconds=0.1)  # how soon a waiting rank notices a verdict
_STORE_RANK = 0  # the rank on whose machine the store is
_NO_VERDICT = "{}"
_NAMED = 50  # lost ranks in a message, which has to fit into a line
_REASON_CHARACTERS = 250


class PeerLostError(RuntimeError):
    """A collective failed because of other ranks, which the message names.

    Attributes:
        ranks: the reason by global rank.
    """

    def __init__(self, message: str, ranks: Mapping[int, str] | None = None) -> None:
        super().__init__(message)  # one argument, so that a spawned process can pickle it
        self.ranks = dict(ranks or {})


class AgreedError(RuntimeError):
    """An error that all ranks raise together: no rank is to blame for having left by it."""


class Work(Protocol):
    """A collective in flight; `torch.distributed.Work` is one."""

    def is_completed(self) -> bool:
        """Return whether it has ended, well or not."""

    def wait(self, timeout: timedelta = ...) -> Any:
        """Block until it has ended, at most `timeout`; raise `RuntimeError` if it has not."""


class Status(NamedTuple):
    """A rank's heartbeat, as JSON in the store."""

    beat: int  # counts up
    host: str
    left: bool  # the rank has closed its channels
    launched: list[int]  # exchanges, by channel in the order in which they were opened
    says: Any  # published by another part of the library; see `PeerWatch.publish`


class PeerMonitor:
    """This process's heartbeat, and its reading of the other ranks' heartbeats.

    One thread does everything that touches the store. The training thread reads attributes only.

    Args:
        store: a client of the job's store that nobody else uses.
        rank: global rank of this process.

    Attributes:
        token: names this rank's key; to be exchanged with the other ranks and passed to `start`.
        lost: the verdict: the reason by lost rank; empty while no rank is lost. It never changes.
        statuses: by rank, as last read; this rank is not among them.
        store_error: why the store cannot be reached any more; empty while it can.
        says: returns what this rank publishes with its heartbeats.
        guard: if set, called with all `says` while an exchange is waited for; raises an
            `AgreedError` to end the wait.
    """

    def __init__(self, store: Any, rank: int) -> None:
        self.rank, self.token = rank, secrets.randbits(62) + 1
        self.lost: dict[int, str] = {}
        self.statuses: dict[int, Status] = {}
        self.store_error = ""
        self.says: Callable[[], Any] = str
        self.guard: Callable[[Mapping[int, Any]], None] | None = None
        self.launched: list[int] = []
        self._store, self._keys = store, {rank: _key(self.token)}
        self._verdict_key, self._verdict = "", dict[int, str]()
        self._beat, self._host, self._leaving = 0, socket.gethostname(), False
        self._changed: dict[int, float] = {}  # when a rank's heartbeat was last seen to advance
        self._read_s = self._contact_s = self._wanted_s = self.lost_since_s = 0.0
        self._wake, self._has_read = threading.Event(), threading.Condition()
        self._thread: threading.Thread | None = None
        self._write()

    # -- its life

    def start(self, tokens: Mapping[int, int]) -> None:
        """Begin to beat; `tokens` are those of all ranks, whose keys are in the store by now."""
        self._keys = {rank: _key(token) for rank, token in sorted(tokens.items())}
        self._verdict_key = f"{self._keys[min(tokens)]}/lost"
        if self.rank == min(tokens):
            self._store.set(self._verdict_key, _NO_VERDICT)
        self._contact_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="peer-watch", daemon=True)
        self._thread.start()

    @property
    def runs(self) -> bool:
        """Whether it beats: not after `close`, nor in a process that was forked off later."""
        return self._thread is not None and self._thread.is_alive()

    def close(self) -> None:
        """Tell the other ranks that this one leaves, and end the thread."""
        if self._thread is not None and self.runs:
            self._leaving = True
            self._wake.set()
            self._thread.join(1.0)  # a store that hangs keeps the thread, a daemon, and nobody else

    # -- what the training thread asks

    def refresh(self, seconds: float = 2 * HEARTBEAT_SECONDS) -> bool:
        """Beat and read all heartbeats now; return whether that succeeded in so many seconds."""
        asked = time.monotonic()
        self.want()
        self._wake.set()
        with self._has_read:
            return self._has_read.wait_for(lambda: self._read_s > asked, seconds)

    def want(self) -> None:
        """Let the thread read all heartbeats for the next two seconds."""
        now = time.monotonic()
        if now - self._wanted_s > _WANTED_S:
            self._contact_s = now  # this process may have been stopped itself: no news is no sign
        self._wanted_s = now

    def silent(self, seconds: float, spare_machines: bool) -> dict[int, str]:
        """Return the ranks without a heartbeat for `seconds`, with reasons.

        Args:
            seconds: of silence.
            spare_machines: leave out ranks whose whole machine is silent: its link may be down.
        """
        if self._store_left():
            return {}  # nobody reads any more
        statuses = self.statuses
        # up to the last reading and not up to now, for the same reason
        quiet_s = {r: self._read_s - at for r, at in self._changed.items() if not statuses[r].left}
        # the store hangs, so that nothing is known of the others
        if time.monotonic() - self._contact_s > seconds:
            host = statuses.get(_STORE_RANK)
            if spare_machines and (host is None or host.host != self._host):
                return {}
            return {
                _STORE_RANK: f"is gone (the job's key-value store at {self._address()} does not"
                " answer: the process was killed, or it hangs)"
            }
        awake = {statuses[r].host for r, s in quiet_s.items() if s < _WANTED_S} | {self._host}
        return {
            r: _no_heartbeat(s)
            for r, s in quiet_s.items()
            if s > seconds and not (spare_machines and statuses[r].host not in awake)
        }

    def without_store(self) -> dict[int, str]:
        """Return the store's rank if the store has broken the connection."""
        if not self.store_error or self._store_left():
            return {}
        return {
            _STORE_RANK: f"is gone, or its machine (the job's key-value store at {self._address()}"
            f" broke: {self.store_error})"
        }

    def announce(self, found: Mapping[int, str]) -> None:
        """Store a verdict, unless another rank has; `lost` is the one that counts."""
        self._verdict = {r: found[r][:_REASON_CHARACTERS] for r in sorted(found)[:_NAMED]}
        if not self.lost and self.runs:
            self.refresh()
        self._learn(self._verdict)

    def has_others(self, lost: Mapping[int, str]) -> bool:
        """Return whether another rank is there to read a verdict."""
        return any(not s.left and r not in lost for r, s in self.statuses.items())

    # -- the thread

    def _run(self) -> None:
        try:
            while not self._leaving:
                self._read()
                if self._store_left():
                    self.want()
                    self._read()  # all ranks, for the last time: its process may end any moment
                    return
                self._wake.wait(HEARTBEAT_SECONDS)
                self._wake.clear()
                self._write()
            self._write()
        except (RuntimeError, ValueError, TypeError) as error:  # or it holds no heartbeats of ours
            self.store_error = str(error).partition("\n")[0][:_REASON_CHARACTERS]
        finally:
            with self._has_read:
                self._has_read.notify_all()

    def _write(self) -> None:
        self._beat += 1
        mine = Status(self._beat, self._host, self._leaving, self.launched, self.says())
        self._store.set(self._keys[self.rank], json.dumps(mine))
        if self._verdict and not self.lost:
            # the first of several verdicts stays, and is returned
            raw = self._store.compare_set(self._verdict_key, _NO_VERDICT, json.dumps(self._verdict))
            self._hear(raw)

    def _read(self) -> None:
        started = time.monotonic()
        # everyone at first, to learn their machines
        everyone = started - self._wanted_s < _WANTED_S or not self.statuses
        ranks = [r for r in self._keys if r != self.rank and (everyone or r == _STORE_RANK)]
        # The verdict comes last: a rank stores it before it leaves, so whoever reads that a rank
        # has left also reads why.
        *raw, verdict = self._store.multi_get([*map(self._keys.get, ranks), self._verdict_key])
        self._contact_s = time.monotonic()
        self._hear(verdict)
        found = {r: Status(*json.loads(text)) for r, text in zip(ranks, raw, strict=True)}
        before, self.statuses = self.statuses, {**self.statuses, **found}
        if everyone:
            # without a look in between, silence is counted from now on
            looked = started - self._read_s < _WANTED_S
            self._changed = {
                rank: self._changed[rank]
                if looked and rank in self._changed and status.beat == before[rank].beat
                else started
                for rank, status in found.items()
            }
            with self._has_read:
                self._read_s = started
                self._has_read.notify_all()

    def _hear(self, verdict: bytes) -> None:
        self._learn({int(rank): reason for rank, reason in json.loads(verdict).items()})

    def _learn(self, lost: Mapping[int, str]) -> None:
        if lost and not self.lost:
            self.lost_since_s = time.monotonic()
            self.lost = dict(lost)

    def _store_left(self) -> bool:
        host = self.statuses.get(_STORE_RANK)
        return host is not None and host.left

    def _address(self) -> str:
        return f"{self._store.host}:{self._store.port}"


class PeerWatch:
    """Wait for the exchanges of one channel, and name the lost ranks if one fails.

    Args:
        ranks: global ranks of the channel.
        rank: this one's.
        seconds: the timeout of an exchange.
        monitor: of the job; None for a single rank, or with liveness switched off. Errors then pass
            as they are.
    """

    def __init__(
        self,
        ranks: Sequence[int] = (0,),
        rank: int = 0,
        seconds: float = 0.0,
        monitor: PeerMonitor | None = None,
    ) -> None:
        self.seconds, self.monitor = seconds, monitor
        self._peers, self._rank = [r for r in ranks if r != rank], rank
        self._gone_s = min(GONE_SECONDS, seconds / 2)  # so that the error comes within the timeout
        self._closed, self._index = False, 0
        if monitor is not None:
            self._index = len(monitor.launched)
            monitor.launched.append(0)

    # -- around exchanges

    @contextmanager
    def launching(self, tag: str) -> Iterator[None]:
        """Count an exchange that the body launches; name the lost ranks if that fails."""
        if self.monitor is not None:
            self.monitor.launched[self._index] += 1
        with self.naming(tag):
            yield

    @contextmanager
    def naming(self, tag: str, computing: bool = False) -> Iterator[None]:
        """Name the lost ranks if a collective in the body fails.

        Args:
            tag: names the collective in the error.
            computing: the body may fail for reasons of its own as well. Its error passes unchanged
                where no rank is lost.

        Raises:
            PeerLostError: the body raised a `RuntimeError`, or a rank had been lost before.
        """
        start = time.monotonic()
        if self.monitor is not None and self.monitor.lost:
            raise self._failure(tag, 0.0, "a rank had been lost before", self.monitor.lost)
        try:
            yield
        except (PeerLostError, AgreedError):
            raise  # it names the ranks already, or none is to blame
        except RuntimeError as error:
            if self.monitor is None:
                raise
            waited = time.monotonic() - start
            found = self._find_lost()
            if computing and not found:
                raise
            found = found or self._blame_the_living(tag, waited)
            raise self._failure(tag, waited, str(error), found) from error

    def wait(self, works: Sequence[Work], tag: str) -> None:
        """Block until all `works`, the parts of one exchange, are done.

        Raises:
            PeerLostError: one failed, the timeout ran out, or a rank is lost.
        """
        monitor, start = self.monitor, time.monotonic()
        if monitor is None:
            for work in works:
                work.wait()
            return
        try:
            while not all(map(_has_ended, works)):
                self._check_wait(time.monotonic() - start)
        except AgreedError:
            raise  # by the guard
        except RuntimeError as error:
            if self._closed and not monitor.lost:
                raise  # a thread waited while this rank left: no other rank is to blame
            waited = time.monotonic() - start
            found = error.found if isinstance(error, _StopWaitingError) else self._find_lost()
            found = found or self._blame_the_living(tag, waited)
            raise self._failure(tag, waited, str(error), found) from error

    def close(self, owner: bool) -> None:
        """End the waits of other threads; the channel that opened the monitor also ends that."""
        self._closed = True
        if owner and self.monitor is not None:
            self.monitor.close()

    # -- one short status per rank, for other parts of the library

    def publish(self, says: Callable[[], Any]) -> None:
        """Send `says()`, a short JSON value, to all ranks with each heartbeat from now on.

        The heartbeat's thread calls it. Nothing is sent by this call, so it costs a step nothing.
        """
        if self.monitor is not None:
            self.monitor.says = says

    def statuses(self) -> dict[int, Any]:
        """Return what the other ranks published, by global rank, as it was last read.

        It asks for reading, which goes on for two seconds: poll it, and it is at most two
        heartbeats (1 s) old. Empty with liveness off. To end the wait for an exchange by what
        others published, set `monitor.guard`.
        """
        if self.monitor is None:
            return {}
        self.monitor.want()
        return {rank: status.says for rank, status in self.monitor.statuses.items()}

    # -- the verdict

    def _check_wait(self, waited_s: float) -> None:
        """Raise `_StopWaitingError` if an exchange must not be waited for any longer."""
        monitor = self.monitor
        assert monitor is not None
        if monitor.lost:
            raise _StopWaitingError("another rank reported it", monitor.lost)
        if self._closed:
            raise _StopWaitingError("the channel was closed on this rank")
        if waited_s >= self.seconds:
            raise _StopWaitingError("timed out", monitor.silent(self._gone_s, False))
        if waited_s >= min(SUSPECT_SECONDS, self.seconds / 4):
            monitor.want()
            if monitor.guard is not None:
                monitor.guard(self.statuses())
            if found := self._left_behind() or monitor.without_store():
                raise _StopWaitingError("a rank has left", found)
            if found := monitor.silent(HUNG_SECONDS, True):
                raise _StopWaitingError("a rank is silent", found)

    def _find_lost(self) -> dict[int, str]:
        """Look for the ranks that made an exchange break; empty if all beat and none has left."""
        monitor, start = self.monitor, time.monotonic()
        assert monitor is not None
        baseline: dict[int, int] = {}  # heartbeats since the failure, not some that came before it
        while not monitor.lost and monitor.runs:
            if monitor.refresh():
                statuses = {r: s for r, s in monitor.statuses.items() if not s.left}
                if found := self._left_behind():
                    return found
                baseline = baseline or {rank: status.beat for rank, status in statuses.items()}
                quiet = [r for r, status in statuses.items() if status.beat == baseline.get(r)]
                if not quiet:
                    break
                if time.monotonic() - start > self._gone_s:
                    return dict.fromkeys(quiet, _no_heartbeat(self._gone_s))
            elif time.monotonic() - start > self._gone_s:  # the store hangs
                return monitor.silent(self._gone_s / 2, False)
            time.sleep(0.1)
        return monitor.lost or monitor.without_store() or self._left_behind(even=True)

    def _left_behind(self, even: bool = False) -> dict[int, str]:
        """Return the ranks that left before their part in this channel's last exchange.

        Args:
            even: also those that left after it.
        """
        assert self.monitor is not None
        mine = self.monitor.launched[self._index] + even
        return {
            rank: "is gone (it ended its fit earlier; its log says why)"
            for rank, status in self.monitor.statuses.items()
            if rank in self._peers and status.left and self._launched_by(status) < mine
        }

    def _blame_the_living(self, tag: str, waited_s: float) -> dict[int, str]:
        """Return the ranks that are behind in this channel's exchanges, or else this one."""
        assert self.monitor is not None
        mine = self.monitor.launched[self._index]
        behind = {
            rank: launched
            for rank, status in self.monitor.statuses.items()
            if rank in self._peers and (launched := self._launched_by(status)) < mine
        }
        if behind:
            return {
                rank: f"is alive, but has launched {n} exchanges where rank {self._rank} has"
                f" launched {mine}: it is slow or hangs; if it was only slow, make `timeout` longer"
                for rank, n in behind.items()
            }
        return {
            self._rank: f"gave up on '{tag}' after {waited_s:.1f} s although all ranks are alive"
            " and at the same exchange; suspect the network (make `timeout` over twice an outage)"
        }

    def _launched_by(self, status: Status) -> int:
        return status.launched[self._index] if self._index < len(status.launched) else 0

    def _failure(
        self, tag: str, waited_s: float, cause: str, found: Mapping[int, str]
    ) -> PeerLostError:
        assert self.monitor is not None
        self.monitor.announce(found)
        lost = self.monitor.lost
        if self._rank == _STORE_RANK and self.monitor.has_others(lost):
            # The store ends with this process: the others get two heartbeats to read the verdict.
            spent_s = time.monotonic() - self.monitor.lost_since_s
            time.sleep(max(0.0, 2 * HEARTBEAT_SECONDS - spent_s))
        first_line = cause.strip().partition("\n")[0][:_REASON_CHARACTERS]
        named = "; ".join(f"rank {rank} {reason}" for rank, reason in sorted(lost.items()))
        return PeerLostError(
            f"The exchange '{tag}' failed on rank {self._rank} after {waited_s:.1f} s"
            f" ({first_line}): {named}. {ADVICE}",
            lost,
        )


class _StopWaitingError(RuntimeError):
    """An exchange is waited for no longer, because of the ranks in `found`, if any."""

    def __init__(self, message: str, found: Mapping[int, str] | None = None) -> None:
        super().__init__(message)
        self.found = dict(found or {})


def job_store() -> Any:
    """Return a new client of the job's TCPStore; None where the process group has another store.

    A client of its own, because a call may block it for as long as the store hangs.
    """
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):  # type: ignore[attr-defined]
        return None
    client = dist.TCPStore(  # type: ignore[attr-defined]
        store.host, store.port, is_master=False, wait_for_workers=False, timeout=_CONNECT
    )
    # A call that gives up in the middle of an outage would leave half a reply in the connection.
    client.set_timeout(timedelta(days=30))
    return client


def _no_heartbeat(seconds: float) -> str:
    return f"is gone (no heartbeat for {seconds:.0f} s: it was killed, or it hangs)"


def _key(token: int) -> str:
    return f"commfree/{token:x}"


def _has_ended(work: Work) -> bool:
    """Wait for a slice of time; return whether `work` has ended, raise what it failed with."""
    try:
        work.wait(_SLICE)
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait(_SLICE)  # it may have ended well just after the slice
    return True
