"""Ranks without a shared disk: each has a working directory of its own, and paths are relative."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_commfree import FSDPSettings
from lightning_commfree.layouts.fsdp import why_unavailable
from lightning_commfree.resume import copies
from lightning_commfree.strategies import ReplicaStrategy
from tests.fit.any_strategy import KINDS, Saving, Voter, fit, make_strategy, same
from tests.fit.models import Recorder, loader, quiet_trainer
from tests.fit.saved import file_of, part_of, resume_warnings
from tests.fit.test_fsdp import MIDDLE
from tests.fit.test_fsdp import fit as fit_fsdp
from tests.world import run_ranks

PATH = Path("saved/2.ckpt")


@contextmanager
def on_machine(folder: Path, machine: int) -> Iterator[None]:
    """Work in a folder that stands for the disk of a machine."""
    before, here = Path.cwd(), folder / f"machine_{machine}"
    here.mkdir(parents=True, exist_ok=True)
    os.chdir(here)
    try:
        yield
    finally:
        os.chdir(before)


def files_here() -> set[str]:
    return {file.name for file in Path().rglob("*") if file.is_file()}


class Relative(ModelCheckpoint):
    """Keeps its paths relative, and so on this rank's machine."""

    def __init__(self, folder: Path, *args: Any, **kwargs: Any) -> None:
        super().__init__(folder, *args, **kwargs)
        self.dirpath = str(folder)

    def _find_last_checkpoints(self, trainer: Any) -> set[str]:
        return {os.path.relpath(path) for path in super()._find_last_checkpoints(trainer)}


def last() -> Relative:
    return Relative(Path("kept"), save_last=True, every_n_train_steps=2)


def resume(kind: str, size: int, path: Path | str = PATH, *callbacks: Any, **on: Any) -> Recorder:
    return fit(kind, size, *callbacks, ckpt_path=path, on=on)


def two_machines(rank: int, size: int, folder: Path, kind: str) -> dict[str, Any]:
    with on_machine(folder, rank):
        straight = fit(kind, size, Saving(Path("saved/{step}.ckpt")))
        found: dict[str, Any] = {"files": files_here()}
        with resume_warnings() as said:
            resumed = resume(kind, size)
        found["same"] = same(straight.local[2:], resumed.local)
        found["left"] = files_here() - found["files"]

        fit(kind, size, last(), max_steps=3, on={"enable_checkpointing": True})
        with resume_warnings() as said_of_last:
            resumed = resume(kind, size, "last", last(), enable_checkpointing=True)
        found["last"] = same(straight.local[2:], resumed.local)
    torch.distributed.barrier()

    with on_machine(folder, 1 - rank):  # rank 0 is on the other machine now
        with resume_warnings() as said_of_moved:
            moved = resume(kind, size)
        found["moved"] = same(straight.local[2:], moved.local)
    return {**found, "said": said + said_of_last + said_of_moved}


@pytest.mark.parametrize("kind", KINDS)
def test_a_machine_without_the_checkpoint_resumes_exactly(kind: str, tmp_path: Path) -> None:
    first, second = run_ranks(two_machines, 2, tmp_path, tmp_path, kind)
    assert "2.ckpt" in first["files"]
    assert second["files"] == {"rank_1.pt"}
    for found in (first, second):
        assert found["same"]
        assert found["last"]
        assert found["moved"]
        assert not found["said"], "a resume that is not exact says so"
        assert not found["left"], "the copy is removed"


def own_folders(rank: int, size: int, folder: Path) -> tuple[set[str], bool, list[str]]:
    """Save into a folder per rank, as workers of Ray Train do, and resume from all in one."""
    mine, merged = folder / f"rank_{rank}", folder / "merged"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReplicaStrategy, "own_save_folders", True)
        straight = fit("diloco", size, Saving(mine / "{step}.ckpt"))
    files = {file.name for file in mine.rglob("*") if file.is_file()}
    for part in range(size):
        if part == rank:
            shutil.copytree(mine, merged, dirs_exist_ok=True)
        torch.distributed.barrier()
    with resume_warnings() as said:
        resumed = resume("diloco", size, merged / "2.ckpt")
    return files, same(straight.local[2:], resumed.local), said


def test_folders_of_ranks_resume_exactly_when_they_are_merged(tmp_path: Path) -> None:
    for rank, (files, is_same, said) in enumerate(run_ranks(own_folders, 2, tmp_path, tmp_path)):
        assert ("rank_1.pt" in files, "2.ckpt" in files) == (rank == 1, rank == 0)
        assert is_same
        assert not said


def different(rank: int, size: int, folder: Path) -> list[str]:
    """Resume with another checkpoint on the second machine, and with a disk that takes none."""
    texts = []
    with on_machine(folder, rank):
        fit("lion", size, Saving(Path("saved/{step}.ckpt")))
        trainer = quiet_trainer(strategy=make_strategy("lion", size), devices=size)
        trainer.validate(Voter(), loader(4), ckpt_path=PATH, verbose=False)
        blocked = Path("blocked/2.ckpt")
        if rank == 0:
            shutil.copytree("saved", "blocked")
            shutil.copy("saved/1.ckpt", folder / "old.ckpt")
        torch.distributed.barrier()
        if rank == 1:
            shutil.move(folder / "old.ckpt", PATH)
            Path("blocked").write_text("a file where a folder should be")
        for path in (PATH, blocked):
            try:
                resume("lion", size, path)
                texts.append("no error")
            except RuntimeError as error:
                texts.append(str(error))
        found = sorted(Path().rglob("*received*"))
        assert not found
    return texts


def test_other_checkpoints_and_full_disks_are_named_on_all_ranks(tmp_path: Path) -> None:
    one, other = run_ranks(different, 2, tmp_path, tmp_path)
    assert one == other
    assert "saved/2.ckpt (rank 0) is not the same file as saved/2.ckpt (rank 1)" in one[0]
    assert "Rank 0 cannot send '2.ckpt' to another machine: [Errno" in one[1]
    assert "(on rank 1)" in one[1]


def momenta(path: Path, ranks: int) -> list[Tensor]:
    parts = [part_of(path, rank) for rank in range(ranks)]
    return [part["optimizers"][0]["state"][0]["momentum"] for part in parts]


def save_two(rank: int, size: int, folder: Path) -> None:
    with on_machine(folder, rank):
        fit("lion", size, Saving(Path("saved/{step}.ckpt")), max_steps=2)


def resume_three(rank: int, size: int, folder: Path) -> tuple[list[str], Tensor]:
    with on_machine(folder, rank), resume_warnings() as said:
        recorder = FirstMomentum()
        resume("lion", size, PATH, recorder)
    return said, recorder.momentum


class FirstMomentum(Recorder):
    """Keeps the momentum with which the fit begins."""

    momentum: Tensor

    def on_train_start(self, trainer: Any, module: Any) -> None:
        state = trainer.optimizers[0].state
        self.momentum = state[next(iter(module.parameters()))]["momentum"].clone()


def test_a_new_machine_gets_the_rank_files_that_it_needs(tmp_path: Path) -> None:
    run_ranks(save_two, 2, tmp_path, tmp_path)
    one, two, three = run_ranks(resume_three, 3, tmp_path, tmp_path)
    everything = shutil.copytree(tmp_path / "machine_0", tmp_path / "all", dirs_exist_ok=True)
    shutil.copytree(tmp_path / "machine_1", everything, dirs_exist_ok=True)
    saved = momenta(everything / PATH, 2)
    assert "workers from index 2 start with the mean of all" in one[0][0]
    assert torch.equal(one[1], saved[0])
    assert torch.equal(two[1], saved[1])
    torch.testing.assert_close(three[1], (saved[0] + saved[1]) / 2)
    assert file_of(tmp_path / "machine_2" / PATH, 1).is_file()


def lose_a_machine(rank: int, size: int, folder: Path) -> list[str]:
    with on_machine(folder, 0), resume_warnings() as said:
        resume("lion", size)
    return said


def test_a_lost_machine_takes_its_rank_files_with_it(tmp_path: Path) -> None:
    run_ranks(save_two, 2, tmp_path, tmp_path)
    ((said,),) = run_ranks(lose_a_machine, 1, tmp_path, tmp_path)
    assert "it was saved by 2 ranks, but this fit has 1" in said


def folders(rank: int, size: int, folder: Path) -> tuple[bool, set[str]]:
    """Two replicas of two ranks: those of a replica share a disk."""
    always = FSDPSettings(folder_above_bytes=0)
    with on_machine(folder, rank // 2), pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.fit.test_fsdp.ModelCheckpoint", Relative)
        straight = fit_fsdp(rank, size, Path("saved"), inside=always)
        before = files_here()
        resumed = fit_fsdp(rank, size, inside=always, ckpt_path=f"saved/step={MIDDLE}.ckpt")
        return same(straight["local"][MIDDLE:], resumed["local"]), files_here() - before


@pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
def test_a_folder_is_sent_once_to_each_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "CHUNK_BYTES", 1000)  # several pieces of each file
    for is_same, left in run_ranks(folders, 4, tmp_path, tmp_path):
        assert is_same
        assert not left
