"""Lightning's plugins for checkpoints: our own, and those of users."""

from __future__ import annotations

import inspect
import zipfile
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from typing_extensions import override

from lightning_commfree.model.shards import with_values
from lightning_commfree.resume.files import FilePath, local_path, write_whole
from lightning_commfree.resume.folders import IntoFolder, read_folder

# earlier releases of Lightning do not ask how a file is to be read
_ASKS = "weights_only" in inspect.signature(TorchCheckpointIO.load_checkpoint).parameters


class WholeCheckpointIO(TorchCheckpointIO):
    """Lightning's `TorchCheckpointIO`, whose files on a disk replace others whole or not at all.

    Args:
        maps: files on a disk are mapped, not read: of a tensor a rank reads what it uses. While
            such a fit runs the file it resumed from may be replaced or removed, not written to.
            Of a folder it gets stand-ins (`comm.wholes`).

    Attributes:
        into: writes checkpoints into folders; None: they are files.
    """

    def __init__(self, maps: bool = False) -> None:
        self._maps = maps
        self.into: IntoFolder | None = None

    @override
    def load_checkpoint(self, path: FilePath, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return a checkpoint, as Lightning does."""
        local = local_path(path)
        asked = kwargs.get("weights_only", args[1] if len(args) > 1 else None)
        if local is not None and local.is_dir():
            saved: dict[str, Any] = read_folder(local, asked is not False)
            return saved if self._maps else with_values(saved)
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
        """Write a checkpoint; where `path` is no file of this machine, Lightning does it.

        Raises:
            RuntimeError: it cannot be written; what was there before is as it was.
        """
        local = local_path(path)
        if self.into is not None and local is not None:
            self.into.write(checkpoint, local)
        elif storage_options is not None or local is None:
            super().save_checkpoint(checkpoint, path, storage_options)
        else:
            write_whole(checkpoint, path)


def writing_whole(plugin: CheckpointIO | None, maps: bool) -> CheckpointIO:
    """Return the user's plugin, else one whose files are whole; asynchronous ones wrap that."""
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
