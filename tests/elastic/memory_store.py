"""A store in memory, for replicas that are threads of one process."""

from __future__ import annotations

import threading


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
