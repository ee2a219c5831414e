"""The interface of a store, its errors, and `open_store`, which opens one by its URL.

A create is atomic on every store: of all processes that create a key, exactly one is told that it
did. So the first writer of a key decides, and nothing else is needed to agree. A listing may be
stale; nothing may be decided by one.
"""

from __future__ import annotations

import re
import uuid
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

Keys = list[str]  # inside a store's class, `list` is a method
_KEY = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*")
SCHEMES = ("file", "tcp", "s3", "gs", "az")
LEGAL = (
    "Legal are file:///mnt/share/run, tcp://10.0.0.1:29510, s3://bucket/run, gs://bucket/run and"
    " az://container/run."
)


class StoreError(Exception):
    """A request failed, and may succeed if it is repeated: an outage, a timeout, a permission.

    The request may have been carried out even so.
    """

    def __init__(self, address: str, verb: str, cause: object) -> None:
        super().__init__(address, verb, cause)
        self.address, self.verb, self.cause = address, verb, cause

    def __str__(self) -> str:
        return f"The store {self.address} did not answer `{self.verb}`: {self.cause}"


class StoreLostError(Exception):
    """The store answers again, but is not the one that this process used before: its keys are gone.

    A repeated request would succeed in the empty store and decide again what was decided before.
    """

    def __init__(self, address: str) -> None:
        super().__init__(address)

    def __str__(self) -> str:
        return (
            f"The store {self.args[0]} was replaced by another one while this process used it (was"
            " its server restarted, or its folder emptied?), so everything stored before is lost."
            " Restart all processes that use it."
        )


class Store(Protocol):
    """Interface of a store: bytes by key. Several threads may call its methods at once.

    Keys are relative paths of A-Z, a-z, 0-9, ".", "_", "-" and "/"; no part begins with a ".", and
    no key is the folder of another. Other keys raise a `ValueError`. Every method may raise a
    `StoreError`, and a `StoreLostError` if the store can tell.
    """

    address: str

    def create(self, key: str, data: bytes) -> bool:
        """Store a value if the key is absent, and return whether this call did.

        The value appears at once or not at all. False may also mean that an earlier call stored
        it, whose answer was lost; `Retrying` finds that out.
        """
        ...

    def get(self, key: str) -> bytes | None:
        """Return a value, or None if the key is absent."""
        ...

    def get_range(self, key: str, start: int, length: int) -> bytes | None:
        """Return up to `length` bytes of a value from `start`, which is inside; None if absent."""
        ...

    def list(self, prefix: str) -> Keys:
        """Return the keys that begin with a prefix, "" or one that ends with "/", sorted."""
        ...

    def delete(self, key: str) -> None:
        """Remove a key; it need not exist."""
        ...

    def overwrite(self, key: str, data: bytes) -> None:
        """Store a value whether or not the key exists. For a pointer that may be stale."""
        ...


def open_store(url: str) -> Store:
    """Open the store at a URL. A `tcp://` store connects with its first request.

    Raises:
        ValueError: the URL is not legal, or its folder does not exist.
        ModuleNotFoundError: the store needs the extra `store`, which is not installed.
        StoreError: the folder cannot be read or written.
    """
    # Imports are here, so that a folder needs no torch, and only buckets need obstore.
    parsed = urlsplit(url)
    if parsed.query or parsed.fragment or "@" in parsed.netloc:
        raise ValueError(f"The store {url!r} has a user, a query or a fragment. {LEGAL}")
    if parsed.scheme == "file":
        from lightning_commfree.stores.folder import FolderStore

        if parsed.netloc or not parsed.path.startswith("/"):
            raise ValueError(f"The store {url!r} needs an absolute path and no host. {LEGAL}")
        return FolderStore(Path(unquote(parsed.path)))
    if parsed.scheme == "tcp":
        from lightning_commfree.stores.tcp import TcpStore

        if parsed.path not in ("", "/"):
            raise ValueError(f"The store {url!r} has a path, which a tcp store cannot. {LEGAL}")
        return TcpStore(*host_and_port(parsed.netloc))
    if parsed.scheme in SCHEMES[2:]:
        from lightning_commfree.stores.objects import ObjectStore

        if not parsed.netloc:
            raise ValueError(f"The store {url!r} names no bucket. {LEGAL}")
        return ObjectStore(url)
    raise ValueError(f"{url!r} is not the URL of a store. {LEGAL}")


def probe(store: Store) -> None:
    """Create a test key twice and delete it; raise a ValueError unless only the first succeeded.

    Raises:
        ValueError: the store said twice that it created the same key.
    """
    key = f"probe/{uuid.uuid4().hex}"
    created = (store.create(key, b"1"), store.create(key, b"2"))
    store.delete(key)
    if created != (True, False):
        raise ValueError(
            f"The store {store.address} does not create a key only if it is absent: it answered"
            f" {created} to two creates of one key. Use a store that honors conditional writes"
            " (S3, GCS, Azure, a folder on a local disk or NFS; not `rclone serve s3`)."
        )


def check_key(key: str) -> str:
    """Return a legal key; raise a ValueError for any other."""
    if not _KEY.fullmatch(key):
        raise ValueError(
            f"{key!r} is not a legal key: use parts of A-Z, a-z, 0-9, '.', '_' and '-' that do not"
            " begin with '.', joined by single slashes."
        )
    return key


def check_prefix(prefix: str) -> str:
    """Return a legal prefix of keys; raise a ValueError for any other."""
    if prefix and not (prefix.endswith("/") and _KEY.fullmatch(prefix[:-1])):
        raise ValueError(f"{prefix!r} is not a legal prefix: use '' or a key followed by '/'.")
    return prefix


def host_and_port(text: str) -> tuple[str, int]:
    """Split `HOST:PORT`; raise a ValueError if one is missing or the port is not a port."""
    parsed = urlsplit(f"//{text}")
    try:
        host, port = parsed.hostname, parsed.port
    except ValueError:
        host = port = None
    if not host or not port:
        raise ValueError(f"{text!r} is not HOST:PORT, such as 10.0.0.1:29510.")
    return host, port
