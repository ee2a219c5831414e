"""The ranks of a job save as one: a part of each, and what goes with the checkpoints before."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from lightning_commfree.checkpoint.rank_files import RankFiles
from lightning_commfree.checkpoint.rank_parts import Key, Owner
from lightning_commfree.checkpoint.rank_state import Agreeing, Part, RankState, failing_as_one
from lightning_commfree.checkpoint.whole_files import FilePath


class Saving:
    """What the ranks save and remove.

    Args:
        ranks: as they tell each other.
    """

    def __init__(self, ranks: Agreeing) -> None:
        self._ranks = ranks
        self._removed: list[FilePath] = []  # checkpoints, by rank 0, since the last save

    def save(
        self,
        checkpoint: dict[str, Any],
        filepath: FilePath,
        step: int,
        algorithm: RankState,
        part: Part,
        write: Callable[[FilePath], None],
        later: bool = False,
    ) -> None:
        """Write the ranks' files, then the checkpoint, then remove the files of its predecessor.

        Collective.

        Args:
            checkpoint: gets rank 0's part.
            filepath: where to; rank 0's counts.
            step: optimizer steps done.
            algorithm: that keeps the ranks together.
            part: this rank's.
            write: writes `checkpoint`.
            later: it may still be writing when it returns.

        Raises:
            RuntimeError: a file cannot be written; on all ranks.
        """
        ranks = self._ranks
        # a file's name, and which one goes, may depend on a metric that is not the same everywhere
        token = f"{step}-{time.time_ns():x}"
        filepath, token, removed = ranks.broadcast((filepath, token, self._removed))
        # a name that is free again may be this one, whose files another rank writes already
        self._forget([path for path in removed if path != filepath])

        files, owner = RankFiles(filepath), Owner(ranks.rank, ranks.size, token)
        known: set[Key] = set()
        if owner.rank == 0:
            said = algorithm.name, algorithm.fingerprint()
            known = files.enter(checkpoint, owner, *said, part)
        known = ranks.broadcast(known)
        with failing_as_one(ranks):
            if owner.rank:
                files.save(owner, part, known)

        write(filepath)
        # one that is written later may not be there yet, and its predecessor still needs the set
        # before; by the next save it is taken to be there
        files.keep_only(token, spare=int(later))

    def remove(self, filepath: FilePath) -> None:
        """Remove the files of a checkpoint that rank 0 removes.

        Those on disks of other nodes go with the next save, or in `settle`.
        """
        if self._ranks.rank == 0:
            RankFiles(filepath).remove()
            self._removed.append(filepath)

    def settle(self) -> None:
        """Remove what is left to be removed; collective."""
        self._forget(self._ranks.broadcast(self._removed))

    def _forget(self, removed: list[FilePath]) -> None:
        """Remove this node's files of checkpoints that rank 0 has removed."""
        for path in removed:
            RankFiles(path).remove()
        self._removed = []
