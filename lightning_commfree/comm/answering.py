"""A port that answers questions: one connection, one line of JSON there, one back.

It listens on the interface that gloo uses, on a port that the kernel chooses, as gloo does: what
lets gloo through lets this through. Whoever asks names the *key* of whom they mean, so that nobody
answers for a port's former owner.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from lightning_commfree.comm.interface import VARIABLE, host_addresses, interface_address

ANSWER_SECONDS = 5.0  # a rank that computes answers in milliseconds, on a machine that swaps later
CARD_BYTES = 64  # host (an IPv6 address has 39 characters), port and key
_POLL_S = 0.1
_LINE_BYTES = 16_384


class Card(NamedTuple):
    """Where somebody answers."""

    host: str
    port: int
    key: str

    def encode(self) -> bytes:
        """Return `CARD_BYTES` bytes."""
        return f"{self.host} {self.port} {self.key}".encode().ljust(CARD_BYTES, b"\0")

    @staticmethod
    def decode(card: bytes) -> Card | None:
        """Take apart what `encode` made; None for zeros, the card of a rank without an address."""
        text = card.rstrip(b"\0").decode()
        if not text:
            return None
        host, port, key = text.split(" ")
        return Card(host, int(port), key)


class Silence(NamedTuple):
    """Why there is no answer."""

    gone: bool  # there will never be one
    reason: str


class Listener:
    """Answers in daemon threads of its own, from here to `close`.

    Args:
        answer: from a question to its answer; it runs in another thread, and only for questions
            that name this listener's key. What is no question is left without an answer.

    Attributes:
        card: where it answers; None where this host has no address that gloo could use.
    """

    def __init__(self, answer: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> None:
        self._answer = answer
        self._server = _listen(self._reply)
        self._thread: threading.Thread | None = None
        self.card: Card | None = None
        if self._server is not None:
            host, port = self._server.server_address[:2]
            self.card = Card(str(host), int(port), secrets.token_hex(4))
            self._thread = threading.Thread(
                target=self._server.serve_forever, args=(_POLL_S,), name="peer-watch", daemon=True
            )
            self._thread.start()

    @property
    def runs(self) -> bool:
        """Whether it answers: not after `close`, nor in a process that was forked off later."""
        return self._thread is not None and self._thread.is_alive()

    def close(self) -> None:
        """Stop answering."""
        if self._server is None:
            return
        if self._thread is not None and self.runs:
            self._server.shutdown()
            self._thread.join(1.0)  # it has left the loop, and may not have ended yet
            with suppress(OSError):  # for processes that were forked off and hold it open
                self._server.socket.shutdown(socket.SHUT_RDWR)
        self._server.server_close()

    def _reply(self, line: bytes) -> bytes:
        try:
            question = json.loads(line)
        except (ValueError, RecursionError):
            return b""
        if self.card is None or not isinstance(question, dict):
            return b""
        if question.get("key") != self.card.key:
            return b""
        return json.dumps(self._answer(question)).encode() + b"\n"


def ask(card: Card, question: Mapping[str, Any], seconds: float) -> dict[str, Any] | Silence:
    """Return the answer to `question`; connecting and answering may take `seconds` each."""
    line = json.dumps({"key": card.key, **question})
    try:
        with socket.create_connection((card.host, card.port), timeout=seconds) as connection:
            connection.sendall(line.encode() + b"\n")
            with connection.makefile("rb") as reader:
                return dict(json.loads(reader.readline(_LINE_BYTES)))
    except (ConnectionRefusedError, ConnectionResetError, BrokenPipeError):
        return Silence(True, "is gone (its process has ended or has closed the channel)")
    except TimeoutError:
        reason = f"does not answer (asked for {seconds:.1f} s): it hangs, or its machine is gone"
        return Silence(False, reason)
    except OSError as error:
        return Silence(False, f"cannot be reached ({error})")
    except (ValueError, TypeError, RecursionError):
        return Silence(True, "is gone (another program answers at its address, or nobody)")


class _Server(socketserver.ThreadingTCPServer):
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
        assert isinstance(self.server, _Server), "made by `_listen`"
        with suppress(OSError):  # the other side may hang up at any moment
            self.wfile.write(self.server.answer(self.rfile.readline(_LINE_BYTES)))


def _listen(answer: Callable[[bytes], bytes]) -> _Server | None:
    """Listen where gloo listens; None where this host has no address that can be used.

    Without an address the peers cannot ask this rank, and do not count it among the lost.
    """
    for host in _hosts():
        with suppress(OSError):
            return _Server(host, answer)
    return None


def _hosts() -> Iterator[str]:
    """Yield the addresses that gloo would try: the named interfaces', else the host name's."""
    interfaces = os.environ.get(VARIABLE)
    if interfaces:
        yield from filter(None, map(interface_address, interfaces.split(",")))
        return
    yield from host_addresses()
    yield "127.0.0.1"
