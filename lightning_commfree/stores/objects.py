"""A store in a bucket of S3, GCS or Azure, through obstore (extra `store`).

Credentials, region and endpoint come from the environment (`AWS_*`, `GOOGLE_*`, `AZURE_*`) or the
machine's role. The service must honor `If-None-Match: *`, which `probe` checks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from lightning_commfree.stores.store import Keys, StoreError, check_key, check_prefix

Result = TypeVar("Result")


class ObjectStore:
    """A `Store` in a bucket; keys are below the URL's path. obstore's client is thread-safe.

    Args:
        url: such as `s3://bucket/run`.
        timeout_s: how long one request may take.
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
        try:
            self._bucket: Any = from_url(
                url,
                client_options={  # replaces what obstore would read from the environment
                    "timeout": timedelta(seconds=timeout_s),
                    "allow_http": os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true"),
                },
                # A create repeated by obstore would hide that the first one succeeded.
                retry_config={"max_retries": 0, "retry_timeout": timedelta(0)},
            )
        except obstore.exceptions.BaseError as error:
            raise ValueError(f"The store {url} cannot be opened: {error}") from error

    def create(self, key: str, data: bytes) -> bool:
        """Put the object on condition that the key is absent; return whether this call did."""
        check_key(key)

        def put() -> bool:
            try:
                self._obstore.put(self._bucket, key, data, mode="create", use_multipart=False)
            except (FileExistsError, self._obstore.exceptions.AlreadyExistsError):
                return False
            return True

        return self._ask("create", put)

    def get(self, key: str) -> bytes | None:
        """Get the object; None if the key is absent."""
        check_key(key)
        return self._ask(
            "get", lambda: bytes(self._obstore.get(self._bucket, key).bytes()), absent=None
        )

    def get_range(self, key: str, start: int, length: int) -> bytes | None:
        """Get a range of the object; None if the key is absent."""
        check_key(key)
        return self._ask(
            "get_range",
            lambda: bytes(self._obstore.get_range(self._bucket, key, start=start, length=length)),
            absent=None,
        )

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
