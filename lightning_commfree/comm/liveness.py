"""Detect lost ranks, and name them when a collective fails or hangs.

The error of a failed collective does not tell which rank failed first. When a rank dies, gloo
reports "connection closed by peer" on its neighbors; they exit, and their own neighbors then report
them as failed. So every rank writes a heartbeat to the job's key-value store (torch's TCPStore at
`MASTER_ADDR`), and a rank whose exchange fails reads the store before it raises an error:

1. Rank 1 is killed. The exchange breaks on rank 0, which reads the heartbeats of all ranks.
2. Ranks 2 and 3 still send heartbeats, but rank 1 does not. After `GONE_SECONDS`, rank 0 stores the
   verdict "rank 1 is gone" (the first verdict wins) and raises a `PeerLostError`.
3. Ranks 2 and 3 read the verdict with their next heartbeat and raise the same error.

A verdict may also be an error that one rank detects and all ranks raise (`PeerWatch.agreed`), such
as epochs of different lengths.

======================================= ======================================================
failure                                 time until it is detected
======================================= ======================================================
a rank is killed (SIGKILL, OOM)         `GONE_SECONDS` after gloo reports the broken connection
a rank raised an error and exited       one heartbeat: it reports this when closing its channels
a rank hangs (SIGSTOP, deadlocked GIL)  `HUNG_SECONDS` of silence, if another rank of its machine is
                                        heard; otherwise as for a silent machine
the store's process dies (rank 0, or    one heartbeat; the error names rank 0, and every rank
torchrun's agent on its machine)        detects it directly
a whole machine is silent               the channel's timeout, because it may be a network
                                        outage, which exchanges survive
======================================= ======================================================

Each rank opens an additional client connection to the store and runs a daemon thread, from the time
it opens its first channel until that channel or rank 0's is closed. Failure detection uses no other
port or protocol. Heartbeats use 1.3 kB/s per rank to and from rank 0's machine (measured, including
TCP/IP headers). After waiting for more than `SUSPECT_SECONDS`, a rank also reads all heartbeats,
which uses 0.2 kB/s per rank. Keys contain random tokens that the ranks exchange over the channel (8
bytes each), so that keys from an earlier fit, or from before a torchrun restart, are never read.
Once a monitor runs, training threads do not access the store, because it may hang.

To disable failure detection, pass `liveness=False` to `Channel.open`, or set the attribute
`liveness = False` of a strategy before `fit`. Exchanges then raise their own errors, and a dead
rank may go undetected until the timeout. The same applies if the process group has no TCPStore
(`init_method="file://..."`).
"""

from __future__ import annotations

import json
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

TAG = "peers"
"""The ledger's tag for the exchange of tokens."""

HEARTBEAT_SECONDS = 0.5
SUSPECT_SECONDS = 1.0  # time that a rank waits before it looks at the other ranks' heartbeats
GONE_SECONDS = 3.0  # limit of silence after an exchange has broken: the job is over in any case
# Limit of silence while the exchange may still succeed. It is longer, because a healthy rank may
# hold Python's lock for seconds, for example to pickle a large dataset.
HUNG_SECONDS = 6.0
ADVICE = "Restart all ranks from the last checkpoint."

_CONNECT_TIMEOUT = timedelta(seconds=60)  # for a store that has already answered this process
_READ_ALL_S = 2.0  # how long the thread reads all heartbeats after `read_all`
_SLICE = timedelta(seconds=0.1)  # how soon a waiting rank notices a verdict
_STORE_RANK = 0  # the rank whose machine hosts the store
_NO_VERDICT = "{}"
_MAX_NAMED = 50  # maximum number of lost ranks in a message
_REASON_CHARACTERS = 250
# the parts of gloo's errors to strip
_SOURCE_LINE = re.compile(r"^\[\S+:\d+\] ")
_GLOO_ADVICE = ". This is typically caused by"


class PeerLostError(RuntimeError):
    """A collective failed because of other ranks; the message names them.

    Attributes:
        ranks: the global ranks that caused the failure, each with the reason.
    """

    def __init__(self, message: str, ranks: Mapping[int, str] | None = None) -> None:
        super().__init__(message)  # one argument, so that a spawned process can pickle it
        self.ranks = dict(ranks or {})


class AgreedError(RuntimeError):
    """An error that one rank detects and all ranks raise.

    A rank that exits because of this error does not count as lost.
    """


Verdict = Mapping[int, str] | str
"""Why a job has ended: the lost ranks with their reasons, or the text of an `AgreedError`."""


class Status(NamedTuple):
    """A rank's heartbeat, stored as JSON in the job's key-value store."""

    beat: int  # number of heartbeats so far
    host: str
    left: bool  # whether the rank has closed its channels
    launched: list[int]  # number of exchanges launched on each channel, in the order of opening
    published: Any  # a value published through `PeerWatch.publish`


@dataclass(eq=False)
class Guard:
    """Ends collectives that another library runs, such as FSDP's, if a peer leaves.

    The training thread blocks in such a collective and reads no heartbeats, so the heartbeat thread
    calls `interrupt`.
    """

    ranks: Collection[int]  # the peers whose leaving makes the collectives hang
    interrupt: Callable[[], None]  # makes the collectives fail
    start_s: float = field(default_factory=time.monotonic)
    suspects: bool = False  # whether a peer was found to have left
    fired: bool = False


class PeerMonitor:
    """Publishes this process's heartbeat and reads the other ranks' heartbeats, on its own thread.

    After `start`, only that thread accesses the store, through a separate client, because the store
    may hang. The training thread reads the results from attributes.
    """

    def __init__(self, store: Any, rank: int) -> None:
        self.rank = rank
        self.token = secrets.randbits(62) + 1  # names this rank's key; the caller sends it to all
        self.verdict: Verdict = {}  # empty until the job has ended; the first one is final
        self.statuses: dict[int, Status] = {}  # latest heartbeat of every other rank
        self.failure = ""  # message of this rank's first `PeerLostError`, which later ones repeat
        self.store_error = ""  # set once the store is no longer reachable
        self.published: Callable[[], Any] = str  # returns the value published with heartbeats
        self.launched: list[int] = []
        self.guard: Guard | None = None  # of the block that the training thread is in
        self._store, self._keys = store, {rank: _store_key(self.token)}
        self._verdict_key = ""
        self._announced: Verdict = {}  # the verdict from this rank
        self._beat, self._host, self._leaving = 0, socket.gethostname(), False
        self._changed: dict[int, float] = {}  # when a rank's heartbeat was last seen to advance
        self._read_s = self._contact_s = self._read_all_s = self.verdict_s = 0.0
        self._wake, self._has_read = threading.Event(), threading.Condition()
        self._thread: threading.Thread | None = None
        self._write()

    # -- lifetime

    def start(self, tokens: Mapping[int, int]) -> None:
        """Start the heartbeat thread.

        `tokens` maps every rank to its token, which names the rank's key in the store. All ranks
        must have created their monitors already, because the constructor writes a rank's first
        heartbeat.
        """
        self._keys = {rank: _store_key(token) for rank, token in sorted(tokens.items())}
        self._verdict_key = f"{self._keys[min(tokens)]}/lost"
        if self.rank == min(tokens):
            self._store.set(self._verdict_key, _NO_VERDICT)
        self._contact_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="peer-watch", daemon=True)
        self._thread.start()

    @property
    def runs(self) -> bool:
        """Whether the heartbeat thread is running; False after `close` and in forked processes."""
        return self._thread is not None and self._thread.is_alive()

    def close(self) -> None:
        """Tell the other ranks that this rank is exiting, and stop the thread."""
        if self._thread is not None and self.runs:
            self._leaving = True
            self._wake.set()
            self._thread.join(1.0)  # a hung store blocks only this daemon thread

    # -- for the training thread

    def refresh(self) -> bool:
        """Make the thread write and read heartbeats now; return whether it did so in time."""
        asked = time.monotonic()
        self.read_all()
        self._wake.set()
        with self._has_read:
            return self._has_read.wait_for(lambda: self._read_s > asked, 2 * HEARTBEAT_SECONDS)

    def read_all(self) -> None:
        """Make the heartbeat thread read all ranks' heartbeats for the next two seconds."""
        now = time.monotonic()
        if now - self._read_all_s > _READ_ALL_S:
            self._contact_s = now  # this process itself may have been stopped: restart the count
        self._read_all_s = now

    def silent(self, seconds: float, ignore_silent_machines: bool) -> dict[int, str]:
        """Return the ranks that have sent no heartbeat for `seconds`, each with an error text.

        With `ignore_silent_machines`, omit the ranks of a machine if all of them are silent,
        because the machine's network link may be down.
        """
        if self._store_is_leaving():
            return {}  # the store may exit at any moment, so this rank has stopped reading
        statuses = self.statuses
        # up to the last read, not up to now: this process itself may have been stopped
        silent_s = {r: self._read_s - at for r, at in self._changed.items() if not statuses[r].left}
        # the store hangs, so nothing is known about the ranks other than its host
        if time.monotonic() - self._contact_s > seconds:
            host = statuses.get(_STORE_RANK)
            if ignore_silent_machines and (host is None or host.host != self._host):
                return {}
            return {
                _STORE_RANK: f"is gone (the job's key-value store at {self._store_address()} is"
                " not responding: the process was killed or is hung)"
            }
        awake = {statuses[r].host for r, s in silent_s.items() if s < _READ_ALL_S} | {self._host}
        return {
            r: _silence_text(s)
            for r, s in silent_s.items()
            if s > seconds and not (ignore_silent_machines and statuses[r].host not in awake)
        }

    def without_store(self) -> dict[int, str]:
        """Return {0: error text} if the connection to the store on rank 0 broke, otherwise {}.

        If rank 0 has announced that it is exiting, a broken connection is not an error.
        """
        if not self.store_error or self._store_is_leaving():
            return {}
        return {
            _STORE_RANK: "is gone, or its machine is (the connection to the job's key-value store"
            f" at {self._store_address()} broke: {self.store_error})"
        }

    def announce(self, found: Verdict) -> None:
        """Make `found` the job's verdict unless there is one; `self.verdict` then is the job's.

        The caller raises that one.
        """
        if not isinstance(found, str):
            found = {r: found[r][:_REASON_CHARACTERS] for r in sorted(found)[:_MAX_NAMED]}
        self._announced = found
        if not self.verdict and self.runs:
            self.refresh()
        self._accept_verdict(found)

    def has_readers(self, lost: Mapping[int, str]) -> bool:
        """Return whether any rank is left to read which ranks this one has declared lost.

        These are the ranks that have not left and are not in `lost`.
        """
        return any(not s.left and r not in lost for r, s in self.statuses.items())

    # -- the thread

    def _run(self) -> None:
        try:
            while not self._leaving:
                self._read()
                if self._store_is_leaving():
                    self.read_all()
                    self._read()  # all ranks, one last time: the store may exit at any moment
                    self._check_guard(final=True)
                    return
                self._check_guard()
                self._wake.wait(HEARTBEAT_SECONDS)
                self._wake.clear()
                self._write()
            self._write()
        except (RuntimeError, ValueError, TypeError) as error:  # broken store or unreadable values
            self.store_error = str(error).partition("\n")[0][:_REASON_CHARACTERS]
            self._check_guard(final=True)
        finally:
            with self._has_read:
                self._has_read.notify_all()

    def _check_guard(self, final: bool = False) -> None:
        """Interrupt the training thread's collectives if they cannot succeed any more.

        `final` is whether the heartbeat thread is about to end.
        """
        guard = self.guard
        if guard is None or guard.fired or time.monotonic() - guard.start_s < SUSPECT_SECONDS:
            if not final or guard is None or guard.fired:
                return
            time.sleep(SUSPECT_SECONDS)
        self.read_all()
        left = any(self.statuses[rank].left for rank in guard.ranks if rank in self.statuses)
        if not (left or self.verdict or self.store_error) or self.guard is not guard:
            return
        # not at once: the collective may have succeeded, and the training thread be about to go on
        if guard.suspects or final:
            guard.fired = True
            guard.interrupt()
        guard.suspects = True

    def _write(self) -> None:
        """Store this rank's heartbeat and, if it has announced a verdict, that verdict."""
        self._beat += 1
        mine = Status(self._beat, self._host, self._leaving, self.launched, self.published())
        self._store.set(self._keys[self.rank], json.dumps(mine))
        if self._announced and not self.verdict:
            # the store keeps and returns the first of several verdicts
            text = json.dumps(self._announced)
            self._accept_json(self._store.compare_set(self._verdict_key, _NO_VERDICT, text))

    def _read(self) -> None:
        """Read the verdict, and the heartbeats of rank 0 or, after `read_all`, of all ranks."""
        started = time.monotonic()
        # read all ranks the first time, to learn their machines
        everyone = started - self._read_all_s < _READ_ALL_S or not self.statuses
        ranks = [r for r in self._keys if r != self.rank and (everyone or r == _STORE_RANK)]
        # Read the verdict last: a rank stores it before it exits, so a rank that reads about the
        # exit also reads the reason.
        *raw, verdict = self._store.multi_get([*map(self._keys.get, ranks), self._verdict_key])
        self._contact_s = time.monotonic()
        self._accept_json(verdict)
        found = {r: Status(*json.loads(text)) for r, text in zip(ranks, raw, strict=True)}
        before, self.statuses = self.statuses, {**self.statuses, **found}
        if everyone:
            # after a gap in reading, start counting silence from now
            looked = started - self._read_s < _READ_ALL_S
            self._changed = {
                rank: self._changed[rank]
                if looked and rank in self._changed and status.beat == before[rank].beat
                else started
                for rank, status in found.items()
            }
            with self._has_read:
                self._read_s = started
                self._has_read.notify_all()

    def _accept_json(self, raw: bytes) -> None:
        """Decode the store's verdict, and accept it as `_accept_verdict` does."""
        found = json.loads(raw)
        self._accept_verdict(
            found if isinstance(found, str) else {int(r): why for r, why in found.items()}
        )

    def _accept_verdict(self, found: Verdict) -> None:
        """Set `verdict`, unless there is one already or `found` is empty."""
        if found and not self.verdict:
            self.verdict_s, self.verdict = time.monotonic(), found

    def _store_is_leaving(self) -> bool:
        """Return whether rank 0, which hosts the store, has announced that it is leaving."""
        host = self.statuses.get(_STORE_RANK)
        return host is not None and host.left

    def _store_address(self) -> str:
        return f"{self._store.host}:{self._store.port}"


class PeerWatch:
    """Waits for exchanges on one channel, and names the lost ranks if an exchange fails.

    Without a `monitor` (for a single rank, or if liveness is off), an exchange's original error is
    raised unchanged.
    """

    def __init__(
        self,
        ranks: Sequence[int] = (0,),
        rank: int = 0,
        seconds: float = 0.0,
        monitor: PeerMonitor | None = None,
    ) -> None:
        self.rank, self.seconds, self.monitor = rank, seconds, monitor
        self._peers = [r for r in ranks if r != rank]
        self._gone_s = min(GONE_SECONDS, seconds / 2)  # so that the error precedes the timeout
        self._closed, self._index = False, 0
        if monitor is not None:
            self._index = len(monitor.launched)
            monitor.launched.append(0)

    # -- around exchanges

    @contextmanager
    def launching(self, tag: str) -> Iterator[None]:
        """Context manager for a launch: counts it; if it fails, the error names the lost ranks."""
        if self.monitor is not None:
            self.monitor.launched[self._index] += 1
        with self.naming_lost(tag):
            yield

    @contextmanager
    def naming_lost(
        self, tag: str, computing: bool = False, guard: Guard | None = None
    ) -> Iterator[None]:
        """Context manager that names the lost ranks if a collective in its block fails.

        Set `computing` if the block can also fail for other reasons, as a training step can. If no
        rank is lost, the block's error is then raised unchanged. With a `guard`, collectives that
        would hang fail instead.

        Raises:
            PeerLostError: the block raised a `RuntimeError`, or a rank was already lost.
            AgreedError: another rank announced an error that all ranks must raise (`agreed`).
        """
        self.check(tag)
        with self._explain_errors(tag, computing), self._guarded(guard):
            yield

    @contextmanager
    def _guarded(self, guard: Guard | None) -> Iterator[None]:
        """Context manager in which the heartbeat thread watches over `guard`.

        Raises:
            _StopWaitingError: the thread has interrupted the block's collectives.
        """
        monitor = self.monitor
        if guard is None or monitor is None:
            yield
            return
        if found := self._departed_ranks(r for r in guard.ranks if r in monitor.statuses):
            raise _StopWaitingError("a rank has left", found)
        before, monitor.guard = monitor.guard, guard
        cause = "the block was interrupted"
        try:
            yield
        except RuntimeError as error:
            if not guard.fired or isinstance(error, PeerLostError | AgreedError):
                raise
            cause = str(error)
        finally:
            monitor.guard = before
        if guard.fired:  # interrupted NCCL collectives raise no error
            found = self._departed_ranks(guard.ranks) or monitor.without_store()
            raise _StopWaitingError(cause, monitor.verdict or found)

    def wait(self, works: Sequence[dist.Work], tag: str) -> None:
        """Block until all `works`, the parts of one exchange, are done.

        Raises:
            PeerLostError: one of `works` failed, the timeout expired, or a rank is lost.
            AgreedError: another rank announced an error that all ranks must raise.
        """
        if self.monitor is None:
            for work in works:
                work.wait()
            return
        start = time.monotonic()
        with self._explain_errors(tag):
            while not all(map(has_ended, works)):
                self._check_wait(time.monotonic() - start)

    @property
    def ended(self) -> bool:
        """Whether the job has ended because of a lost rank or an error that all ranks raise."""
        return self.monitor is not None and bool(self.monitor.verdict)

    def close(self, owner: bool) -> None:
        """Interrupt waits in other threads; if `owner` is True, also close the monitor."""
        self._closed = True
        if owner and self.monitor is not None:
            self.monitor.close()

    # -- between exchanges: one short status per rank, and errors from other modules

    def publish(self, value: Callable[[], Any]) -> None:
        """Send `value()`, a short JSON value, to all ranks with each heartbeat from now on.

        The heartbeat thread calls `value`, so steps are not slowed down.
        """
        if self.monitor is not None:
            self.monitor.published = value

    def wait_for(
        self, why_waiting: Callable[[Mapping[int, Any]], Mapping[int, str]], tag: str
    ) -> None:
        """Block until `why_waiting` returns {} for the values that the other ranks have published.

        `why_waiting` takes the latest value of each other rank ("" if none). It returns the ranks
        that the caller must still wait for, each with the error text for a timeout. If liveness is
        off, return immediately.

        Raises:
            PeerLostError: the timeout expired, or a rank is lost.
            AgreedError: another rank announced an error that all ranks must raise.
        """
        monitor, start = self.monitor, time.monotonic()
        if monitor is None:
            return
        with self._explain_errors(tag):
            while True:
                if monitor.runs:
                    monitor.refresh()
                found = why_waiting(
                    {rank: status.published for rank, status in monitor.statuses.items()}
                )
                if not found:
                    return
                waited_s = time.monotonic() - start
                self._check_wait(waited_s, found)
                # short at first: equally fast ranks should not wait for a heartbeat
                time.sleep(min(0.01 + waited_s / 4, HEARTBEAT_SECONDS))

    def check(self, tag: str) -> None:
        """Raise an error if it is already known that the job has ended; do not communicate.

        Raises:
            PeerLostError: a rank was lost.
            AgreedError: a rank announced an error that all ranks must raise.
        """
        if self.monitor is not None and self.monitor.verdict:
            raise self._failure(tag, 0.0, "a rank was already lost earlier", self.monitor.verdict)

    def agreed(self, text: str) -> RuntimeError:
        """Report an error to all ranks, and return the exception that this rank must raise.

        All other ranks raise the same error within one heartbeat interval. If several ranks report
        errors, or a rank is lost, all ranks raise the error that was reported first.
        """
        return AgreedError(text) if self.monitor is None else self._failure("", 0.0, "", text)

    # -- the verdict

    @contextmanager
    def _explain_errors(self, tag: str, computing: bool = False) -> Iterator[None]:
        """Context manager that replaces a `RuntimeError` with one that names lost or slow ranks."""
        start, monitor = time.monotonic(), self.monitor
        try:
            yield
        except (PeerLostError, AgreedError):
            raise  # already explained
        except RuntimeError as error:
            if monitor is None or (self._closed and not monitor.verdict):
                raise  # this rank left while a thread was waiting: no other rank is to blame
            waited_s = time.monotonic() - start
            found = error.found if isinstance(error, _StopWaitingError) else self._find_lost()
            if computing and not found:
                raise
            found = found or self._blame_slow_ranks(tag, waited_s)
            # the message contains the first line of gloo's error, the rest of which adds nothing
            included = isinstance(error, _StopWaitingError) or "gloo" in str(error)
            raise self._failure(tag, waited_s, str(error), found) from None if included else error

    def _check_wait(self, waited_s: float, behind: Mapping[int, str] | None = None) -> None:
        """Raise `_StopWaitingError` on a timeout, a lost rank, a verdict, or a closed channel.

        `behind` contains the ranks that this rank is waiting for, each with an error text. If it is
        None, this rank is waiting for the ranks that have launched fewer exchanges.
        """
        monitor = self.monitor
        assert monitor is not None
        if monitor.verdict:
            raise _StopWaitingError("another rank reported the failure", monitor.verdict)
        if self._closed:
            raise _StopWaitingError("the channel was closed on this rank")
        if waited_s >= self.seconds:
            raise _StopWaitingError("timed out", monitor.silent(self._gone_s, False) or behind)
        if waited_s >= min(SUSPECT_SECONDS, self.seconds / 4):
            monitor.read_all()
            left = self._departed_ranks(self._behind() if behind is None else behind)
            if found := left or monitor.without_store():
                raise _StopWaitingError("a rank has left", found)
            if found := monitor.silent(HUNG_SECONDS, True):
                raise _StopWaitingError("a rank stopped responding", found)

    def _find_lost(self) -> Verdict:
        """Read heartbeats and return the ranks that broke an exchange; {} if no rank is lost.

        If another rank has already stored a verdict, return that verdict.
        """
        monitor, start = self.monitor, time.monotonic()
        assert monitor is not None
        baseline: dict[int, int] = {}  # beats right after the failure; a later beat means alive
        while not monitor.verdict and monitor.runs:
            if monitor.refresh():
                statuses = {r: s for r, s in monitor.statuses.items() if not s.left}
                if found := self._departed_ranks(self._behind()):
                    return found
                baseline = baseline or {rank: status.beat for rank, status in statuses.items()}
                quiet = [r for r, status in statuses.items() if status.beat == baseline.get(r)]
                if not quiet:
                    break
                if time.monotonic() - start > self._gone_s:
                    return dict.fromkeys(quiet, _silence_text(self._gone_s))
            elif time.monotonic() - start > self._gone_s:  # the store hangs
                return monitor.silent(self._gone_s / 2, False)
            time.sleep(0.1)
        # All ranks are alive or have left. Include ranks that launched this exchange: one of them
        # may have left before all of its bytes were sent.
        return (
            monitor.verdict
            or monitor.without_store()
            or self._departed_ranks(self._behind(include_equal=True))
        )

    def _behind(self, include_equal: bool = False) -> dict[int, int]:
        """Return how many exchanges each rank that is behind this one has launched on this channel.

        With `include_equal`, also include ranks that have launched as many as this rank.
        """
        assert self.monitor is not None
        mine, index = self.monitor.launched[self._index] + include_equal, self._index
        found = {r: s.launched for r, s in self.monitor.statuses.items() if r in self._peers}
        # a rank that is still opening this channel does not list it yet
        launched = {r: n[index] if index < len(n) else 0 for r, n in found.items()}
        return {r: n for r, n in launched.items() if n < mine}

    def _departed_ranks(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return which of `ranks` have closed their channels, each with an error text."""
        assert self.monitor is not None
        reason = "is gone (it ended its fit earlier; its log says why)"
        return {rank: reason for rank in ranks if self.monitor.statuses[rank].left}

    def _blame_slow_ranks(self, tag: str, waited_s: float) -> dict[int, str]:
        """Return the ranks to blame for an exchange, each with an error text, if none is lost.

        They are the ranks that have launched fewer exchanges than this rank or, if there are none,
        this rank.
        """
        assert self.monitor is not None
        if behind := self._behind():
            mine = self.monitor.launched[self._index]
            return {
                rank: f"is alive, but has launched {n} exchanges, while rank {self.rank} has"
                f" launched {mine}: it is slow or hung; if it is only slow, increase `timeout`"
                for rank, n in behind.items()
            }
        return {
            self.rank: f"gave up on '{tag}' after {waited_s:.1f} s although all ranks are alive and"
            " at the same exchange; check the network (`timeout` must be more than twice as long as"
            " an outage)"
        }

    def _failure(self, tag: str, waited_s: float, cause: str, found: Verdict) -> RuntimeError:
        """Announce the verdict `found`, and return the exception for the job's first verdict."""
        monitor = self.monitor
        assert monitor is not None
        monitor.announce(found)
        verdict = monitor.verdict
        lost = {} if isinstance(verdict, str) else verdict
        if self.rank == _STORE_RANK and monitor.has_readers(lost):
            # the store exits with this process: give other ranks two heartbeats to read the verdict
            spent_s = time.monotonic() - monitor.verdict_s
            time.sleep(max(0.0, 2 * HEARTBEAT_SECONDS - spent_s))
        if isinstance(verdict, str):
            return AgreedError(verdict)
        first_line = _SOURCE_LINE.sub("", cause.strip().partition("\n")[0])
        first_line = first_line.partition(_GLOO_ADVICE)[0][:_REASON_CHARACTERS]
        named = "; ".join(f"rank {rank} {reason}" for rank, reason in sorted(lost.items()))
        monitor.failure = monitor.failure or (
            f"The exchange '{tag}' failed on rank {self.rank} after {waited_s:.1f} s"
            f" ({first_line}): {named}. {ADVICE}"
        )
        return PeerLostError(monitor.failure, lost)


class _StopWaitingError(RuntimeError):
    """Raised to stop waiting, at a timeout and a close too; `found`: the lost ranks, or {}."""

    def __init__(self, message: str, found: Verdict | None = None) -> None:
        super().__init__(message)
        self.found: Verdict = found or {}


def job_store() -> Any:
    """Return a new client of the job's TCPStore, or None if the job uses another kind of store.

    The client is separate from torch's own, because a call to a hung store blocks the client that
    makes it.
    """
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):  # type: ignore[attr-defined]
        return None
    client = dist.TCPStore(  # type: ignore[attr-defined]
        store.host,
        store.port,
        is_master=False,
        wait_for_workers=False,
        timeout=_CONNECT_TIMEOUT,
        # some builds of torch, such as Debian's, lack libuv
        use_libuv=store.libuvBackend,  # type: ignore[attr-defined]
    )
    # no timeout: a call that timed out during an outage would leave half a reply in the connection
    client.set_timeout(timedelta(days=30))
    return client


def _silence_text(seconds: float) -> str:
    return f"is gone (no heartbeat for {seconds:.0f} s: it was killed or is hung)"


def _store_key(token: int) -> str:
    return f"commfree/{token:x}"


def has_ended(work: dist.Work) -> bool:
    """Wait briefly, then return whether `work` has completed; raise its error if it failed."""
    try:
        work.wait(_SLICE)
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait(_SLICE)  # it may have succeeded just after the slice
    return True
