"""What only one rank knows, in files of its own beside a checkpoint.

Replicas differ: each has its own weights, optimizer, random numbers, data position. A Lightning
checkpoint has room for one of them, and to gather all on rank 0 would send more than the training
does. Rank 0's part stands in the checkpoint; every other rank writes its own, and the checkpoint
names the set that belongs to it:

    checkpoints/last.ckpt                                   a Lightning checkpoint, rank 0's part in
    checkpoints/.commfree/last.ckpt/120-5f3a.../rank_3.pt   rank 3's part of the save at step 120

The folder lies beside the checkpoints, so that it goes with them when their folder is copied or
moved, and it can be written wherever they can. It is hidden: `ls`, `glob("*")` and `cp folder/*` do
not meet it, `os.listdir` does. One rank alone makes none.

Whatever dies in between, a checkpoint and its set match: the set of the new save is complete before
the checkpoint is replaced, and the set of the old one is removed after that. Ranks that share no
disk find their own part on their own.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import PurePosixPath
from typing import Any

from fsspec.core import url_to_fs  # type: ignore[import-untyped]

from lightning_commfree.checkpoint.rank_parts import Key, Owner, by_key, kinds_of, seal, unseal
from lightning_commfree.checkpoint.whole_files import FilePath, read_whole, write_whole

KEY = "lightning_commfree"  # of a checkpoint's entry
_ENTRY = {"ranks", "token", "place", "algorithm", "fingerprint", "own"}  # "own": rank 0's part
FOLDER = ".commfree"


class RankFiles:
    """The sets of one checkpoint.

    Args:
        checkpoint_path: of the `.ckpt`; local or whatever fsspec opens.
        weights_only: as `Trainer.fit` got it; None stands for True.
    """

    def __init__(self, checkpoint_path: FilePath, weights_only: bool | None = None) -> None:
        self._weights_only = weights_only is not False
        self._path = str(checkpoint_path)
        self._fs, _ = url_to_fs(self._path)
        self._name = f"{FOLDER}/{os.path.basename(self._path)}"
        self._root = self._below(self._path, self._name)

    def place(self, token: str) -> str:
        """Return the place of the set `token` beside a checkpoint."""
        return f"{self._name}/{token}"

    def enter(
        self,
        checkpoint: dict[str, Any],
        owner: Owner,
        algorithm: str,
        fingerprint: Mapping[str, str],
        part: dict[str, Any],
    ) -> set[Key]:
        """Let a checkpoint say of its ranks what a resume asks; rank 0's part goes into it.

        Args:
            checkpoint: gets it, under `KEY`.
            owner: rank 0, in this save.
            algorithm: its name.
            fingerprint: what must be as it is now for an exact resume.
            part: rank 0's, not sealed.

        Returns:
            The tensors to which the parts of the others may refer.
        """
        kinds = kinds_of(part)  # those of the others are the same
        known = {*by_key(checkpoint, kinds)}
        own = seal(owner, part, known)
        checkpoint[KEY] = {
            "ranks": owner.ranks,
            "token": owner.token,
            "place": self.place(owner.token),
            "algorithm": algorithm,
            "fingerprint": fingerprint,
            "own": own,
        }
        return known | by_key(own, kinds).keys()

    def save(self, owner: Owner, part: dict[str, Any], known: Collection[Key]) -> None:
        """Write the part of `owner`, not rank 0, into the set of its save.

        Args:
            owner: whose it is.
            part: tensors, which are not copied, and other values.
            known: as `enter` returned it on rank 0.

        Raises:
            RuntimeError: it cannot be written there.
        """
        sealed, file = seal(owner, part, known), f"{self._root}/{owner.token}/rank_{owner.rank}.pt"
        try:
            write_whole(sealed, file)
        except (OSError, RuntimeError) as error:
            raise RuntimeError(
                f"Rank {owner.rank} cannot write its part of a checkpoint to {file!r}: {error}"
                " Every rank writes beside the checkpoint, on its machine's own disk where none is"
                " shared. The folder must be one that can be written by that path on every machine."
            ) from error

    def find(self, place: str, rank: int) -> str | None:
        """Return the path of a rank's file of the set at `place`, None where there is none.

        A link to a checkpoint finds the set beside what it points to.

        Raises:
            RuntimeError: the place is none of a set's.
        """
        parts = PurePosixPath(place).parts
        if len(parts) != 3 or parts[0] != FOLDER or ".." in parts:
            raise RuntimeError(
                f"The checkpoint {self._path!r} names {place!r} as the place of its ranks' files."
                f" They lie below '{FOLDER}/' beside it and nowhere else, so it was not saved like"
                " this. Nothing was loaded; resume from another checkpoint."
            )
        for path in dict.fromkeys((self._path, os.path.realpath(self._path))):
            file = f"{self._below(path, place)}/rank_{rank}.pt"
            if self._fs.exists(file):
                return file
        return None

    def read(self, file: str) -> Any:
        """Return what a rank's file holds.

        Raises:
            RuntimeError: it cannot be read.
        """
        return read_whole(file, self._weights_only)

    def keep_only(self, token: str, spare: int = 0) -> None:
        """Remove the sets of earlier saves to this path; other ranks may do the same meanwhile.

        Args:
            token: of the latest save.
            spare: so many of the sets before it stay.
        """
        with suppress(OSError):  # no earlier save, or another rank is quicker
            folders = [str(folder).rstrip("/") for folder in self._fs.ls(self._root, detail=False)]
            earlier = [folder for folder in folders if os.path.basename(folder) != token]
            earlier.sort(key=lambda folder: folder.rpartition("-")[2])  # the time, in hexadecimals
            for folder in earlier[: len(earlier) - spare]:
                self._remove(folder)

    def remove(self) -> None:
        """Remove all sets of this checkpoint, and the common folder with the last one."""
        self._remove(self._root)
        with suppress(OSError):  # not empty: another checkpoint's sets, perhaps just being written
            self._fs.rmdir(os.path.dirname(self._root))

    def _remove(self, folder: str) -> None:
        # another rank on this disk may be quicker, which every file system says in its own way;
        # what stays is in nobody's way
        with suppress(OSError):
            self._fs.rm(folder, recursive=True)

    @staticmethod
    def _below(path: str, place: str) -> str:
        return f"{os.path.dirname(path) or '.'}/{place}"


class SavedParts:
    """The parts of all ranks of a checkpoint that was read.

    Args:
        checkpoint_path: where it was read.
        checkpoint: as it was read, before anybody changes it.
        weights_only: as `RankFiles` takes it.

    Attributes:
        entry: what the checkpoint says of its ranks; empty where it says nothing.

    Raises:
        RuntimeError: it says it in another way.
    """

    def __init__(
        self, checkpoint_path: FilePath, checkpoint: Mapping[str, Any], weights_only: bool | None
    ) -> None:
        self.entry: Mapping[str, Any] = checkpoint.get(KEY, {})
        if self.entry and not self.entry.keys() >= _ENTRY:
            raise RuntimeError(
                f"What the checkpoint {str(checkpoint_path)!r} says of its ranks, under {KEY!r},"
                " was written by another version. Load its weights alone (`load_from_checkpoint`),"
                " or resume with the version that has saved it."
            )
        self._files = RankFiles(checkpoint_path, weights_only)
        self._path = str(checkpoint_path)
        self._checkpoint = dict(checkpoint)

    def load(self, rank: int) -> Any:
        """Return what this rank had saved, None where its file is not there.

        Raises:
            RuntimeError: what is there is another rank's, of another save, or damaged.
        """
        owner = Owner(rank, self.entry["ranks"], self.entry["token"])
        if rank == 0:
            name = f"Rank 0's part in {self._path!r}"
            return unseal(self.entry["own"], owner, self._checkpoint, name)
        file = self._files.find(self.entry["place"], rank)
        if file is None:
            return None
        return unseal(self._files.read(file), owner, self._checkpoint, f"The file {file!r}")
