"""Asking a rank, or all of them at the same time: one line of JSON there, one back."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

ADDRESS_BYTES = 64  # host (an IPv6 one has 39 characters), port and key
"""The bytes of an address, as ranks exchange it by the channel."""
LINE_BYTES = 16_384
_MOST_THREADS = 64


class PeerAddress(NamedTuple):
    """Where a rank answers."""

    host: str
    port: int
    key: str  # of the listener: nobody answers for a port's former owner

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


class NoAnswer(NamedTuple):
    """Why there is no answer."""

    gone: bool  # there will never be one
    reason: str


class Answers(NamedTuple):
    """What several ranks have answered."""

    launched: dict[int, int]  # by rank, of those that answer
    told: dict[int, dict[str, Any]]  # what else these say
    gone: dict[int, str]  # reason by rank, of those that will never answer
    silent: dict[int, str]  # reason by rank, of those that did not answer now

    @property
    def lost(self) -> dict[int, str]:
        """The gone ones; where there are none, the silent ones."""
        return self.gone or self.silent


def ask_all(
    addresses: Mapping[int, PeerAddress], question: Mapping[str, Any], seconds: float
) -> Answers:
    """Ask ranks at the same time; connecting and answering may take `seconds` each."""
    answers = Answers({}, {}, {}, {})
    if not addresses:
        return answers

    with ThreadPoolExecutor(min(len(addresses), _MOST_THREADS)) as threads:
        asked = {
            rank: threads.submit(ask, address, question, seconds)
            for rank, address in addresses.items()
        }
    for rank, asking in asked.items():
        match asking.result():
            case {"launched": int(launched), **told}:
                answers.launched[rank] = launched
                answers.told[rank] = {str(name): said for name, said in told.items()}
            case NoAnswer(gone=False, reason=reason):
                answers.silent[rank] = reason
            case NoAnswer(reason=reason):
                answers.gone[rank] = reason
            case _:
                answers.gone[rank] = "is gone (another program answers at its address)"
    return answers


def ask(
    address: PeerAddress, question: Mapping[str, Any], seconds: float
) -> dict[str, Any] | NoAnswer:
    """Return the answer to `question`; connecting and answering may take `seconds` each."""
    line = json.dumps({"key": address.key, **question})
    try:
        with socket.create_connection((address.host, address.port), timeout=seconds) as connection:
            connection.sendall(line.encode() + b"\n")
            return dict(json.loads(_line_from(connection, time.monotonic() + seconds)))
    except (ConnectionRefusedError, ConnectionResetError, BrokenPipeError):
        return NoAnswer(True, "is gone (its process has ended or has closed the channel)")
    except TimeoutError:
        reason = f"does not answer (asked for {seconds:.1f} s): it hangs, or its machine is gone"
        return NoAnswer(False, reason)
    except OSError as error:
        return NoAnswer(False, f"cannot be reached ({error})")
    except (ValueError, TypeError, RecursionError):
        return NoAnswer(True, "is gone (another program answers at its address, or nobody)")


def _line_from(connection: socket.socket, until: float) -> bytes:
    """Read to the end of a line, of `LINE_BYTES` or of the connection.

    Raises:
        TimeoutError: it did not come in time, however it was dealt out.
    """
    line = b""
    while not line.endswith(b"\n") and len(line) < LINE_BYTES:
        left_s = until - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        connection.settimeout(left_s)
        piece = connection.recv(LINE_BYTES - len(line))
        if not piece:
            break
        line += piece
    return line
