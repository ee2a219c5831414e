"""A store in a bucket of S3, GCS or Azure, through obstore (extra `store`).

Credentials, region and endpoint come from the environment (`AWS_*`, `GOOGLE_*`, `AZURE_*`) or the
machine's role. The service must honor `If-None-Match: *`, which `probe` checks.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from lightning_commfree.stores.store import Keys, StoreError, check_key, check_prefix

PIECE_BYTES = 16 << 20
Result = TypeVar("Result")


class ObjectStore:
    """A `Store` in a bucket; keys are below the URL's path. obstore's client is thread-safe.

    Args:
        url: such as `s3://bucket/run`.
        timeout_s: how long one request may take. To create an object of more than 16 MB, it is as
            much longer as the object is larger; such an object is read in pieces of 16 MB.
    """

    def __init__(self, url: str, timeout_s: float = 60.0) -> None:
        try:
            import obstore
            from obstore.store import from_url
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"The store {url} needs obstore: pip install obstore"
            ) from error
        self.address = url
        self._obstore: Any = obstore
        self._from_url, self._timeout_s = from_url, timeout_s
        try:
            self._bucket = self._client()
        except obstore.exceptions.BaseError as error:
            raise ValueError(f"The store {url} cannot be opened: {error}") from error

    def _client(self, pieces: int = 1) -> Any:
        """Return a client for requests that move up to so many pieces."""
        return self._from_url(
            self.address,
            client_options={  # replaces what obstore would read from the environment
                "timeout": timedelta(seconds=pieces * self._timeout_s),
                "allow_http": os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true"),
            },
            # A create repeated by obstore would hide that the first one succeeded.
            retry_config={"max_retries": 0, "retry_timeout": timedelta(0)},
        )

    def create(self, key: str, data: bytes) -> bool:
        """Put the object on condition that the key is absent; return whether this call did."""
        check_key(key)
        pieces = math.ceil(len(data) / PIECE_BYTES)
        bucket = self._client(pieces) if pieces > 1 else self._bucket

        def put() -> bool:
            try:  # a condition excludes several parts
                self._obstore.put(bucket, key, data, mode="create", use_multipart=False)
            except (FileExistsError, self._obstore.exceptions.AlreadyExistsError):
                return False
            return True

        return self._ask("create", put)

    def get(self, key: str) -> bytes | None:
        """Get the object; None if the key is absent."""
        check_key(key)

        def read() -> bytes:
            found = self._obstore.get(self._bucket, key)
            size = found.meta["size"]
            if size <= PIECE_BYTES:
                return bytes(found.bytes())
            del found  # ends the request
            starts = range(0, size, PIECE_BYTES)
            return b"".join(self._range(key, at, min(PIECE_BYTES, size - at)) for at in starts)

        return self._ask("get", read, absent=None)

    def get_range(self, key: str, start: int, length: int) -> bytes | None:
        """Get a range of the object; None if the key is absent."""
        check_key(key)
        return self._ask("get_range", lambda: self._range(key, start, length), absent=None)

    def list(self, prefix: str) -> Keys:
        """List the objects, page by page, and return their keys, sorted."""
        check_prefix(prefix)
        return self._ask(
            "list",
            lambda: sorted(
                item["path"] for page in self._obstore.list(self._bucket, prefix) for item in page
            ),
        )

    def delete(self, key: str) -> None:
        """Delete the object."""
        check_key(key)
        self._ask("delete", lambda: self._obstore.delete(self._bucket, key), absent=None)

    def overwrite(self, key: str, data: bytes) -> None:
        """Put the object."""
        check_key(key)
        self._ask("overwrite", lambda: self._obstore.put(self._bucket, key, data))

    def _range(self, key: str, start: int, length: int) -> bytes:
        return bytes(self._obstore.get_range(self._bucket, key, start=start, length=length))

    def _ask(self, verb: str, request: Callable[[], Result], **absent: None) -> Result | Any:
        """Run a request; if the key is absent, return `absent` where it is given.

        Errors are raised as `StoreError`.
        """
        try:
            return request()
        except (OSError, self._obstore.exceptions.BaseError) as error:
            not_found = (FileNotFoundError, self._obstore.exceptions.NotFoundError)
            if absent and isinstance(error, not_found):
                return absent["absent"]
            raise StoreError(self.address, verb, error) from error
