"""Lightning's plugins for checkpoints: our own, and those of users."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from typing_extensions import override

from lightning_commfree.checkpoint.whole_files import FilePath, local_path, write_whole


class WholeCheckpointIO(TorchCheckpointIO):
    """Lightning's `TorchCheckpointIO`, whose files on a disk replace others whole or not at all."""

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: FilePath, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint; where `path` is no file of this machine, Lightning does it.

        Raises:
            RuntimeError: it cannot be written; what was there before is as it was.
        """
        if storage_options is not None or local_path(path) is None:
            super().save_checkpoint(checkpoint, path, storage_options)
        else:
            write_whole(checkpoint, path)


def writes_later(checkpoint_io: Any) -> bool:
    """Return whether a plugin, or one inside it, may still be writing when it returns."""
    while checkpoint_io is not None and not isinstance(checkpoint_io, AsyncCheckpointIO):
        checkpoint_io = getattr(checkpoint_io, "checkpoint_io", None)  # of one that wraps another
    return checkpoint_io is not None
