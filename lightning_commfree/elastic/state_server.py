"""Send state to a joining replica over HTTP: a small server and its client.

A joining replica needs a *snapshot* of the state that all members share, and the *messages* of the
exchanges that the members have completed since the snapshot. It fetches both from one member, the
*donor*, which continues to train.

=========================== =====================================================================
request                     response
=========================== =====================================================================
`GET /snapshot/<download>`  a copy of the state, made when the download with this name begins; with
                            `Range: bytes=<first>-`, the rest of the copy
`GET /messages/<first>`     the messages of all completed exchanges, starting with number <first>;
                            410 if they are no longer kept
`GET /report`               JSON with this rank's progress; needs no token
=========================== =====================================================================

The first two requests need `Authorization: Bearer <token>`. A joiner checks the SHA-256 in a
response's header, and loads the response with `torch.load(weights_only=True)`, which runs no code.
Nothing is encrypted, so anyone who can read the traffic can read the token: see SECURITY.md.

The token is the value of the environment variable `COMMFREE_TOKEN`, which must be the same on all
replicas. If it is not set, each server creates a random token, which joiners get through the
rendezvous as part of the server's address.

A client without the token can only open connections and read the report. A request must have no
body and at most `MAX_HEAD_BYTES`, and must arrive within `HEAD_SECONDS`. If more than `MAX_PENDING`
connections have no complete request, the oldest one is closed.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import json
import logging
import os
import pickle
import re
import secrets
import selectors
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from io import BytesIO
from typing import IO, Any, cast
from urllib.parse import urlsplit

import torch

from lightning_commfree.comm.sockets import CloseOnFork

TOKEN = "COMMFREE_TOKEN"  # name of an environment variable
MAX_HEAD_BYTES = 8192
HEAD_SECONDS = 5.0  # time for a request to arrive
MAX_PENDING = 256  # connections without a complete request
MAX_ANSWERS = 8  # responses in progress at once; other joiners are told to retry
MAX_SNAPSHOTS = 4  # snapshots on disk at once; a new one replaces the least recently used one
STALL_SECONDS = 30.0  # time without a byte of progress after which either side gives up
IDLE_SECONDS = 60.0  # time without a request after which a snapshot is removed

_BACKLOG = 1024  # connections that the kernel queues until they are accepted
_BATCH = 16  # connections to accept before reading from open ones
_TICK_S = 0.2
_RETRY_S = 0.2
_PIECE_BYTES = 1 << 20
_DELIVERED = (HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT)
_PATH = re.compile(r"/(snapshot|messages)/([0-9a-f]{1,32})")
_RANGE = re.compile(r"bytes=(\d{1,18})-")
log = logging.getLogger(__name__)


class StateServer:
    """HTTP server for one rank's state, and client for other ranks' servers; a `StateTransfer`.

    Args:
        host: the address to listen on, which the other replicas can reach. "0.0.0.0" would listen
            on every network of this machine.
        port: the port to listen on; 0 lets the kernel choose one.
        patience_s: how long a download keeps retrying while no byte arrives.

    Attributes:
        address: URL of this server, with its token unless all replicas share one; see
            `public_address`.
        report: function that returns the JSON value for `GET /report`; called on the server's
            threads.
        sent_bytes: bytes of snapshots and messages sent so far.
    """

    def __init__(
        self, host: str = "127.0.0.1", port: int = 0, patience_s: float = STALL_SECONDS
    ) -> None:
        shared = os.environ.get(TOKEN)
        self.token = shared or secrets.token_urlsafe(32)
        self.report: Callable[[], Any] = dict
        self.sent_bytes = 0
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._snapshots: dict[str, _Snapshot] = {}  # by download, least recently used first
        self._active = 0  # responses in progress
        self._serving: tuple[Callable[[], Any], Callable[[int], Any]] | None = None
        self._sockets = CloseOnFork()
        with self._sockets.opening():
            self._server = _Server(host, port, self)
        host, port = self._server.address
        user = "" if shared else f":{self.token}@"
        self.address = f"http://{user}{host}:{port}"

    # -- the donor

    def serve(
        self,
        snapshot: Callable[[], dict[str, Any]],
        messages: Callable[[int], list[dict[str, Any]]],
    ) -> None:
        """Start serving this rank's state to joiners; see `StateTransfer.serve`."""
        self._serving = snapshot, messages
        self._server.start()

    def close(self) -> None:
        """Stop serving, and delete all snapshots; joiners must download from another member."""
        self._server.close()
        with self._lock:
            while self._snapshots:
                self._snapshots.popitem()[1].remove()

    @contextmanager
    def answering(self) -> Iterator[bool]:
        """Context manager that counts a response as in progress during its block.

        Yields False if `MAX_ANSWERS` responses are already in progress.
        """
        with self._lock:
            is_free = self._active < MAX_ANSWERS
            self._active += is_free
        try:
            yield is_free
        finally:
            with self._lock:
                self._active -= is_free

    def snapshot(self, download: str) -> _Snapshot:
        """Return the snapshot for the download named `download`; the first request creates it."""
        assert self._serving is not None
        with self._lock:
            found = self._snapshots.pop(download, None) or _Snapshot(self._serving[0])
            found.used_s = time.monotonic()
            self._snapshots[download] = found
            if len(self._snapshots) > MAX_SNAPSHOTS:
                self._snapshots.pop(next(iter(self._snapshots))).remove()
        found.make()  # without the lock, so that downloads do not wait for each other's copies
        return found

    def messages(self, first: int) -> bytes:
        """Serialize the messages of all completed exchanges, starting with exchange number `first`.

        Raises:
            LookupError: some of these messages are no longer kept.
        """
        assert self._serving is not None
        body = BytesIO()
        torch.save(self._serving[1](first), body)
        return body.getvalue()

    def remove_idle(self) -> None:
        """Remove snapshots that no joiner has downloaded from for `IDLE_SECONDS`."""
        with self._lock:
            for download, snapshot in list(self._snapshots.items()):
                if time.monotonic() - snapshot.used_s > IDLE_SECONDS:
                    self._snapshots.pop(download).remove()

    def count_sent(self, num_bytes: int) -> None:
        """Add `num_bytes` to `sent_bytes`, the total size of snapshots and messages sent."""
        with self._lock:
            self.sent_bytes += num_bytes

    # -- the joiner

    def fetch_snapshot(self, address: str) -> dict[str, Any]:
        """Fetch a snapshot from the server at `address`; resume the download if interrupted.

        Raises:
            ConnectionError: the server is gone or rejects the token, or its response is corrupted.
            RuntimeError: the response contains objects other than tensors and plain values.
        """
        with tempfile.TemporaryFile() as file:
            path = f"/snapshot/{secrets.token_hex(16)}"
            self._fetch(address, path, file)
            found: dict[str, Any] = _load(file, address)
        return found

    def fetch_messages(self, address: str, first: int) -> list[dict[str, Any]]:
        """Fetch the messages of all completed exchanges, starting with exchange number `first`.

        Raises:
            LookupError: some of these messages are no longer kept, so a new snapshot is needed.
            ConnectionError: the server is gone or rejects the token, or its response is corrupted.
            RuntimeError: the response contains objects other than tensors and plain values.
        """
        body = BytesIO()
        self._fetch(address, f"/messages/{first:x}", body)
        found: list[dict[str, Any]] = _load(body, address)
        return found

    def _fetch(self, address: str, path: str, into: IO[bytes]) -> None:
        """Download a response into a file; if the download is interrupted, request the rest."""
        progress_s = time.monotonic()
        while True:
            start = into.tell()
            try:
                if _request(address, self.token, path, into, self._patience_s):
                    return
                raise OSError("it is busy")
            except _RefusedError:
                raise
            except (OSError, http.client.HTTPException) as error:
                now = time.monotonic()
                progress_s = now if into.tell() > start else progress_s
                # a server that has closed its port does not open it again
                refused = isinstance(error, ConnectionRefusedError)
                if refused or now - progress_s > self._patience_s:
                    raise ConnectionError(
                        f"The state server at {public_address(address)} is not responding"
                        f" ({error}): its replica may have exited, or a firewall may be blocking"
                        " the port."
                    ) from error
                time.sleep(_RETRY_S)


def public_address(address: str) -> str:
    """Return the address of a state server without its token."""
    scheme, _, rest = address.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"


class _RefusedError(ConnectionError):
    """Raised when a server's response shows that a retry would also fail."""


class _Snapshot:
    """A copy of the state for one joiner, in an unnamed temporary file that is written once.

    Because the file has no name, a killed process leaves nothing on disk.
    """

    def __init__(self, state: Callable[[], dict[str, Any]]) -> None:
        self.num_bytes, self.sha256 = 0, ""
        self.used_s = 0.0
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `remove`
        self._state = state
        self._lock = threading.Lock()

    def make(self) -> None:
        """Write the snapshot to its file, unless another request has already done so."""
        with self._lock:
            if not self.sha256:
                self._file.seek(0)  # an earlier attempt may have failed
                self._file.truncate()
                torch.save(self._state(), self._file)
                self.num_bytes, self.sha256 = self._file.tell(), _sha256(self._file)

    def open(self) -> IO[bytes]:
        """Return a new file object for one response, which stays usable after `remove`."""
        return os.fdopen(os.dup(self._file.fileno()), "rb")

    def remove(self) -> None:
        """Close the file; its disk space is freed when the last response in progress ends."""
        self._file.close()


class _Server:
    """HTTP server that reads all requests on one thread, and responds to each on its own thread."""

    def __init__(self, host: str, port: int, states: StateServer) -> None:
        self._states = states
        self._listener = socket.create_server((host, port), backlog=_BACKLOG)
        self._listener.setblocking(False)
        self.address = self._listener.getsockname()
        self._pending: dict[socket.socket, _Head] = {}  # oldest first
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._closed, self._thread = False, threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closed = True
        if self._thread.ident is not None:
            self._thread.join()
        for connection in self._pending:
            connection.close()
        self._selector.close()
        self._listener.close()

    def _run(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select(_TICK_S):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj in self._pending:  # `_accept` may just have closed it
                    self._read(key.fileobj)
            while self._pending and self._oldest()[1].end_s < time.monotonic():
                self._take(self._oldest()[0]).close()
            self._states.remove_idle()

    def _oldest(self) -> tuple[socket.socket, _Head]:
        return next(iter(self._pending.items()))

    def _accept(self) -> None:
        for _ in range(_BATCH):
            try:
                connection, _ = self._listener.accept()
            except OSError:  # no more connections, or too many open files
                return
            connection.setblocking(False)
            self._pending[connection] = _Head(time.monotonic() + HEAD_SECONDS)
            self._selector.register(connection, selectors.EVENT_READ)
            if len(self._pending) > MAX_PENDING:
                self._take(self._oldest()[0]).close()

    def _read(self, connection: socket.socket) -> None:
        head = self._pending[connection]
        try:
            piece = connection.recv(MAX_HEAD_BYTES + 1 - len(head.content))
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        head.content += piece
        if not piece or len(head.content) > MAX_HEAD_BYTES:
            self._take(connection).close()
        elif b"\r\n\r\n" in head.content:
            self._take(connection)
            arguments = connection, bytes(head.content), self._states
            try:
                threading.Thread(target=_answer, args=arguments, daemon=True).start()
            except RuntimeError:  # too many threads
                connection.close()

    def _take(self, connection: socket.socket) -> socket.socket:
        """Stop waiting for a connection's request, and return the connection."""
        self._selector.unregister(connection)
        del self._pending[connection]
        return connection


class _Head:
    """The received bytes of a request's head: its first line and headers."""

    def __init__(self, end_s: float) -> None:
        self.end_s, self.content = end_s, bytearray()


def _answer(connection: socket.socket, head: bytes, states: StateServer) -> None:
    try:
        with connection:
            connection.settimeout(STALL_SECONDS)
            _Handler(connection, head, states)
    except Exception:
        # whatever the cause, later requests may succeed
        log.debug("A request could not be answered.", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    """Responds to one HTTP request."""

    server_version, sys_version = "commfree", ""

    def __init__(self, connection: socket.socket, head: bytes, states: StateServer) -> None:
        self._head, self._states = head, states
        super().__init__(connection, connection.getpeername(), cast(Any, None))

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.rfile = BytesIO(self._head)

    def do_GET(self) -> None:
        states = self._states
        if self.path == "/report":
            return self._answer(HTTPStatus.OK, json.dumps(states.report()).encode())
        shown = self.headers.get("Authorization", "").encode()
        if not hmac.compare_digest(shown, f"Bearer {states.token}".encode()):
            return self._answer(HTTPStatus.UNAUTHORIZED)
        asked = _PATH.fullmatch(self.path)
        if asked is None:
            return self._answer(HTTPStatus.NOT_FOUND)
        with states.answering() as is_free:
            if not is_free:
                return self._answer(HTTPStatus.SERVICE_UNAVAILABLE)
            if asked[1] == "snapshot":
                return self._send_snapshot(asked[2])
            return self._send_messages(int(asked[2], 16))

    def _send_messages(self, first: int) -> None:
        try:
            body = self._states.messages(first)
        except LookupError:
            return self._answer(HTTPStatus.GONE)
        self._states.count_sent(len(body))
        return self._answer(HTTPStatus.OK, body, _sha256(BytesIO(body)))

    def _send_snapshot(self, download: str) -> None:
        snapshot = self._states.snapshot(download)
        asked = _RANGE.fullmatch(self.headers.get("Range", "bytes=0-"))
        if asked is None or int(asked[1]) >= snapshot.num_bytes:
            return self._answer(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
        first, end = int(asked[1]), snapshot.num_bytes
        with snapshot.open() as body:
            self.send_response(HTTPStatus.PARTIAL_CONTENT)
            self.send_header("Content-Length", str(end - first))
            self.send_header("Content-Range", f"bytes {first}-{end - 1}/{end}")
            self.send_header("ETag", snapshot.sha256)
            self.end_headers()
            while first < end:
                sent = self.connection.sendfile(body, first, _PIECE_BYTES)
                self._states.count_sent(sent)
                snapshot.used_s = time.monotonic()
                first += sent
        return None

    def _answer(self, status: HTTPStatus, body: bytes = b"", sha256: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", sha256)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)


def _request(address: str, token: str, path: str, into: IO[bytes], timeout_s: float) -> bool:
    """Request the part of a response that a file does not contain yet, and append it to the file.

    Returns:
        True if the response is now complete; False if the server is busy and the caller must retry.

    Raises:
        LookupError: the server no longer has the requested messages.
        _RefusedError: the server rejected the token, or its response is not valid.
        OSError: the connection failed.
    """
    url = urlsplit(address)
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=timeout_s)
    headers = {
        "Authorization": f"Bearer {url.password or token}",
        "Range": f"bytes={into.tell()}-",
    }
    try:
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        if response.status == HTTPStatus.UNAUTHORIZED:
            raise _RefusedError(
                f"The state server at {public_address(address)} rejected this replica's token. Set"
                f" {TOKEN} to the same value on all replicas, or on none."
            )
        if response.status == HTTPStatus.GONE:
            raise LookupError("the server no longer has these messages")
        if response.status == HTTPStatus.SERVICE_UNAVAILABLE:
            return False
        if response.status not in _DELIVERED:
            raise _RefusedError(
                f"The server at {public_address(address)} returned status {response.status}."
                " Another program may be running there, or another version of this library."
            )
        if response.status == HTTPStatus.OK:  # the full response, whatever range was requested
            into.seek(0)
            into.truncate()
        while piece := response.read(_PIECE_BYTES):
            into.write(piece)
        if response.length:
            raise ConnectionResetError(f"{response.length} bytes are missing")
        sha256 = _sha256(into)
        if sha256 != response.getheader("ETag"):
            raise _RefusedError(
                f"The response from the state server at {public_address(address)} is corrupted: its"
                " SHA-256 does not match the one in its header."
            )
        return True
    finally:
        connection.close()


def _load(file: IO[bytes], address: str) -> Any:
    file.seek(0)
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise RuntimeError(
            f"The state server at {public_address(address)} sent something other than tensors and"
            " plain values; none of it was loaded. Another program may be running there, or another"
            " version of this library."
        ) from error


def _sha256(file: IO[bytes]) -> str:
    """Return the SHA-256 of a whole file, and leave the file position at the end."""
    digest = hashlib.sha256()
    file.seek(0)
    while piece := file.read(_PIECE_BYTES):
        digest.update(piece)
    return digest.hexdigest()
