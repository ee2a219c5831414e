"""A port that answers questions: one connection, one line of JSON there, one back.

It listens on the interface that gloo uses, on a port that the kernel chooses, as gloo does: what
lets gloo through lets this through. Whoever asks names the *key* of whom they mean, so that nobody
answers for a port's former owner.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from lightning_commfree.comm.interface import VARIABLE, host_addresses, interface_address

ANSWER_SECONDS = 5.0  # a rank that computes answers in milliseconds, on a machine that swaps later
ADDRESS_BYTES = 64  # host (an IPv6 one has 39 characters), port and key
_POLL_S = 0.1
_LINE_BYTES = 16_384
_MOST = 256  # connections at a time; a peer that asks has done so a moment after it connects
_QUEUE = 1024  # connections that the kernel keeps: all peers may come at the same moment


class PeerAddress(NamedTuple):
    """Where somebody answers."""

    host: str
    port: int
    key: str

    def encode(self) -> bytes:
        """Return `ADDRESS_BYTES` bytes."""
        return f"{self.host} {self.port} {self.key}".encode().ljust(ADDRESS_BYTES, b"\0")

    @staticmethod
    def decode(address: bytes) -> PeerAddress | None:
        """Take apart what `encode` made; None for zeros: a rank has none."""
        text = address.rstrip(b"\0").decode()
        if not text:
            return None
        host, port, key = text.split(" ")
        return PeerAddress(host, int(port), key)


class Silence(NamedTuple):
    """Why there is no answer."""

    gone: bool  # there will never be one
    reason: str


class Answers(NamedTuple):
    """What several ranks have answered."""

    launched: dict[int, int]  # by rank, of those that answer
    told: dict[int, dict[str, Any]]  # whole answers of these
    gone: dict[int, str]  # reason by rank, of those that will never answer
    silent: dict[int, str]  # reason by rank, of those that did not answer now

    @property
    def lost(self) -> dict[int, str]:
        """The gone ones; where there are none, the silent ones."""
        return self.gone or self.silent


class Listener:
    """Answers in a daemon thread of its own, from here to `close`.

    Strangers may connect as well. One thread serves all, of at most `_MOST` connections at a time:
    of more the oldest goes, which had its time to ask. Nobody is listened to for longer than
    `ANSWER_SECONDS` or `_LINE_BYTES`.

    Args:
        answer: from a question to its answer, at once; it runs in the other thread, and only for
            questions that name this listener's key. What is no question is left without an answer.

    Attributes:
        address: where it answers; None where this host has no address that gloo could use.
    """

    def __init__(self, answer: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> None:
        self._answer = answer
        self._socket = _listen()
        self._thread: threading.Thread | None = None
        self._closing = False
        self.address: PeerAddress | None = None
        if self._socket is not None:
            host, port = self._socket.getsockname()[:2]
            self.address = PeerAddress(str(host), int(port), secrets.token_hex(4))
            self._thread = threading.Thread(
                target=self._serve, args=(self._socket,), name="peer-watch", daemon=True
            )
            self._thread.start()

    @property
    def runs(self) -> bool:
        """Whether it answers: not after `close`, nor in a process that was forked off later."""
        return self._thread is not None and self._thread.is_alive()

    def close(self) -> None:
        """Stop answering."""
        if self._socket is None:
            return
        if self._thread is not None and self.runs:
            self._closing = True
            self._thread.join(1.0)  # it looks up every `_POLL_S`
            with suppress(OSError):  # for processes that were forked off and hold it open
                self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _serve(self, listener: socket.socket) -> None:
        callers: dict[socket.socket, _Caller] = {}  # the longest there in front
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            while not self._closing:
                ready = {key.fileobj for key, _ in selector.select(_POLL_S)}
                for connection, caller in list(callers.items()):
                    if connection in ready:
                        caller.listen(connection)
                    if caller.has_spoken:
                        self._speak(connection, caller.said.partition(b"\n")[0])
                    if caller.has_spoken or time.monotonic() > caller.until:
                        _hang_up(callers, connection, selector)
                if listener in ready:
                    with suppress(OSError):  # who has hung up already
                        connection, _ = listener.accept()
                        connection.setblocking(False)
                        selector.register(connection, selectors.EVENT_READ)
                        callers[connection] = _Caller(time.monotonic() + ANSWER_SECONDS)
                if len(callers) > _MOST:
                    _hang_up(callers, next(iter(callers)), selector)
            for connection in callers:
                connection.close()

    def _speak(self, connection: socket.socket, line: bytes) -> None:
        with suppress(OSError):  # the other side may hang up at any moment
            connection.send(self._reply(line))  # it is short, and nothing was sent before

    def _reply(self, line: bytes) -> bytes:
        try:
            question = json.loads(line)
        except (ValueError, RecursionError):
            return b""
        if self.address is None or not isinstance(question, dict):
            return b""
        if question.get("key") != self.address.key:
            return b""
        return json.dumps(self._answer(question)).encode() + b"\n"


class _Caller:
    """Somebody who has connected.

    Attributes:
        until: on the clock of `time.monotonic`, how long to listen.
        said: so far.
        has_spoken: the line is complete, or nothing more will come of it.
    """

    def __init__(self, until: float) -> None:
        self.until = until
        self.said = b""
        self.has_spoken = False

    def listen(self, connection: socket.socket) -> None:
        """Take what has come."""
        try:
            piece = connection.recv(_LINE_BYTES - len(self.said))
        except BlockingIOError:  # there was nothing after all
            return
        except OSError:
            piece = b""
        self.said += piece
        self.has_spoken = not piece or b"\n" in piece or len(self.said) >= _LINE_BYTES


def _hang_up(
    callers: dict[socket.socket, _Caller],
    connection: socket.socket,
    selector: selectors.BaseSelector,
) -> None:
    selector.unregister(connection)
    connection.close()
    del callers[connection]


def ask(
    address: PeerAddress, question: Mapping[str, Any], seconds: float
) -> dict[str, Any] | Silence:
    """Return the answer to `question`; connecting and answering may take `seconds` each."""
    line = json.dumps({"key": address.key, **question})
    try:
        with socket.create_connection((address.host, address.port), timeout=seconds) as connection:
            connection.sendall(line.encode() + b"\n")
            return dict(json.loads(_line_from(connection, time.monotonic() + seconds)))
    except (ConnectionRefusedError, ConnectionResetError, BrokenPipeError):
        return Silence(True, "is gone (its process has ended or has closed the channel)")
    except TimeoutError:
        reason = f"does not answer (asked for {seconds:.1f} s): it hangs, or its machine is gone"
        return Silence(False, reason)
    except OSError as error:
        return Silence(False, f"cannot be reached ({error})")
    except (ValueError, TypeError, RecursionError):
        return Silence(True, "is gone (another program answers at its address, or nobody)")


def _line_from(connection: socket.socket, until: float) -> bytes:
    """Read to the end of a line, of `_LINE_BYTES` or of the connection.

    Raises:
        TimeoutError: it did not come in time, however it was dealt out.
    """
    said = b""
    while not said.endswith(b"\n") and len(said) < _LINE_BYTES:
        left_s = until - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        connection.settimeout(left_s)
        piece = connection.recv(_LINE_BYTES - len(said))
        if not piece:
            break
        said += piece
    return said


def _listen() -> socket.socket | None:
    """Listen where gloo listens; None where this host has no address that can be used.

    Without an address the peers cannot ask this rank, and do not count it among the lost.
    """
    for host in _hosts():
        with suppress(OSError):
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return socket.create_server((host, 0), family=family, backlog=_QUEUE)
    return None


def _hosts() -> Iterator[str]:
    """Yield the addresses that gloo would try: the named interfaces', else the host name's."""
    interfaces = os.environ.get(VARIABLE)
    if interfaces:
        yield from filter(None, map(interface_address, interfaces.split(",")))
        return
    yield from host_addresses()
    yield "127.0.0.1"
