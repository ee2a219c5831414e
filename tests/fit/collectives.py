"""Counts what really leaves a process: every call on a process group, whoever makes it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

# the methods of ProcessGroup that send nothing
_SILENT = {
    "abort",
    "boxed",
    "get_group_store",
    "merge_remote_group",
    "name",
    "rank",
    "set_timeout",
    "shutdown",
    "size",
    "split_group",
    "unbox",
    "use_pg_for_symm_mem_rendezvous",
}


@contextmanager
def counted(moment: Callable[[], Any]) -> Iterator[list[tuple[Any, str]]]:
    """Record `(moment(), name)` for every collective and point-to-point call in the body."""
    calls: list[tuple[Any, str]] = []
    originals = {
        name: getattr(dist.ProcessGroup, name)
        for name in dir(dist.ProcessGroup)
        if (not name.startswith("_") or name.endswith("_base"))
        and name not in _SILENT
        and callable(getattr(dist.ProcessGroup, name))
        and name.islower()
    }

    def wrap(name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append((moment(), name))
            return original(*args, **kwargs)

        return call

    # the attribute of the class binds to a group; the result of `getattr` does not
    standing = {name: inspect.getattr_static(dist.ProcessGroup, name) for name in originals}
    for name, original in originals.items():
        setattr(dist.ProcessGroup, name, wrap(name, original))
    try:
        yield calls
    finally:
        for name, attribute in standing.items():
            setattr(dist.ProcessGroup, name, attribute)
