"""A checkpoint file is replaced whole or not at all: when a rank is killed in the middle of a save,
on another file system than that of temporary files too, and when the disk is full."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from lightning_commfree import FSDPSettings, StreamingDiLoCoStrategy
from lightning_commfree.resume.checkpoint_io import AtomicCheckpointIO
from lightning_commfree.resume.files import _Sink, write_atomic
from tests.fit.any_strategy import KINDS, TIMEOUT, Saving, fit, make_strategy, same
from tests.fit.models import Tiny, loader, quiet_trainer
from tests.fit.saved import sets_of
from tests.mortal import run_mortals
from tests.world import run_ranks

SIZE = 2
MEMORY = Path("/dev/shm")  # a tmpfs on Linux


@pytest.fixture
def another_file_system() -> Iterator[Path]:
    temporary = os.stat(tempfile.gettempdir()).st_dev
    if not MEMORY.is_dir() or os.stat(MEMORY).st_dev == temporary:
        pytest.skip(f"{MEMORY} is not there, or no other file system than temporary files have")
    folder = Path(tempfile.mkdtemp(dir=MEMORY))
    yield folder
    shutil.rmtree(folder)


def save_and_die(rank: int, size: int, folder: Path, kind: str, on: dict[str, Any]) -> None:
    """Rank 0 is killed when half of its second save is written, by whoever writes or moves it."""
    path, saving = folder / "last.ckpt", {"steps": 0}

    class Second(Saving):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            saving["steps"] += 1
            super().on_train_batch_end(trainer, *args)

    def mortal_write(sink: _Sink, data: Any) -> int:
        if rank == 0 and saving["steps"] == 2 and memoryview(data).nbytes > 64:
            write(sink, bytes(data)[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return write(sink, data)

    def mortal_move(source: Any, target: Any, *args: Any) -> Any:
        if rank == 0 and saving["steps"] == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return move(source, target, *args)

    write, move = _Sink.write, shutil._fastcopy_sendfile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Sink, "write", mortal_write)
        patch.setattr(shutil, "_fastcopy_sendfile", mortal_move)  # what a move to another disk does
        fit(kind, size, Second(path), on=on)


def go_on(rank: int, size: int, folder: Path, kind: str) -> Any:
    straight = fit(kind, size, Saving(folder / "straight" / "{step}.ckpt"))
    resumed = fit(kind, size, Saving(folder / "last.ckpt"), ckpt_path=folder / "last.ckpt")
    return straight.local[1:], resumed.local


@pytest.mark.parametrize("kind", ["diloco", "domino"])  # with files of the ranks, and without
def test_a_rank_killed_in_a_save_leaves_the_file_before(
    kind: str, another_file_system: Path, tmp_path: Path
) -> None:
    folder = another_file_system
    ends = run_mortals(save_and_die, SIZE, tmp_path, folder, kind, {}, timeout=TIMEOUT)
    assert ends[0].exit_code == -signal.SIGKILL, ends
    assert "rank 0 is gone" in ends[1].error
    assert torch.load(folder / "last.ckpt", weights_only=True)["global_step"] == 1
    assert sum(name.endswith(".writing") for name in os.listdir(folder)) == 1
    for straight, resumed in run_ranks(go_on, SIZE, tmp_path, folder, kind):
        assert len(resumed) == 3
        assert same(straight, resumed)
    assert not any(name.endswith(".writing") for name in os.listdir(folder))
    assert torch.load(folder / "last.ckpt", weights_only=True)["global_step"] == 4


def test_a_rank_killed_in_lightnings_own_save_leaves_an_empty_file(
    another_file_system: Path, tmp_path: Path
) -> None:
    """Else the test above could not fail; a plugin that a user gives is used as it is."""
    folder = another_file_system
    on = {"plugins": [TorchCheckpointIO()]}
    ends = run_mortals(save_and_die, SIZE, tmp_path, folder, "lion", on, timeout=TIMEOUT)
    assert ends[0].exit_code == -signal.SIGKILL, ends
    assert (folder / "last.ckpt").stat().st_size == 0


def too_large(rank: int, size: int, folder: Path, kind: str) -> Any:
    """The second save meets a limit, as it would meet the end of a disk."""

    class Limited(Saving):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 2:
                had = self.path.stat().st_size
                trainer.strategy.barrier()
                resource.setrlimit(resource.RLIMIT_FSIZE, (had // 2, resource.RLIM_INFINITY))
            super().on_train_batch_end(trainer, *args)

    try:
        fit(kind, size, Limited(folder / "last.ckpt"))
        return "no error"
    except RuntimeError as error:
        return str(error)
    finally:
        limit = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


@pytest.mark.parametrize("kind", ["lion", "domino"])
def test_a_disk_that_is_full_ends_all_ranks_with_a_sentence(kind: str, tmp_path: Path) -> None:
    texts = run_ranks(too_large, SIZE, tmp_path, tmp_path, kind)
    for text in texts:  # of whichever file was met first
        assert "cannot be written: OSError: [Errno 27] File too large. It needs 0." in text
        assert "MB missing)." in text
        assert "set another folder in `ModelCheckpoint(dirpath=...)`" in text
    assert texts[0] == texts[1]
    assert ("Rank 1 cannot write its rank file for a checkpoint" in texts[0]) == (kind != "domino")
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 1
    assert not list(tmp_path.rglob(".*.writing"))
    saves = [folder.name[:2] for folder in sets_of(tmp_path / "last.ckpt").glob("*")]
    assert saves == ["1-"], "no files of the save that failed"


def no_room(rank: int, size: int, folder: Path, place: str) -> str:
    """The first save fails: on rank 0, in its file, or in a folder that all ranks write."""

    def full(*_: Any, **__: Any) -> None:
        error = OSError if place.startswith("folders") else RuntimeError  # as `write_atomic` does
        raise error("No space left on device")

    class Full(Saving):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(f"lightning_commfree.resume.{place}", full)
                super().on_train_batch_end(trainer, *args)

    settings: dict[str, Any] = {"sync_every": 2, "replica_size": 2, "timeout": TIMEOUT}
    if place.startswith("folders"):
        settings["inside"] = FSDPSettings(folder_above_bytes=0)
    trainer = quiet_trainer(
        strategy=StreamingDiLoCoStrategy(**settings),
        devices=size,
        callbacks=[Full(folder / "last.ckpt")],
        max_steps=2,
    )
    try:
        trainer.fit(Tiny(), loader(40))
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("place", ["checkpoint_io.write_atomic", "folders._replace"])
def test_a_save_that_fails_leaves_nothing_behind(place: str, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    for text in run_ranks(no_room, SIZE, tmp_path, folder, place):
        assert "No space left on device" in text
    assert not folder.exists() or os.listdir(folder) == []


def fill_a_disk(rank: int, size: int, folder: Path) -> tuple[str, list[str]]:
    """Write to a small tmpfs in a mount namespace of this process's own."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, private, recursive = 0x20000, 1 << 18, 1 << 14
    if libc.unshare(new_mounts) or libc.mount(b"none", b"/", None, private | recursive, None):
        return "", []
    disk = folder / "disk"
    disk.mkdir()
    if libc.mount(b"none", str(disk).encode(), b"tmpfs", 0, b"size=1m"):
        return "", []
    write_atomic({"old": torch.ones(100_000)}, disk / "last.ckpt")
    try:
        write_atomic({"new": torch.ones(200_000), "more": torch.ones(50_000)}, disk / "last.ckpt")
        text = "no error"
    except RuntimeError as error:
        text = str(error)
    assert torch.equal(torch.load(disk / "last.ckpt")["old"], torch.ones(100_000))
    return text, os.listdir(disk)


def test_the_missing_space_of_a_full_disk_is_named(tmp_path: Path) -> None:
    ((text, files),) = run_ranks(fill_a_disk, 1, tmp_path, tmp_path)
    if not text:
        pytest.skip("a tmpfs can be mounted by root only")
    assert "OSError: [Errno 28] No space left on device. It needs 1.00 MB, but only 0.6" in text
    assert "MB missing). The existing file is unchanged." in text
    assert files == ["last.ckpt"]


def test_the_next_save_of_that_name_removes_a_half_written_file(tmp_path: Path) -> None:
    left = tmp_path / ".a.ckpt.writing"
    left.write_bytes(b"half")
    write_atomic({"x": 1}, tmp_path / "b.ckpt")
    assert left.exists(), "another writer may be at it"
    write_atomic({"x": 2}, tmp_path / "a.ckpt")
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt", "b.ckpt"]


def test_a_users_plugin_stays_and_an_asynchronous_one_writes_whole_files() -> None:
    theirs = TorchCheckpointIO()
    given = quiet_trainer(strategy=make_strategy("lion", 1), devices=1, plugins=[theirs])
    assert given.strategy.checkpoint_io is theirs
    for plugin in (AsyncCheckpointIO(), AsyncCheckpointIO(theirs)):
        for kind in KINDS:
            trainer = quiet_trainer(strategy=make_strategy(kind, 1), devices=1, plugins=[plugin])
            assert trainer.strategy.checkpoint_io is plugin
        inside = plugin.checkpoint_io
        assert type(inside) is AtomicCheckpointIO or inside is theirs
    assert type(make_strategy("domino", 1).checkpoint_io) is AtomicCheckpointIO


def test_other_file_systems_are_left_to_lightning(tmp_path: Path) -> None:
    state = {"x": torch.arange(5)}
    AtomicCheckpointIO().save_checkpoint(state, "memory://somewhere/a.ckpt")
    loaded = make_strategy("lion", 1).load_checkpoint("memory://somewhere/a.ckpt")
    assert torch.equal(loaded["x"], state["x"])
    AtomicCheckpointIO().save_checkpoint(state, f"file://{tmp_path}/deep/er/a.ckpt")
    assert os.listdir(tmp_path / "deep" / "er") == ["a.ckpt"]


def test_one_rank_leaves_checkpoints_only(tmp_path: Path) -> None:
    run_ranks(one_rank, 1, tmp_path, tmp_path / "saved")
    assert sorted(os.listdir(tmp_path / "saved")) == ["1.ckpt", "2.ckpt", "3.ckpt", "4.ckpt"]


def one_rank(rank: int, size: int, folder: Path) -> None:
    fit("diloco", size, Saving(folder / "{step}.ckpt"))


def test_a_mapped_checkpoint_is_read_where_it_is_used(tmp_path: Path) -> None:
    path, values = tmp_path / "a.ckpt", torch.arange(1000.0)
    io = AtomicCheckpointIO(maps=True)
    io.save_checkpoint({"w": values, "step": 3}, path)
    before = path.read_bytes()

    def mapped() -> bool:
        return str(path) in Path("/proc/self/maps").read_text()

    loaded = io.load_checkpoint(path)
    assert mapped()
    assert torch.equal(loaded["w"], values)
    assert loaded["step"] == 3
    loaded["w"].zero_()
    assert path.read_bytes() == before, "what a rank writes is its own"
    del loaded
    assert not mapped()

    kept = AtomicCheckpointIO().load_checkpoint(path)
    assert not mapped()
    assert torch.equal(kept["w"], values)
    with pytest.raises(FileNotFoundError, match="Checkpoint file not found"):
        io.load_checkpoint(tmp_path / "none.ckpt")
