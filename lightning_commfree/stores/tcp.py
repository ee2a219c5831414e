"""A store in the memory of one process: torch's TCPStore, served by `commfree-store serve`.

torch's client has no timeout for an answer and never reconnects, so each client runs on a thread
of its own, which is abandoned with it. A value of up to 64 kB is stored with its key. A larger one
is stored in parts of 4 MB (the server takes at most 8 MB at once) before its key. A restarted
server has lost everything; a random identity, which the first client stores, tells.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from lightning_commfree.stores.store import (
    Keys,
    StoreError,
    StoreLostError,
    check_key,
    check_prefix,
)

PART_BYTES = 4 << 20
_INLINE_BYTES = 64 << 10
_CONNECT_S = 5.0
_WAIT = timedelta(seconds=1)  # how long a read waits for a value that is deleted at that moment
_INDEX, _IDENTITY = "index", "identity"  # other names begin with "key/" or "part/"
Result = TypeVar("Result")
_log = logging.getLogger(__name__)


class _Value(NamedTuple):
    """Record of a key: a random name, the number of parts and, if there are none, the data."""

    name: str
    parts: int
    inline: bytes

    def encode(self) -> bytes:
        return f"{self.name} {self.parts}\n".encode() + self.inline

    @classmethod
    def decode(cls, raw: bytes) -> _Value:
        """Return the record in `raw`: name, number of parts, a newline, and the data if inline."""
        header, _, inline = raw.partition(b"\n")
        name, parts = header.decode().split()
        return cls(name, int(parts), inline)

    def part_names(self) -> Keys:
        return [f"part/{self.name}/{index}" for index in range(self.parts)]


class TcpStore:
    """A `Store` on a TCPStore server. It connects with its first request, and again after errors.

    The requests of all threads share a connection. They take turns, at most 4 MB at a time.

    Args:
        host: name or address of the server's machine.
        port: the server's port.
        timeout_s: how long one request of at most 4 MB may take.
    """

    def __init__(self, host: str, port: int, timeout_s: float = 30.0) -> None:
        self.address = f"tcp://{host}:{port}"
        self._host, self._port, self._timeout_s = host, port, timeout_s
        self._lock = threading.Lock()
        self._client: _Client | None = None
        self._identity: bytes | None = None

    def create(self, key: str, data: bytes) -> bool:
        """Store the parts, then the key by `compare_set`; return whether this call created it."""
        name = f"key/{check_key(key)}"
        if self._call("create", "check", [name]):
            return False
        value = self._upload("create", data)
        encoded = value.encode()

        def add(store: Any) -> bytes:
            store.append(_INDEX, f"{key}\n")  # first: the index may contain a key too many
            found: bytes = store.compare_set(name, b"", encoded)
            return found

        created = self._ask("create", add) == encoded
        if not created:
            self._delete("create", value.part_names())
        return created

    def get(self, key: str) -> bytes | None:
        """Read the key, then all parts; None if the key is absent."""
        return self._read("get", key, 0, None)

    def get_range(self, key: str, start: int, length: int) -> bytes | None:
        """Read the key, then the parts in which the range is; None if the key is absent."""
        return self._read("get_range", key, start, start + length)

    def list(self, prefix: str) -> Keys:
        """Read the index of all keys ever created, and return those that still exist, sorted.

        TCPStore has `list_keys` only in later releases of torch.
        """
        check_prefix(prefix)
        index = self._get("list", _INDEX) or b""
        keys = sorted({key for key in index.decode().splitlines() if key.startswith(prefix)})
        return [key for key in keys if self._call("list", "check", [f"key/{key}"])]

    def delete(self, key: str) -> None:
        """Delete the key, then its parts."""
        name = f"key/{check_key(key)}"
        found = self._get("delete", name)
        if found is not None:
            self._delete("delete", [name, *_Value.decode(found).part_names()])

    def overwrite(self, key: str, data: bytes) -> None:
        """Store new parts, then the key, and delete the old parts."""
        name = f"key/{check_key(key)}"
        encoded = self._upload("overwrite", data).encode()
        old = self._get("overwrite", name)
        if old is None:
            self._call("overwrite", "append", _INDEX, f"{key}\n")
        self._call("overwrite", "set", name, encoded)
        if old is not None:
            self._delete("overwrite", _Value.decode(old).part_names())

    def _upload(self, verb: str, data: bytes) -> _Value:
        """Store a large value's parts; return the record to store under its key."""
        name = uuid.uuid4().hex
        if len(data) <= _INLINE_BYTES:
            return _Value(name, 0, data)
        value = _Value(name, -(-len(data) // PART_BYTES), b"")
        for index, part_name in enumerate(value.part_names()):
            part = data[index * PART_BYTES : (index + 1) * PART_BYTES]
            self._call(verb, "set", part_name, part)
        return value

    def _read(self, verb: str, key: str, start: int, stop: int | None) -> bytes | None:
        """Return bytes `start` to `stop` (None: the end) of a value; None if the key is absent."""
        found = self._get(verb, f"key/{check_key(key)}")
        if found is None:
            return None
        value = _Value.decode(found)
        if not value.parts:
            return value.inline[start:stop]
        first = start // PART_BYTES
        last = None if stop is None else -(-stop // PART_BYTES)
        parts = []
        for name in value.part_names()[first:last]:
            part = self._get(verb, name)
            if part is None:  # deleted since the key was read
                return None
            parts.append(part)
        skipped = first * PART_BYTES
        return b"".join(parts)[start - skipped : None if stop is None else stop - skipped]

    def _get(self, verb: str, name: str) -> bytes | None:
        """Return the server's entry of that name (`key/...`, `part/...`), or None if absent."""

        def get(store: Any) -> bytes | None:
            try:
                found: bytes | None = store.get(name) if store.check([name]) else None
            except dist.DistStoreError:  # deleted between the two
                return None
            return found or None  # no entry is empty: deleted within `get`, if libuv serves

        return self._ask(verb, get)

    def _delete(self, verb: str, names: Iterable[str]) -> None:
        for name in names:
            self._call(verb, "delete_key", name)

    def _call(self, verb: str, method: str, *args: Any) -> Any:
        """Call a method of torch's TCPStore by name; see `_ask`."""
        return self._ask(verb, lambda store: getattr(store, method)(*args))

    def _ask(self, verb: str, request: Callable[[Any], Result]) -> Result:
        """Run a request on the client's thread, and return its result.

        If it fails or times out, abandon the client, and raise a `StoreError` or `StoreLostError`.
        """
        with self._lock:
            client = self._client = self._client or _Client(self._connect)
        try:
            return client.submit(request).result(self._timeout_s)
        except FutureTimeoutError as error:
            self._give_up(client)
            cause = f"no answer for {self._timeout_s:g} s"
            raise StoreError(self.address, verb, cause) from error
        except (OSError, RuntimeError) as error:  # torch's errors are RuntimeErrors
            self._give_up(client)
            raise StoreError(self.address, verb, error) from error
        except StoreLostError:
            self._give_up(client)
            raise

    def _connect(self) -> Any:
        """Return a new TCPStore client; raise a `StoreLostError` if the server has changed."""
        # torch would repeat a refused connection until its timeout, and log each attempt
        socket.create_connection((self._host, self._port), _CONNECT_S).close()
        store = TCPStore(self._host, self._port, None, False, _WAIT, wait_for_workers=False)
        identity = store.compare_set(_IDENTITY, "", uuid.uuid4().hex)
        with self._lock:
            if self._identity not in (None, identity):
                raise StoreLostError(self.address)
            self._identity = identity
        return store

    def _give_up(self, client: _Client) -> None:
        """End a client's thread after its current request; the next request gets a new client."""
        with self._lock:
            if self._client is client:
                self._client = None
        client.end()


class _Client:
    """Thread that connects, and runs requests in order; it may hang in one of them forever."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = connect
        self._requests: queue.SimpleQueue[tuple[Callable[[Any], Any], Future[Any]] | None]
        self._requests = queue.SimpleQueue()
        threading.Thread(target=self._run, name="tcp-store", daemon=True).start()

    def submit(self, request: Callable[[Any], Result]) -> Future[Result]:
        answer: Future[Result] = Future()
        self._requests.put((request, answer))
        return answer

    def end(self) -> None:
        self._requests.put(None)

    def _run(self) -> None:
        """Run requests in order until `end`; after one fails, the others fail with its error."""
        store: Any = None
        failed: BaseException | None = None
        while (item := self._requests.get()) is not None:
            request, answer = item
            try:
                if failed is not None:
                    raise failed  # the connection is in an unknown state
                store = self._connect() if store is None else store
                answer.set_result(request(store))
            except Exception as error:  # noqa: BLE001 - raised in the thread that asked
                failed = error
                answer.set_exception(error)


def serve(host: str, port: int) -> Any:
    """Start a TCPStore server that listens on one address, and return it; it ends with the process.

    Raise an OSError if the address is not this machine's, or the port is in use.
    """
    # torch itself would listen on all addresses
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(128)

        def store(use_libuv: bool) -> Any:
            descriptor = os.dup(listener.fileno())
            try:
                return TCPStore(
                    host,
                    port,
                    None,
                    True,
                    wait_for_workers=False,
                    master_listen_fd=descriptor,
                    use_libuv=use_libuv,
                )
            except RuntimeError:
                os.close(descriptor)  # it has not been used
                raise

        try:
            # The other server reads each request to its end before it looks at those of others.
            return store(use_libuv=True)
        except RuntimeError as error:  # some builds of torch, such as Debian's, lack libuv
            if "libuv" not in str(error):
                raise
            _log.warning(
                "This build of torch has no libuv. While one replica sends up to 4 MB, the requests"
                " of all others wait: 1.7 s if its link has 20 Mbit/s. Where links are slow, serve"
                " the store with PyTorch's own wheel."
            )
            return store(use_libuv=False)
