"""Who is gone? A second line between the ranks of a channel, used when an exchange fails.

A collective that fails does not say on whose account. Some ranks hear "connection closed by peer"
at once, others wait, and whoever hears it first leaves and is then blamed by the rest. So:

1. Rank 1 is killed. The exchange fails on rank 0, which talks to it; ranks 2 and 3 still wait.
2. Rank 0 asks everybody. Rank 1 refuses, ranks 2 and 3 answer. Rank 0 tells them that rank 1 is
   gone, and only then raises.
3. Ranks 2 and 3 were told, so they raise at once and name rank 1, though rank 0 has left as well.

A rank that hangs still accepts connections (its kernel does), therefore an *answer* is asked for.
Every rank listens on the interface that gloo uses, on a port that the kernel chooses, as gloo does:
what lets gloo through lets this through. One connection carries one question and one answer, each a
line of JSON:

======== ================= =====================================================================
question `key`             of the rank that is asked; whoever has no such key does not answer
\        `lost` (optional) reason by rank: what the asking rank has found out
answer   `launched`        exchanges that the rank has launched on this channel
======== ================= =====================================================================

Nothing travels here while training goes well.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import socketserver
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

TAG = "peers"
ANSWER_SECONDS = 5.0  # a rank that computes answers in milliseconds, on a machine that swaps later
_SLICE = timedelta(seconds=0.1)  # how soon a waiting rank notices what it was told
_CARD_BYTES = 64  # host (an IPv6 address has 39 characters), port and key
_LINE_BYTES = 16_384
_NAMED = 50  # lost ranks in a message, so that it fits into a line
_REASON_CHARACTERS = 250
_SIOCGIFADDR = {"linux": 0x8915, "darwin": 0xC0206921}  # asks the kernel for an interface's IPv4


class Work(Protocol):
    """A collective in flight; `torch.distributed.Work` is one."""

    def is_completed(self) -> bool:
        """Return whether it has ended, well or not."""

    def wait(self, timeout: timedelta) -> Any:
        """Block until it has ended, at most `timeout`.

        Raises:
            RuntimeError: it failed, or the time is over.
        """


class _Card(NamedTuple):
    host: str
    port: int
    key: str


class _Answers(NamedTuple):
    launched: dict[int, int]  # by rank, of those that answer
    lost: dict[int, str]  # reason by rank, of those that do not


class PeerWatch:
    """Answers for this rank, asks the others, and names the ranks that a failure is due to.

    It starts a daemon thread: make it in the process that trains, and `close` it there.

    Args:
        rank: global rank of this process.
        timeout: how long `wait` waits. In its last seconds (`ANSWER_SECONDS`, at most half of it)
            the peers are asked, so that the error comes within it.
    """

    def __init__(self, rank: int, timeout: timedelta) -> None:
        self._rank = rank
        self._timeout = timeout.total_seconds()
        self._patience = min(ANSWER_SECONDS, self._timeout / 2)
        self._launched = 0
        self._peers: dict[int, _Card | None] = {}
        self._lost: dict[int, str] = {}  # the first finding, ours or a peer's; never replaced
        self._lock = threading.Lock()
        self._key = secrets.token_hex(4)
        self._listener = _listen(self._answer)
        self._thread = threading.Thread(target=self._serve, name="peer-watch", daemon=True)
        self._thread.start()

    @property
    def card(self) -> bytes:
        """Where this rank answers: `_CARD_BYTES` bytes, the same number on every rank."""
        if self._listener is None:
            return bytes(_CARD_BYTES)
        host, port = self._listener.server_address[:2]
        return f"{host!s} {port} {self._key}".encode().ljust(_CARD_BYTES, b"\0")

    def meet(self, cards: Mapping[int, bytes]) -> None:
        """Learn the cards of all ranks of the channel, by global rank."""
        self._peers = {r: _read_card(card) for r, card in cards.items() if r != self._rank}

    @contextmanager
    def launching(self, tag: str) -> Iterator[None]:
        """Count an exchange that the body launches; name the lost ranks if that fails.

        Raises:
            RuntimeError: the launch failed, or a peer has told that the group is broken.
        """
        self._launched += 1
        start = time.monotonic()
        if self._lost:
            raise self._failure(tag, 0.0, "a rank had been lost before")
        try:
            yield
        except RuntimeError as error:
            raise self._failure(tag, time.monotonic() - start, str(error)) from error

    def wait(self, work: Work, tag: str) -> None:
        """Block until `work` is done.

        Raises:
            RuntimeError: it failed, the timeout ran out, or a peer told that a rank is lost. The
                message names the ranks.
        """
        start = time.monotonic()
        answers = None
        try:
            while not _done(work):
                waited = time.monotonic() - start
                if self._lost:
                    raise RuntimeError("another rank found out")
                if answers is None and waited >= self._timeout - self._patience:
                    answers = self._ask({})
                elif waited >= self._timeout:
                    raise RuntimeError("timed out")
        except RuntimeError as error:
            waited = time.monotonic() - start
            raise self._failure(tag, waited, str(error), answers) from error

    def close(self) -> None:
        """Stop answering."""
        if self._listener is not None:
            if self._thread.is_alive():  # not so in a process that was forked off later
                self._listener.shutdown()
            self._listener.server_close()

    # -- asking

    def _failure(
        self, tag: str, waited: float, cause: str, answers: _Answers | None = None
    ) -> RuntimeError:
        if not self._lost:
            answers = answers or self._ask({})
            self._learn(self._blame(answers, tag, waited))
            # all have the news before this rank can leave; who knows better keeps what it knows
            self._ask(self._lost, skip=set(answers.lost))
        found = "; ".join(f"rank {rank} {reason}" for rank, reason in sorted(self._lost.items()))
        return RuntimeError(
            f"The exchange '{tag}' failed on rank {self._rank} after {waited:.1f} s"
            f" ({_first_line(cause)}): {found}. Restart all ranks from the last checkpoint."
        )

    def _blame(self, answers: _Answers, tag: str, waited: float) -> dict[int, str]:
        if answers.lost:
            return answers.lost
        behind = {rank: n for rank, n in answers.launched.items() if n < self._launched}
        if behind:
            return {
                rank: f"answers, but has launched {n} exchanges where rank {self._rank} has"
                f" launched {self._launched}: it is slow or hangs; if it was only slow, make"
                " `timeout` longer"
                for rank, n in behind.items()
            }
        return {
            self._rank: f"gave up on the exchange '{tag}' after {waited:.1f} s, although all other"
            " ranks that could be asked answer and are as far as it is; look at the network"
        }

    def _ask(self, lost: Mapping[int, str], skip: set[int] | None = None) -> _Answers:
        """Ask all peers at the same time, and tell them who is `lost`, if anybody is."""
        cards = {r: c for r, c in self._peers.items() if c is not None and r not in (skip or ())}
        answers = _Answers({}, {})
        if not cards:
            return answers
        with ThreadPoolExecutor(max_workers=min(len(cards), 64)) as callers:
            calls = {
                r: callers.submit(_call, card, lost, self._patience) for r, card in cards.items()
            }
        for rank, call in calls.items():
            answer = call.result()
            if isinstance(answer, str):
                answers.lost[rank] = answer
            else:
                answers.launched[rank] = answer
        return answers

    # -- answering, in the listener's threads

    def _serve(self) -> None:
        if self._listener is not None:
            self._listener.serve_forever(poll_interval=_SLICE.total_seconds())

    def _answer(self, line: bytes) -> bytes:
        try:
            question = json.loads(line)
        except (ValueError, RecursionError):
            return b""
        if not isinstance(question, dict) or question.get("key") != self._key:
            return b""
        told = question.get("lost")
        if isinstance(told, dict):
            known = {str(rank): rank for rank in (self._rank, *self._peers)}
            self._learn({known[r]: str(reason) for r, reason in told.items() if r in known})
        return json.dumps({"launched": self._launched}).encode() + b"\n"

    def _learn(self, lost: Mapping[int, str]) -> None:
        with self._lock:
            if not self._lost:
                self._lost = {r: lost[r][:_REASON_CHARACTERS] for r in sorted(lost)[:_NAMED]}


class _Listener(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64  # all peers may ask at the same moment

    def __init__(self, host: str, answer: Callable[[bytes], bytes]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.answer = answer
        super().__init__((host, 0), _Handler)


class _Handler(socketserver.StreamRequestHandler):
    timeout = ANSWER_SECONDS  # of somebody who connects and says nothing

    def handle(self) -> None:
        assert isinstance(self.server, _Listener), "made by `_listen`"
        with suppress(OSError):  # the other side may hang up at any moment
            self.wfile.write(self.server.answer(self.rfile.readline(_LINE_BYTES)))


def _listen(answer: Callable[[bytes], bytes]) -> _Listener | None:
    """Listen where gloo listens; None where this host has no address that can be used.

    Without an address the peers cannot ask this rank, and do not count it among the lost.
    """
    for host in _hosts():
        with suppress(OSError):
            return _Listener(host, answer)
    return None


def _hosts() -> Iterator[str]:
    """Yield the addresses that gloo would try: the named interfaces', else the host name's."""
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME")
    if interfaces:
        for name in interfaces.split(","):
            with suppress(OSError):
                yield _interface_address(name)
        return
    with suppress(OSError):
        for *_, address in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            yield str(address[0])
    yield "127.0.0.1"


def _interface_address(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        request = struct.pack("256s", name.encode()[:15])
        answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR.get(sys.platform, 0), request)
    return socket.inet_ntoa(answer[20:24])  # a sockaddr_in behind 16 bytes of name


def _read_card(card: bytes) -> _Card | None:
    text = card.rstrip(b"\0").decode()
    if not text:
        return None
    host, port, key = text.split(" ")
    return _Card(host, int(port), key)


def _call(card: _Card, lost: Mapping[int, str], seconds: float) -> int | str:
    """Return how many exchanges the rank has launched, or why it counts as lost."""
    question = json.dumps({"key": card.key, **({"lost": lost} if lost else {})})
    try:
        with socket.create_connection((card.host, card.port), timeout=seconds) as connection:
            connection.sendall(question.encode() + b"\n")
            with connection.makefile("rb") as reader:
                return int(json.loads(reader.readline(_LINE_BYTES))["launched"])
    except (ConnectionRefusedError, ConnectionResetError, BrokenPipeError):
        return "is gone (its process has ended or has closed the channel)"
    except TimeoutError:
        return f"does not answer (asked for {seconds:.1f} s): it hangs, or its machine is gone"
    except OSError as error:
        return f"cannot be reached ({error})"
    except (ValueError, KeyError, TypeError, RecursionError):
        return "is gone (another program answers at its address, or nobody)"


def _done(work: Work) -> bool:
    """Wait for a slice of time; return whether `work` has ended, raise what it failed with."""
    try:
        work.wait(_SLICE)
    except RuntimeError:
        if work.is_completed():
            raise
        return False
    return True


def _first_line(text: str) -> str:
    return text.strip().split("\n")[0][:_REASON_CHARACTERS]
