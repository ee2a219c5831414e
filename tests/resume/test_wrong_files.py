"""A file of another rank, step or run, or a damaged one, is refused by name, on all ranks.

Of single damaged bytes none changes what is loaded."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_commfree import DistributedLion
from lightning_commfree.resume.exact import Save
from tests.fit.any_strategy import Saving, fit, make_strategy, same
from tests.fit.saved import file_of, sets_of
from tests.resume.damage import checkpoints, damages, outcomes
from tests.world import run_ranks

SIZE = 3


def swapped(here: Path, _: Path) -> None:
    one, two = file_of(here / "2.ckpt", 1), file_of(here / "2.ckpt", 2)
    whole = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(whole)


def copied(here: Path, _: Path) -> None:
    shutil.copy(file_of(here / "2.ckpt", 2), file_of(here / "2.ckpt", 1))


def of_another_step(here: Path, _: Path) -> None:
    shutil.copy(file_of(here / "1.ckpt", 1), file_of(here / "2.ckpt", 1))


def of_another_run(here: Path, other: Path) -> None:
    shutil.copy(file_of(other / "2.ckpt", 1), file_of(here / "2.ckpt", 1))


def rewritten(path: Path, change: Callable[[Any], None]) -> None:
    state = torch.load(path, weights_only=True)
    change(state)
    torch.save(state, path)


def placed(place: str) -> Callable[[Path, Path], None]:
    def change(checkpoint: Any) -> None:
        checkpoint["lightning_commfree"]["folder"] = place

    def put(here: Path, other: Path) -> None:
        shutil.copytree(sets_of(other / "2.ckpt"), here.parent / "elsewhere", dirs_exist_ok=True)
        rewritten(here / "2.ckpt", change)

    return put


def of_a_stranger(here: Path, _: Path) -> None:
    torch.save({"weights": torch.ones(3)}, file_of(here / "2.ckpt", 1))


CASES: dict[str, tuple[Callable[[Path, Path], None], str]] = {  # and what is said
    "swapped": (swapped, "rank_1.pt' cannot be used: it contains the state of rank 2 of 3"),
    "copied": (copied, "but the state of rank 1 of 3 in save"),
    "another step's": (of_another_step, "it contains the state of rank 1 of 3 in save '1-"),
    "another run's": (of_another_run, "it contains the state of rank 1 of 3 in save '2-"),
    "foreign": (of_a_stranger, "rank_1.pt' cannot be used: it is not a rank file"),
    "absolute": (placed("/tmp/a/b"), "says its rank files are in '/tmp/a/b'"),
    "above": (placed(".commfree/../../elsewhere"), "they must be in '.commfree/' next to it"),
    "aside": (placed(".commfree/2.ckpt/.."), "its rank files are in '.commfree/2.ckpt/..'"),
}


def resume_all(rank: int, size: int, folder: Path, kind: str) -> dict[str, str]:
    for run in ("run", "other"):
        fit(kind, size, Saving(folder / run / "{step}.ckpt"), max_steps=3)
    texts = {}
    for name, (spoil, _) in CASES.items():
        here = folder / "spoiled" / name
        if rank == 0:
            shutil.copytree(folder / "run", here)
            spoil(here, folder / "other")
        torch.distributed.barrier()
        try:
            fit(kind, size, ckpt_path=here / "2.ckpt")
            texts[name] = "no error"
        except RuntimeError as error:
            texts[name] = str(error)
    return texts


def test_wrong_files_are_refused_by_name_on_all_ranks(tmp_path: Path) -> None:
    ranks = run_ranks(resume_all, SIZE, tmp_path, tmp_path, "lion")
    for name, (_, expected) in CASES.items():
        texts = [found[name] for found in ranks]
        assert expected in texts[0], name
        assert all("Nothing was loaded" in text for text in texts), texts
        assert all("another checkpoint" in text for text in texts), texts


def test_no_damaged_byte_changes_what_is_loaded(tmp_path: Path) -> None:
    """A sample; `python -m tests.resume.damage 2000` damages more."""
    found, overlooked = checkpoints(tmp_path), 0
    for name, checkpoint in found.items():
        ends = outcomes(checkpoint, 16)
        assert set(ends) <= {"refused", "same"}, (name, ends)
        assert ends["refused"] > 4, (name, ends)
    path = found["file of two ranks"].path
    plainly, whole = torch.load(path, weights_only=True), path.read_bytes()
    for damaged in damages(whole, 50):
        path.write_bytes(damaged)
        with suppress(Exception):  # torch has noticed it too, in any of its ways
            overlooked += not same(torch.load(path, weights_only=True), plainly)
    assert overlooked > 2, "torch's own reader lets some pass, or there is nothing to test"


def test_a_file_without_checksums_is_read(tmp_path: Path) -> None:
    if not hasattr(torch.serialization, "set_crc32_options"):
        pytest.skip("this release of torch always writes checksums")
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"x": torch.arange(5)}, tmp_path / "a.ckpt")
    finally:
        torch.serialization.set_crc32_options(True)
    loaded = make_strategy("lion", 1).load_checkpoint(tmp_path / "a.ckpt")
    assert torch.equal(loaded["x"], torch.arange(5))


def test_an_entry_of_another_version_is_refused(tmp_path: Path) -> None:
    old = {"lightning_commfree": {"folder": "replicas/a.ckpt/1-a", "ranks": 2, "fingerprint": {}}}
    with pytest.raises(RuntimeError, match=r"was written by another version of"):
        Save(tmp_path / "a.ckpt", old, None)


def after_a_step() -> tuple[nn.Linear, DistributedLion]:
    model = nn.Linear(3, 2)
    optimizer = DistributedLion(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda s: s[0].update(momentum=torch.ones(3, 2)), r"but the state has torch.float32"),
        (lambda s: s[1].update(momentum=torch.ones(2).bfloat16()), "has torch.bfloat16 of shape"),
        (lambda s: s.update({0: {"exp_avg": torch.ones(2, 3)}}), "the state has only 'exp_avg'"),
    ],
)
def test_momenta_of_another_kind_are_refused(change: Any, found: str) -> None:
    _, optimizer = after_a_step()
    state = optimizer.state_dict()
    change(state["state"])
    _, other = after_a_step()
    before = {k: v["momentum"].clone() for k, v in other.state_dict()["state"].items()}
    with pytest.raises(ValueError, match=found):
        other.load_state_dict(state)
    assert all(
        torch.equal(v["momentum"], before[k]) for k, v in other.state_dict()["state"].items()
    )


def test_momenta_of_before_the_first_step_are_none() -> None:
    fresh = DistributedLion(nn.Linear(3, 2).parameters())
    _, other = after_a_step()
    other.load_state_dict(fresh.state_dict())
    assert not other.state_dict()["state"]


def no_momenta(rank: int, size: int, folder: Path) -> list[str]:
    """Go on from a plain Trainer's checkpoint without momenta, and with one of another shape."""
    fit("lion", size, Saving(folder / "{step}.ckpt"), max_steps=2)
    texts = []
    for change in (lambda states: states.clear(), lambda s: s[0].update(momentum=torch.ones(5))):

        def changed(checkpoint: Any, change: Any = change) -> None:
            checkpoint.pop("lightning_commfree")
            change(checkpoint["optimizer_states"][0]["state"])

        path = shutil.copy(folder / "2.ckpt", folder / "changed.ckpt")
        rewritten(path, changed)
        try:
            fit("lion", size, ckpt_path=path)
            texts.append("no error")
        except ValueError as error:
            texts.append(str(error))
    return texts


def test_a_resume_without_momenta_is_refused(tmp_path: Path) -> None:
    ((none, wrong),) = run_ranks(no_momenta, 1, tmp_path, tmp_path)
    assert "was saved after 2 steps, but its optimizer state has no momentum buffers" in none
    assert "but the state has torch.float32 of shape [5]" in wrong
