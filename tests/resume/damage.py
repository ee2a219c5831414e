"""Damage single bytes of every kind of checkpoint file, and count what a resume makes of them:

python -m tests.resume.damage 2000
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.ledger import Ledger
from lightning_commfree.resume.exact import Save
from lightning_commfree.resume.folders import read_folder_tensors, write_folder
from tests.fit.any_strategy import Saving, fit, make_strategy, same
from tests.fit.saved import file_of
from tests.world import run_ranks

ENDS = 600, 3000  # bytes at the beginning and end of a file that hold the archive's own records


@dataclass
class Checkpoint:
    """A checkpoint, the kind of strategy that reads it, and one of its files."""

    path: Path
    kind: str
    ranks: int
    file: Path

    def read(self) -> Any:
        """Return all that the ranks take from the checkpoint at a resume."""
        checkpoint = make_strategy(self.kind, 1).load_checkpoint(self.path)
        checkpoint = read_folder_tensors(checkpoint)
        save = Save(self.path, checkpoint, None)
        return checkpoint, [save.own_state(rank) for rank in range(self.ranks)]


def save_two(rank: int, size: int, folder: Path) -> None:
    fit("diloco", size, Saving(folder / "diloco.ckpt"), max_steps=3)
    fit("domino", size, Saving(folder / "domino.ckpt"), max_steps=3)
    mesh, channel = init_device_mesh("cpu", (size,)), Channel.open([[0, 1]], rank, Ledger())
    matrix = torch.arange(60.0).reshape(10, 6)
    state = {
        "state_dict": {"w": distribute_tensor(matrix, mesh, [Shard(0)]), "b": torch.ones(3)},
        "optimizer_states": [{"state": {0: {"m": distribute_tensor(-matrix, mesh, [Shard(0)])}}}],
        "lightning_commfree": torch.load(folder / "diloco.ckpt")["lightning_commfree"],
    }
    write_folder(state, folder / "folder.ckpt", channel)
    channel.close()


def save_one(rank: int, size: int, folder: Path) -> None:
    fit("diloco", size, Saving(folder / "one.ckpt"), max_steps=3)


def checkpoints(place: Path) -> dict[str, Checkpoint]:
    """Save one checkpoint of every kind; return each of their files by name."""
    folder = place / "saved"
    run_ranks(save_two, 2, place, folder)
    run_ranks(save_one, 1, place, folder)
    one, diloco, domino, sharded = (
        folder / f"{name}.ckpt" for name in ("one", "diloco", "domino", "folder")
    )
    files = sorted(file for file in sharded.rglob("*") if file.is_file())
    return {
        "file of one rank": Checkpoint(one, "diloco", 1, one),
        "file of two ranks": Checkpoint(diloco, "diloco", 2, diloco),
        "rank file": Checkpoint(diloco, "diloco", 2, file_of(diloco, 1)),
        "mapped file": Checkpoint(domino, "domino", 2, domino),
        **{f"folder: {file.name}": Checkpoint(sharded, "domino", 1, file) for file in files},
    }


def damages(whole: bytes, count: int, seed: int = 7) -> Iterator[bytes]:
    """Yield `count` copies with one other byte, half of them with one other bit.

    Every second place is at an end of the file, where the archive keeps its own records.
    """
    draw, size = random.Random(seed), len(whole)
    first, last = ENDS
    ends = sorted({*range(min(first, size)), *range(max(size - last, 0), size)})
    for i in range(count):
        place = draw.choice(ends) if i % 2 else draw.randrange(size)
        change = 1 << draw.randrange(8) if i // 2 % 2 else draw.randrange(1, 256)
        yield whole[:place] + bytes([whole[place] ^ change]) + whole[place + 1 :]


def outcomes(checkpoint: Checkpoint, count: int) -> Counter[str]:
    """Damage a file `count` times; count outcomes: "refused", "same" or a fault."""
    expected, whole, found = checkpoint.read(), checkpoint.file.read_bytes(), Counter[str]()
    for damaged in damages(whole, count):
        checkpoint.file.write_bytes(damaged)
        try:
            outcome = "same" if same(checkpoint.read(), expected) else "SILENT"
        except RuntimeError as error:
            text = str(error)
            file = checkpoint.file  # a tensor's shards are in the files of several ranks
            names = any(str(one) in text for one in (file, file.with_name(f"*{file.suffix}")))
            is_ours = names and "Nothing was loaded" in text
            outcome = "refused" if is_ours else f"RAW {error!r}"
        except BaseException as error:  # noqa: BLE001 - torch has one of these, too
            outcome = f"RAW {error!r}"
        found[outcome] += 1
    checkpoint.file.write_bytes(whole)
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        found = checkpoints(Path(place))
        for name, checkpoint in found.items():
            print(f"{name:24}", dict(outcomes(checkpoint, int(sys.argv[1]) // len(found))))


if __name__ == "__main__":
    main()
