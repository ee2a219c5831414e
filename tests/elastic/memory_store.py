"""A store in memory, for replicas that are threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class MemoryStore:
    address = "memory"

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.deleted: dict[str, bytes] = {}  # for twins, which replay a whole job
        self._lock = threading.Lock()

    def create(self, key: str, data: bytes) -> bool:
        with self._lock:
            return self.objects.setdefault(key, data) is data

    def get(self, key: str) -> bytes | None:
        return self.objects.get(key)

    def get_range(self, key: str, start: int, length: int) -> bytes | None:
        data = self.objects.get(key)
        return None if data is None else data[start : start + length]

    def list(self, prefix: str) -> list[str]:
        return sorted(key for key in self.objects if key.startswith(prefix))

    def delete(self, key: str) -> None:
        if key in self.objects:
            self.deleted[key] = self.objects.pop(key)

    def overwrite(self, key: str, data: bytes) -> None:
        self.objects[key] = data


class Request(NamedTuple):
    verb: str
    key: str
    sent: int
    received: int
    done: bool  # a create that created, a get that found something


@dataclass
class RecordingStore:
    """A `Store` that notes the requests of one replica."""

    store: MemoryStore
    address: str = "memory"
    requests: list[Request] = field(default_factory=list)

    def create(self, key: str, data: bytes) -> bool:
        return self.note("create", key, self.store.create, data)

    def get(self, key: str) -> bytes | None:
        return self.note("get", key, self.store.get)

    def get_range(self, key: str, start: int, length: int) -> bytes | None:
        found: bytes | None = self.note(
            "get_range", key, lambda key: self.store.get_range(key, start, length)
        )
        return found

    def list(self, prefix: str) -> list[str]:
        found: list[str] = self.note("list", prefix, self.store.list)
        return found

    def overwrite(self, key: str, data: bytes) -> None:
        self.note("overwrite", key, self.store.overwrite, data)

    def delete(self, key: str) -> None:
        self.note("delete", key, self.store.delete)

    def note(self, verb: str, key: str, ask: Callable[..., Any], *data: bytes) -> Any:
        found = ask(key, *data)
        received = len(found) if isinstance(found, bytes) else 0
        done = bool(found) if verb == "create" else found is not None
        self.requests.append(Request(verb, key, sum(map(len, data)), received, done))
        return found

    def those(self, verb: str, folder: str, done: bool = True) -> list[Request]:
        found = (one for one in self.requests if one.verb == verb and one.done == done)
        return [one for one in found if one.key.startswith(folder)]
