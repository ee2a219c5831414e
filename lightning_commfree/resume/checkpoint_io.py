"""Lightning's plugins for checkpoints: ours, and those of users."""

from __future__ import annotations

import inspect
import zipfile
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from typing_extensions import override

from lightning_commfree.resume.files import FilePath, local_path, write_whole
from lightning_commfree.resume.folders import read_folder

# earlier releases of Lightning do not ask how a file is to be read
_ASKS = "weights_only" in inspect.signature(TorchCheckpointIO.load_checkpoint).parameters


class WholeCheckpointIO(TorchCheckpointIO):
    """Lightning's `TorchCheckpointIO`, with files that are complete or absent.

    Args:
        maps: map files on a disk instead of reading them, so that a rank with shards reads only
            these: the file that a fit resumes from may be replaced or removed meanwhile, but not
            written to. Tensors of a folder are read when they are used.
    """

    def __init__(self, maps: bool = False) -> None:
        self._maps = maps

    @override
    def load_checkpoint(self, path: FilePath, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return a checkpoint, as Lightning does, from a file or a folder."""
        local = local_path(path)
        asked = kwargs.get("weights_only", args[1] if len(args) > 1 else None)
        if local is not None and local.is_dir():
            saved: dict[str, Any] = read_folder(local, asked is not False, lazy=self._maps)
            return saved
        if not self._maps or local is None or not zipfile.is_zipfile(local):
            return super().load_checkpoint(path, *args, **kwargs)
        weights_only = asked if _ASKS else False
        state: dict[str, Any] = torch.load(
            local, map_location="cpu", mmap=True, weights_only=weights_only
        )
        return state

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: FilePath, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint; Lightning does it where `path` is not on a disk of this machine.

        Raises:
            RuntimeError: it cannot be written; the file that was there before is unchanged.
        """
        if storage_options is not None or local_path(path) is None:
            super().save_checkpoint(checkpoint, path, storage_options)
        else:
            write_whole(checkpoint, path)


def writing_whole(plugin: CheckpointIO | None, maps: bool) -> CheckpointIO:
    """Return the user's plugin, or ours; asynchronous plugins get ours to write with."""
    if plugin is None:
        return WholeCheckpointIO(maps)
    if hasattr(plugin, "checkpoint_io"):
        plugin.checkpoint_io = WholeCheckpointIO(maps)  # it keeps the first one that it gets
    return plugin


def writes_later(checkpoint_io: Any) -> bool:
    """Return whether a plugin, or one inside it, may still be writing when it returns."""
    while checkpoint_io is not None and not isinstance(checkpoint_io, AsyncCheckpointIO):
        checkpoint_io = getattr(checkpoint_io, "checkpoint_io", None)  # of one that wraps another
    return checkpoint_io is not None
