"""Checkpoints that are folders: each rank of a replica writes its shards, without a gather."""

from __future__ import annotations

import os
import pickle
import runpy
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from lightning_commfree import (
    DistributedLionStrategy,
    DominoTPStrategy,
    FSDPSettings,
    StreamingDiLoCoStrategy,
)
from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.ledger import Ledger
from lightning_commfree.layouts.fsdp import why_unavailable
from lightning_commfree.model.shards import full_tensor
from lightning_commfree.resume import folders
from lightning_commfree.resume.checkpoint_io import AtomicCheckpointIO
from lightning_commfree.resume.folders import is_folder, read_folder, write_folder
from tests.fit.any_strategy import same
from tests.fit.causal_lm import CausalLM
from tests.fit.causal_lm import loader as words
from tests.fit.models import assert_same, loader, quiet_trainer, rank_loader
from tests.fit.test_fsdp import BATCH, MIDDLE, SETTINGS, STEPS, Uneven, fit, weights
from tests.fit.test_fsdp_models import OnMeta
from tests.mortal import run_mortals
from tests.world import run_ranks

WHY_NOT = why_unavailable()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

ALWAYS = FSDPSettings(folder_above_bytes=0)
NEVER = FSDPSettings(folder_above_bytes=1e9)


def shards_of(folder: Path) -> Path:
    """Return the subfolder with a checkpoint's shards."""
    (shards,) = (entry for entry in folder.iterdir() if entry.is_dir())
    return shards


def trained(rank: int, size: int, inside: Any, folder: Path | None = None, **changes: Any) -> Any:
    return fit(rank, size, folder, inside=inside, wire_dtype="fp4", **changes)


def save_both_ways(rank: int, size: int, place: Path) -> dict[str, Any]:
    ways = {"file": NEVER, "folder": ALWAYS}
    return {way: trained(rank, size, inside, place / way) for way, inside in ways.items()}


def load_every_way(rank: int, size: int, place: Path, saved: Path, one: Path) -> dict[str, Any]:
    played: dict[str, Any] = {
        "resumed": trained(rank, size, ALWAYS, place / "resumed", ckpt_path=saved),
        "from one file": trained(rank, size, "fsdp", ckpt_path=one),
        "ddp": trained(rank, size, "ddp", ckpt_path=saved),
        "four": trained(rank, size, ALWAYS, replica_size=4, ckpt_path=saved),
        "validated": {},
    }
    for inside in ("fsdp", "ddp"):
        strategy = StreamingDiLoCoStrategy(**SETTINGS, inside=inside)
        trainer = quiet_trainer(strategy=strategy, devices=size)
        module, data = Uneven(), loader(4 * size)
        (found,) = trainer.validate(module, data, ckpt_path=saved, verbose=False)
        played["validated"][inside] = found["val_loss"], weights(module)
    return played


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The fits of each rank, and the folder of their checkpoints."""
    place, four = tmp_path_factory.mktemp("saved"), tmp_path_factory.mktemp("four")
    first = run_ranks(save_both_ways, 4, four, place)
    saved = place / "folder" / f"step={MIDDLE}.ckpt"
    one = saved.with_name("one.ckpt")
    with pytest.MonkeyPatch.context() as patch:  # as `python -m` does
        patch.setattr(sys, "argv", [folders.__name__, str(saved), str(one)])
        runpy.run_module(folders.__name__, run_name="__main__")
    then = run_ranks(load_every_way, 4, four, place, saved, one)
    return [{**ours, **again} for ours, again in zip(first, then, strict=True)], place


@pytest.mark.parametrize("step", [3, MIDDLE, STEPS])
def test_a_folder_holds_what_a_file_does(played: Any, step: int) -> None:
    place = played[1]
    folder, file = (place / how / f"step={step}.ckpt" for how in ("folder", "file"))
    assert is_folder(folder)
    assert file.is_file()
    got, expected = read_folder(folder), torch.load(file, weights_only=True)
    for one in (got, expected):  # token and own time: another save
        one.pop("lightning_commfree")
        one.pop("callbacks")
    assert str(got["loops"]) == str(expected["loops"])
    for key in ("state_dict", "optimizer_states"):
        torch.testing.assert_close(got[key], expected[key], rtol=0, atol=0)
    (state,) = got["optimizer_states"]
    assert set(state["state"]) == set(expected["optimizer_states"][0]["state"]), "numbers"


def test_sharded_tensors_are_in_the_shard_files_only(played: Any) -> None:
    folder = played[1] / "folder" / f"step={MIDDLE}.ckpt"
    shards = shards_of(folder)
    assert {*folder.iterdir()} == {folder / "checkpoint.pt", shards}
    assert {file.name for file in shards.iterdir()} == {".metadata", "__0_0.distcp", "__1_0.distcp"}
    rest = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert rest["state_dict"]["head.weight"] == {"in the folder": "state_dict.head.weight"}
    stored = FileSystemReader(shards).read_metadata().state_dict_metadata["state_dict.tied.weight"]
    assert [tuple(chunk.sizes) for chunk in stored.chunks] == [(4, 7), (3, 7)]


@pytest.mark.parametrize("how", ["resumed", "from one file"])
def test_a_resume_is_exact(played: Any, how: str) -> None:
    for rank in played[0]:
        straight, resumed = rank["folder"], rank[how]
        assert len(resumed["local"]) == STEPS - MIDDLE
        assert_same(resumed["local"], straight["local"][MIDDLE:])
        assert all(
            torch.equal(rank["file"]["final"][name], tensor)
            for name, tensor in straight["final"].items()
        )


@pytest.mark.parametrize("how", ["ddp", "four"])
def test_another_layout_resumes_from_the_weights(played: Any, how: str) -> None:
    assert all(len(rank[how]["local"]) == STEPS - MIDDLE for rank in played[0])
    assert all(value.isfinite().all() for value in played[0][0][how]["final"].values())


@pytest.mark.parametrize("inside", ["fsdp", "ddp"])
def test_a_folder_is_validated(played: Any, inside: str) -> None:
    saved = torch.load(played[1] / "file" / f"step={MIDDLE}.ckpt", weights_only=True)["state_dict"]
    module = Uneven()
    module.load_state_dict(saved)
    (found,) = quiet_trainer(devices=1).validate(module, loader(16), verbose=False)
    for rank in played[0]:
        loss, held = rank["validated"][inside]
        assert loss == pytest.approx(found["val_loss"], rel=1e-6)
        assert all(torch.equal(tensor, saved[name]) for name, tensor in held.items())


class Elsewhere(pl.Callback):
    """In one save rank 1 writes to a disk of its own, and in one to a disk that is full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, own: Path) -> None:
        self.monkeypatch, self.own = monkeypatch, own
        self.texts: list[str] = []

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, i: int
    ) -> None:
        path, writer = self.own.parent / "last.ckpt", FileSystemWriter
        if i == 2:
            trainer.save_checkpoint(path)
        elif i in (4, 5) and module.global_rank == 1:
            wrong = self.full if i == 5 else lambda path: writer(self.own)
            self.monkeypatch.setattr(folders, "FileSystemWriter", wrong)
        if i in (4, 5):
            with pytest.raises(RuntimeError) as error:
                trainer.save_checkpoint(path)
            self.texts.append(str(error.value))
        self.monkeypatch.setattr(folders, "FileSystemWriter", writer)

    def full(self, path: Path) -> Any:
        return FileSystemWriter("/dev/full/x")


def misfortunes(rank: int, size: int, place: Path) -> dict[str, Any]:
    monkeypatch = pytest.MonkeyPatch()
    elsewhere = Elsewhere(monkeypatch, place / "of rank 1")
    saves = ModelCheckpoint(place / "kept", "{step}", every_n_train_steps=3, save_last=True)
    trainer = quiet_trainer(
        strategy=StreamingDiLoCoStrategy(**SETTINGS, inside=ALWAYS),
        devices=size,
        max_steps=9,
        enable_checkpointing=True,
        callbacks=[saves, elsewhere],
    )
    trainer.fit(Uneven(), rank_loader(STEPS * BATCH * size, BATCH, rank, size))
    found = {"texts": elsewhere.texts, "kept": sorted(os.listdir(place / "kept"))}
    torch.distributed.barrier()
    if rank == 1:
        (shards_of(place / "last.ckpt") / "__1_0.distcp").unlink()
    torch.distributed.barrier()
    with pytest.raises((RuntimeError, OSError)) as error:
        fit(rank, size, inside=ALWAYS, ckpt_path=place / "last.ckpt")
    return {**found, "damaged": str(error.value)}


def test_a_save_that_fails_leaves_the_one_before(tmp_path: Path) -> None:
    place = tmp_path / "saved"
    for found in run_ranks(misfortunes, 4, tmp_path, place):
        apart, full = found["texts"]
        assert "all ranks of a replica must write to a shared disk" in apart
        assert "__1_0.distcp" in apart
        assert "cannot be written" in full
        assert "(rank 1)" in full
        assert found["kept"] == [".commfree", "last.ckpt", "step=9.ckpt"], "nothing half-written"
        assert "__1_0.distcp" in found["damaged"]


def models(rank: int, size: int, place: Path) -> dict[str, Any]:
    """A GPT-2 on `meta`: Lion resumes a folder of its own, and Domino one of DiLoCo's."""
    played: dict[str, Any] = {}
    lion = DistributedLionStrategy(node_size=2, inside=ALWAYS)
    lion_again = DistributedLionStrategy(node_size=2, inside=ALWAYS)
    diloco = StreamingDiLoCoStrategy(sync_every=2, replica_size=2, inside=ALWAYS)
    domino = DominoTPStrategy(tensor_parallel_size=2)
    for name, strategy, resumed in (
        ("lion", lion, None),
        ("lion again", lion_again, "lion"),
        ("diloco", diloco, None),
        ("domino", domino, "diloco"),
    ):
        save = ModelCheckpoint(place / name, "{step}", every_n_train_steps=3)
        torch.manual_seed(3)
        is_lion = name.startswith("lion")
        module = CausalLM("gpt2") if name == "domino" else OnMeta("gpt2", is_lion)
        begun = Begun()
        trainer = quiet_trainer(
            strategy=strategy,
            devices=size,
            max_steps=3 if resumed is None else 4,
            enable_checkpointing=resumed is None,
            callbacks=[begun] if resumed else [save],
            num_sanity_val_steps=0,
        )
        path = None if resumed is None else place / resumed / "step=3.ckpt"
        trainer.fit(module, words(16 * BATCH, BATCH), ckpt_path=path)
        played[name] = begun.state
    return played


class Begun(pl.Callback):
    """Keeps the state with which training begins."""

    state: dict[str, Any]

    def __init__(self) -> None:
        self.state = {}

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.state = {key: full_tensor(value).clone() for key, value in module.state_dict().items()}


def test_models_on_meta_and_other_strategies_read_it(tmp_path: Path) -> None:
    place = tmp_path / "saved"
    ranks = run_ranks(models, 4, tmp_path, place)
    lion, diloco = (
        read_folder(place / name / "step=3.ckpt")["state_dict"] for name in ("lion", "diloco")
    )
    norm = "wrapped.lm.transformer.ln_f.weight"
    assert not torch.equal(lion[norm], diloco[norm])
    for found in ranks:
        for name, tensor in found["lion again"].items():
            assert torch.equal(tensor, lion[name]), name
        assert torch.equal(found["domino"][norm], diloco[norm])


class Runs:
    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


def test_reading_runs_no_code(played: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(played[1] / "folder" / f"step={MIDDLE}.ckpt", tmp_path / "a.ckpt")
    shards = shards_of(folder)
    (shards / ".metadata").write_bytes(pickle.dumps(Runs()))
    with pytest.raises(RuntimeError, match=r"\.metadata' cannot be read.* it is corrupted"):
        read_folder(folder)
    rest = torch.load(folder / "checkpoint.pt", weights_only=True)
    rest[folders.TOKEN] = (*rest[folders.TOKEN][:2], folders._checksum(shards))
    torch.save(rest, folder / "checkpoint.pt")
    with pytest.raises(RuntimeError, match=r"`posix\.system`, which is not an allowed type"):
        read_folder(folder)
    pickle.loads(pickle.dumps(Runs()))
    assert (tmp_path / "ran").exists(), "it would have been seen"


def test_a_path_that_is_no_checkpoint_folder_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        folders.main([str(tmp_path), str(tmp_path / "one.ckpt")])
    said = capsys.readouterr().err
    assert "is not a checkpoint folder: it must contain `checkpoint.pt`" in said
    with pytest.raises(TypeError, match="`folder_above_bytes='20e9'` must be a number of bytes"):
        FSDPSettings(folder_above_bytes="20e9")  # type: ignore[arg-type]
    for size in (-1, float("nan")):
        with pytest.raises(ValueError, match="must be a number of bytes"):
            FSDPSettings(folder_above_bytes=size)


@pytest.mark.parametrize(
    ("file", "said"),
    [("__1_0.distcp", r"distcp' cannot be read.*a different save"), (".metadata", "is corrupted")],
)
def test_files_of_two_saves_are_no_checkpoint(
    played: Any, tmp_path: Path, file: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """They have the same names and sizes: an interrupted copy over an older folder leaves them."""
    saved = [played[1] / "folder" / f"step={step}.ckpt" for step in (3, MIDDLE)]
    folder = shutil.copytree(saved[0], tmp_path / "a.ckpt")
    read_folder(folder)
    shutil.copy(shards_of(saved[1]) / file, shards_of(folder) / file)
    with pytest.raises(RuntimeError, match=said):
        read_folder(folder)
    with pytest.raises(SystemExit, match="1"):
        folders.main([str(folder), str(tmp_path / "one.ckpt")])
    assert "Nothing was loaded" in capsys.readouterr().err


@pytest.mark.parametrize("file", [".metadata", "checkpoint.pt", "__0_0.distcp"])
def test_a_missing_file_is_named(played: Any, tmp_path: Path, file: str) -> None:
    folder = shutil.copytree(played[1] / "folder" / f"step={MIDDLE}.ckpt", tmp_path / "a.ckpt")
    (found,) = folder.rglob(file)
    found.unlink()
    with pytest.raises(RuntimeError, match=f"{found}' cannot be read"):
        AtomicCheckpointIO().load_checkpoint(folder)


def plain_folder(number: float) -> Any:
    return {"global_step": number, "state_dict": {"w": torch.full((3,), number)}}


def killed_at(
    rank: int, size: int, path: Path, name: str, owner: Any, call: int, after: bool
) -> None:
    """Replace a folder, and be killed before or after a certain call of a function."""
    write_folder(plain_folder(1), path, Channel([0], 0, Ledger()))
    function, calls = getattr(owner, name), 0

    def mortal(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        done = function(*args)
        if calls == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, mortal)
        write_folder(plain_folder(2), path, Channel([0], 0, Ledger()))


# the renames of the second save: of `checkpoint.pt` in the hidden folder, of the subfolder, of
# `checkpoint.pt`; then earlier subfolders and the hidden folder are removed
@pytest.mark.parametrize(
    ("name", "owner", "call", "after", "left"),
    [
        ("replace", os, 2, False, 1),
        ("replace", os, 2, True, 1),
        ("replace", os, 3, False, 1),
        ("replace", os, 3, True, 2),
        ("_remove", folders, 2, True, 2),
    ],
)
def test_a_kill_in_a_save_leaves_a_whole_checkpoint_of_its_name(
    name: str, owner: Any, call: int, after: bool, left: int, tmp_path: Path
) -> None:
    path = tmp_path / "saved" / "last.ckpt"
    (end,) = run_mortals(killed_at, 1, tmp_path, path, name, owner, call, after)
    assert end.exit_code == -signal.SIGKILL, end
    assert same(read_folder(path), plain_folder(left))
    write_folder(plain_folder(3), path, Channel([0], 0, Ledger()))
    assert same(read_folder(path), plain_folder(3))
    assert os.listdir(path.parent) == ["last.ckpt"]
    assert len(os.listdir(path)) == 2, "the checkpoint and one subfolder"
