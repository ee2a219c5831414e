"""Checkpoint plugins for Lightning: the library's default, and wrappers for users' plugins."""

from __future__ import annotations

import inspect
import zipfile
from typing import Any

import torch
from typing_extensions import override

from lightning_commfree.host import AsyncCheckpointIO, CheckpointIO, TorchCheckpointIO
from lightning_commfree.resume.files import FilePath, local_path, write_atomic
from lightning_commfree.resume.folders import read_folder

# earlier releases of Lightning do not have the argument `weights_only`
_PARAMETERS = inspect.signature(TorchCheckpointIO.load_checkpoint).parameters
_HAS_WEIGHTS_ONLY = "weights_only" in _PARAMETERS


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's `TorchCheckpointIO` with atomic writes; also reads checkpoint folders.

    With `maps`, local files are memory-mapped and the tensors in a folder are read lazily, so that
    a rank reads only its shards. While a fit resumes from a file, the file may then be replaced or
    removed, but not modified in place.
    """

    def __init__(self, maps: bool = False) -> None:
        self._maps = maps

    @override
    def load_checkpoint(self, path: FilePath, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint from a file or a folder."""
        local = local_path(path)
        asked = kwargs.get("weights_only", args[1] if len(args) > 1 else None)
        if local is not None and local.is_dir():
            saved: dict[str, Any] = read_folder(local, asked is not False, lazy=self._maps)
            return saved
        if not self._maps or local is None or not zipfile.is_zipfile(local):
            return super().load_checkpoint(path, *args, **kwargs)
        weights_only = asked if _HAS_WEIGHTS_ONLY else False
        state: dict[str, Any] = torch.load(
            local, map_location="cpu", mmap=True, weights_only=weights_only
        )
        return state

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: FilePath, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint atomically; for a remote `path`, use Lightning's own method.

        Raise a RuntimeError if the file cannot be written; an existing file is then unchanged.
        """
        if storage_options is not None or local_path(path) is None:
            super().save_checkpoint(checkpoint, path, storage_options)
        else:
            write_atomic(checkpoint, path)


def with_atomic_writes(plugin: CheckpointIO | None, maps: bool) -> CheckpointIO:
    """Return the checkpoint plugin to use: the user's `plugin`, or else an `AtomicCheckpointIO`.

    If the user's plugin is a wrapper, make it wrap an `AtomicCheckpointIO`.
    """
    if plugin is None:
        return AtomicCheckpointIO(maps)
    if hasattr(plugin, "checkpoint_io"):
        # a wrapper accepts only the first plugin, so set it before Lightning does
        plugin.checkpoint_io = AtomicCheckpointIO(maps)
    return plugin


def writes_later(checkpoint_io: Any) -> bool:
    """Return whether a checkpoint plugin, or a plugin that it wraps, writes asynchronously."""
    while checkpoint_io is not None and not isinstance(checkpoint_io, AsyncCheckpointIO):
        checkpoint_io = getattr(checkpoint_io, "checkpoint_io", None)  # the wrapped plugin
    return checkpoint_io is not None
