"""A port that answers questions: one connection, one line of JSON there, one back.

It listens on the interface that gloo uses, on a port that the kernel chooses, as gloo does: what
lets gloo through lets this through.
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
from typing import Any

from lightning_commfree.comm.liveness.questions import LINE_BYTES, PeerAddress
from lightning_commfree.comm.sockets import VARIABLE, host_addresses, interface_address

ANSWER_SECONDS = 5.0  # a rank that computes answers in milliseconds, on a machine that swaps later
_POLL_S = 0.1
_MOST = 256  # connections at a time; a peer that asks has done so a moment after it connects
_QUEUE = 1024  # connections that the kernel keeps: all peers may come at the same moment


class Listener:
    """Answers in a daemon thread of its own, from here to `close`.

    Strangers may connect as well. One thread serves all, of at most `_MOST` connections at a time:
    of more the oldest goes, which had its time to ask. Nobody is listened to for longer than
    `ANSWER_SECONDS` or `LINE_BYTES`.

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
        clients: dict[socket.socket, _Client] = {}  # the longest there in front
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            while not self._closing:
                ready = {key.fileobj for key, _ in selector.select(_POLL_S)}
                for connection, client in clients.items():
                    if connection in ready:
                        client.read()
                if listener in ready:
                    with suppress(OSError):  # who has hung up already
                        connection, _ = listener.accept()
                        selector.register(connection, selectors.EVENT_READ)
                        clients[connection] = _Client(connection)
                self._hang_up(clients, selector)
            for connection in clients:
                connection.close()

    def _hang_up(
        self, clients: dict[socket.socket, _Client], selector: selectors.BaseSelector
    ) -> None:
        """Answer who has asked; hang up on these, who took too long, and the oldest of too many."""
        too_many = len(clients) - _MOST
        for i, (connection, client) in enumerate(list(clients.items())):
            if client.has_asked:
                with suppress(OSError):  # the other side may hang up at any moment
                    # it is short, and nothing was sent before
                    connection.send(self._reply(client.line.partition(b"\n")[0]))
            if client.has_asked or i < too_many or time.monotonic() > client.until:
                selector.unregister(connection)
                connection.close()
                del clients[connection]

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


class _Client:
    """Somebody who has connected.

    Attributes:
        until: on the clock of `time.monotonic`, how long to listen.
        line: what has come so far.
        has_asked: the line is complete, or nothing more will come of it.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self.until = time.monotonic() + ANSWER_SECONDS
        self.line = b""
        self.has_asked = False

    def read(self) -> None:
        """Take what has come."""
        try:
            piece = self._connection.recv(LINE_BYTES - len(self.line))
        except BlockingIOError:  # there was nothing after all
            return
        except OSError:
            piece = b""
        self.line += piece
        self.has_asked = not piece or b"\n" in piece or len(self.line) >= LINE_BYTES


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
