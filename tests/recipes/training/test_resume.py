"""Which checkpoint a run goes on from."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from recipes.training import resume
from recipes.training.resume import find_checkpoint, resume_command


def _save(run: Path, name: str, step: int, age: int) -> Path:
    path = run / "checkpoints" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"global_step": step, "state_dict": {"x": torch.zeros(100)}}, path)
    os.utime(path, (1e9 - age, 1e9 - age))
    return path


def test_last_is_the_one_that_was_written_last(tmp_path) -> None:
    _save(tmp_path, "last.ckpt", step=20, age=2)  # of a stop, before the run went on
    _save(tmp_path, "step-90.ckpt", step=90, age=3)  # of an earlier run in this folder
    newest = _save(tmp_path, "step-30.ckpt", step=30, age=1)
    assert find_checkpoint("last", str(tmp_path), 60) == str(newest)


def test_one_that_was_cut_short_is_passed_over(tmp_path) -> None:
    whole = _save(tmp_path, "step-30.ckpt", step=30, age=2)
    cut = _save(tmp_path, "last.ckpt", step=40, age=1)
    cut.write_bytes(cut.read_bytes()[:-100])
    with pytest.warns(UserWarning, match=r"last.ckpt' is truncated and was skipped"):
        assert find_checkpoint("last", str(tmp_path), 60) == str(whole)
    whole.unlink()
    with (
        pytest.warns(UserWarning, match="truncated"),
        pytest.raises(FileNotFoundError, match="ckpt_path=last found no whole checkpoint in"),
    ):
        find_checkpoint("last", str(tmp_path), 60)


def test_a_folder_is_a_checkpoint_too(tmp_path) -> None:
    _save(tmp_path, "step-20.ckpt", step=20, age=2)
    folder = tmp_path / "checkpoints" / "last.ckpt"
    folder.mkdir()
    _save(tmp_path, "last.ckpt/checkpoint.pt", step=30, age=1)
    assert find_checkpoint("last", str(tmp_path), 60) == str(folder)
    with pytest.raises(ValueError, match=r"last.ckpt' has already taken 30 steps"):
        find_checkpoint("last", str(tmp_path), 30)


def test_a_checkpoint_may_be_on_another_machine(tmp_path) -> None:
    missing = tmp_path / "checkpoints" / "last.ckpt"
    assert find_checkpoint("last", str(tmp_path), 60, nodes=2) == str(missing)
    assert find_checkpoint(str(missing), str(tmp_path), 60, nodes=2) == str(missing)
    here = _save(tmp_path, "step-30.ckpt", step=30, age=1)
    assert find_checkpoint("last", str(tmp_path), 60, nodes=2) == str(here)


def test_no_checkpoint_is_no_fresh_start(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match=r"found no checkpoint in .*hydra.run.dir=outputs"):
        find_checkpoint("last", str(tmp_path / "new"), 60)
    _save(tmp_path / "before", "last.ckpt", step=20, age=1)
    with pytest.raises(FileNotFoundError, match=rf"hydra.run.dir='{tmp_path}/before', or"):
        find_checkpoint("last", str(tmp_path / "new"), 60)


@pytest.mark.parametrize("word", ["last", "path"])
def test_a_finished_run_has_nothing_left(tmp_path, word) -> None:
    path = str(_save(tmp_path, "last.ckpt", step=60, age=1))
    given = path if word == "path" else word
    with pytest.raises(
        ValueError, match=r"has already taken 60 steps, and trainer.max_steps=60: nothing"
    ):
        find_checkpoint(given, str(tmp_path), 60)
    assert find_checkpoint(given, str(tmp_path), 61) == path


def test_the_command_that_resumes_is_the_one_that_was_typed(tmp_path, monkeypatch) -> None:
    job = ["experiment=demo", "callbacks=[{_target_: a.B}]", "ckpt_path=a/last.ckpt"]
    typed = [*job, "hydra.run.dir=elsewhere"]
    composed = SimpleNamespace(overrides=SimpleNamespace(task=job))
    hydra = SimpleNamespace(initialized=lambda: True, get=lambda: composed)
    monkeypatch.setattr(resume, "HydraConfig", hydra)
    monkeypatch.setattr(sys, "argv", ["/there/recipes/pretrain.py", *typed])
    monkeypatch.setattr(sys, "orig_argv", [".venv/bin/python", "-m", "recipes.pretrain", *typed])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    assert resume_command(str(tmp_path / "runs/one")).splitlines()[1] == (
        "OMP_NUM_THREADS=1 .venv/bin/python -m recipes.pretrain experiment=demo"
        " 'callbacks=[{_target_: a.B}]' hydra.run.dir=runs/one ckpt_path=last"
    )
