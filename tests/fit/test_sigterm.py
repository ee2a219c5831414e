"""SIGTERM on one rank ends all ranks after the same step, and saves what Lightning would save."""

from __future__ import annotations

import contextlib
import inspect
import multiprocessing
import os
import signal
import sys
import time
import traceback
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.strategies.launchers import subprocess_script
from lightning.pytorch.utilities.exceptions import SIGTERMException

from examples.local_sgd import LocalSGDStrategy
from lightning_commfree import DistributedLionStrategy, StreamingDiLoCoStrategy
from tests.fit.models import Tiny, Voter, info_messages, loader, quiet_trainer
from tests.fit.slurm import slurm_job
from tests.forks import Fork, forking
from tests.pages import ROOT, python_of
from tests.world import run_ranks


class TermAt(pl.Callback):
    """Sends SIGTERM to this process during batch `step`, on one rank only; or plays SLURM's signal
    to requeue there."""

    def __init__(self, step: int, rank: int, requeue: bool = False) -> None:
        self.step, self.rank, self.requeue = step, rank, requeue

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step + 1 == self.step and trainer.global_rank == self.rank:
            if self.requeue:  # Lightning registers its handler in a SLURM job only
                trainer._signal_connector._slurm_sigusr_handler_fn(signal.SIGUSR1, None)
            else:
                os.kill(os.getpid(), signal.SIGTERM)


def fit(rank: int, size: int, folder: Path) -> list[Any]:
    # a fragment leaves at 8 (p=0), 12 (p=1), 16 ...; SIGTERM in step 10 travels at 12, lands at 15
    with slurm_job(folder / "slurm", rank):
        return [
            end_early(size, folder / "mid", step=10, max_steps=100),
            end_early(size, folder / "last", step=20, max_steps=20),
            end_early(size, folder / "first", step=2, max_steps=100),  # nothing leaves before 8
            end_early(size, folder / "requeue", step=10, max_steps=100, requeue=True),
        ]


def end_early(
    size: int,
    folder: Path,
    step: int,
    max_steps: int,
    replica_size: int = 1,
    requeue: bool = False,
) -> Any:
    strategy = StreamingDiLoCoStrategy(
        sync_every=8,
        num_fragments=2,
        overlap_steps=3,
        wire_dtype="fp32",
        replica_size=replica_size,
    )
    saving = OnExceptionCheckpoint(folder)
    trainer = quiet_trainer(
        strategy=strategy,
        devices=size,
        max_steps=max_steps,
        enable_checkpointing=True,
        default_root_dir=folder / "root",
        callbacks=[TermAt(step, 1, requeue), saving],
    )
    module = Tiny()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        trainer.fit(module, loader(100 * 2 * size))
        ended_by = None
    except SIGTERMException as exception:
        ended_by = type(exception).__name__
    return (
        ended_by,
        trainer.global_step,
        signal.getsignal(signal.SIGTERM) == handler,
        sorted({*os.listdir(folder)} - {"root"}) if folder.exists() else [],
    )


def test_all_ranks_stop_after_the_same_step_and_save(tmp_path: Path) -> None:
    ranks = run_ranks(fit, 3, tmp_path, tmp_path / "checkpoints")
    for mid_outcome, last_outcome, first_outcome, requeue_outcome in ranks:
        mid, mid_step, mid_clean, mid_files = mid_outcome
        last, last_step, last_clean, _ = last_outcome
        assert first_outcome[:2] == ("SIGTERMException", 8 + 3)
        assert (mid, mid_step) == ("SIGTERMException", 15)
        assert mid_files == [".commfree", "on_exception.ckpt"]
        assert mid_clean
        assert requeue_outcome == mid_outcome
        # in the very last step the fit is complete; Lightning raises behind it, here as under DDP
        assert (last, last_step) == ("SIGTERMException", 20)
        assert last_clean
    saved = torch.load(tmp_path / "checkpoints/mid/on_exception.ckpt", weights_only=True)
    module = Tiny()
    module.load_state_dict(saved["state_dict"])
    assert saved["global_step"] == 15


class CtrlC(pl.Callback):
    """Comes to rank 1 two steps earlier."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 9 - 2 * trainer.global_rank:
            raise KeyboardInterrupt


def interrupt(rank: int, size: int, folder: Path, saves: bool) -> Any:
    """A fragment leaves after step 8, on rank 0 alone, and is still waited for."""
    saving = [
        ModelCheckpoint(folder, "{step}", every_n_train_steps=5, save_on_exception=True),
        OnExceptionCheckpoint(folder),
    ]
    trainer = quiet_trainer(
        strategy=StreamingDiLoCoStrategy(sync_every=8, num_fragments=2, overlap_steps=3),
        devices=size,
        max_steps=30,
        enable_checkpointing=saves,
        callbacks=[CtrlC(), *(saving if saves else [])],
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(SystemExit):
            trainer.fit(Tiny(), loader(100 * size))
    return [str(w.message) for w in caught if "Ctrl-C" in str(w.message)]


def interrupt_both(rank: int, size: int, folder: Path) -> Any:
    return [interrupt(rank, size, folder, saves) for saves in (True, False)]


def test_after_ctrl_c_nothing_is_saved_and_no_rank_waits(tmp_path: Path) -> None:
    start = time.monotonic()
    first, second = run_ranks(interrupt_both, 2, tmp_path, tmp_path / "checkpoints")
    (said,), (without_checkpoints,) = first
    assert said.startswith("No checkpoint was saved: Ctrl-C interrupted")
    assert "send SIGTERM instead: all ranks" in without_checkpoints
    assert second == [[], []]
    files = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert files == [".commfree", "step=5.ckpt"]
    assert time.monotonic() - start < 60, "the timeout of an exchange is 30 minutes"


class FailAt(pl.Callback):
    """Raises an error on rank 1 only."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 7 and trainer.global_rank == 1:
            raise ValueError("a mistake")


def end_badly(rank: int, size: int, folder: Path, ends: pl.Callback) -> dict[str, Any]:
    """Run a fit that `ends` with an exception, with callbacks that would save on it."""
    saving = [
        ModelCheckpoint(folder, "{step}", every_n_train_steps=5, save_on_exception=True),
        OnExceptionCheckpoint(folder),
    ]
    trainer = quiet_trainer(
        strategy=DistributedLionStrategy(),
        devices=size,
        max_steps=30,
        enable_checkpointing=True,
        callbacks=[ends, *saving],
    )
    start = time.monotonic()
    with warnings.catch_warnings(record=True) as caught, info_messages() as logged:
        warnings.simplefilter("always")
        try:
            trainer.fit(Voter(), loader(100 * size))
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            ended_by = traceback.format_exception(error)
    return {
        "ended by": ended_by,
        "seconds": time.monotonic() - start,
        "unsaved": [str(w.message) for w in caught if "No checkpoint was saved" in str(w.message)],
        "saved": [text for text in logged if "saved checkpoint to" in text],
    }


def play_bad_ends(rank: int, size: int, folder: Path) -> list[dict[str, Any]]:
    ends = {"error": FailAt(), "sigterm": TermAt(3, rank=0)}
    return [end_badly(rank, size, folder / name, end) for name, end in ends.items()]


@pytest.mark.skipif(
    "save_on_exception" not in inspect.signature(ModelCheckpoint).parameters,
    reason="this release of Lightning has no `save_on_exception`",
)
def test_what_is_said_of_a_save_on_an_exception_is_true(tmp_path: Path) -> None:
    (other, with_sigterm), (failed, _) = run_ranks(play_bad_ends, 2, tmp_path, tmp_path)
    assert failed["ended by"][-1] == "ValueError: a mistake\n"
    assert "rank 1 is gone (it ended its fit earlier" in other["ended by"][-1]
    for end in (other, failed):
        assert end["seconds"] < 30, "nobody waits for the timeout of half an hour"
        assert "".join(end["ended by"]).count("Traceback (most recent call last)") == 1
        assert "GLHF" not in "".join(end["ended by"])
        assert not end["saved"]
    assert [text[:40] for text in other["unsaved"]] == [
        "No checkpoint was saved: an error has en"
    ] * 2
    assert {path.name for path in (tmp_path / "error").iterdir()} == {".commfree", "step=5.ckpt"}
    # all ranks stop after the same step
    assert not with_sigterm["unsaved"]
    (text,) = with_sigterm["saved"]
    assert "step=3" in text
    assert {path.name for path in (tmp_path / "sigterm").iterdir()} > {"step=3.ckpt"}


def tell(rank: int, size: int, folder: Path) -> list[tuple[str, int]]:
    """Return what this rank writes to the terminal in each fit, and after which step it ends."""
    whole = StreamingDiLoCoStrategy(sync_every=4, num_fragments=1, overlap_steps=3)
    plain = partial(StreamingDiLoCoStrategy, sync_every=8, num_fragments=2, overlap_steps=3)
    fits = [
        (plain(), Tiny(), TermAt(10, rank=0), 100),
        (plain(), Tiny(), TermAt(10, rank=1), 100),
        (plain(), Tiny(), TermAt(10, rank=0), 14),
        (whole, Tiny(), TermAt(3, rank=0), 100),
        (DistributedLionStrategy(), Voter(), TermAt(3, rank=0), 100),
        (LocalSGDStrategy(every=5), Tiny(), TermAt(3, rank=0), 100),
        (plain(), Tiny(), TermAt(10, rank=0, requeue=True), 100),
    ]
    said = []
    for number, (strategy, module, callback, steps) in enumerate(fits):
        trainer = quiet_trainer(
            strategy=strategy,
            devices=size,
            max_steps=steps,
            callbacks=[callback],
            default_root_dir=folder / "root",
        )
        with (
            slurm_job(folder / "slurm", rank),
            (folder / f"{number}_{rank}.txt").open("w+") as terminal,
            contextlib.redirect_stderr(terminal),
            pytest.raises(SIGTERMException),
        ):
            trainer.fit(module, loader(100 * 2 * size))
        said.append(((folder / f"{number}_{rank}.txt").read_text(), trainer.global_step))
    return said


def test_one_sentence_says_when_all_will_have_stopped(tmp_path: Path) -> None:
    first, other = run_ranks(tell, 2, tmp_path, tmp_path)
    stops = "Asked to stop: all ranks stop together, after"
    assert [(text.strip(), step) for text, step in first[:-1]] == [
        (f"{stops} step 15 at the latest (9 are done).", 15),
        ("Another rank was asked to stop: all ranks stop together after this step.", 15),
        (f"{stops} step 14 at the latest (9 are done).", 14),
        (f"{stops} step 7 at the latest (2 are done).", 7),
        (f"{stops} step 4 at the latest (2 are done).", 3),
        (f"{stops} their next exchange (2 steps are done).", 5),
    ]
    requeue, sentence = first[-1][0].strip().splitlines()
    assert (
        requeue == f"Received signal {signal.SIGUSR1:d} to save a checkpoint and requeue the job."
    )
    assert sentence == f"{stops} step 15 at the latest (9 are done)."
    assert other == [("", step) for _, step in first], "once a machine"


def fit_replicas(rank: int, size: int, folder: Path) -> Any:
    return end_early(size, folder, step=10, max_steps=100, replica_size=2)


def test_ranks_of_a_replica_hear_of_it_from_each_other(tmp_path: Path) -> None:
    """The flag of rank 1 travels with its shard, to rank 3 alone; DDP would wait for the others."""
    for outcome in run_ranks(fit_replicas, 4, tmp_path, tmp_path / "checkpoints"):
        assert outcome == ("SIGTERMException", 15, True, [".commfree", "on_exception.ckpt"])


SCRIPT = """
import sys, time
import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import SIGTERMException
from tests.fit.models import Tiny, loader, quiet_trainer

class Slow(pl.Callback):
    def on_train_batch_end(self, trainer, *_):
        time.sleep(0.02)
        if trainer.global_step == 5 and trainer.is_global_zero:
            print("ready", flush=True)

    def on_exception(self, trainer, module, error):
        print(type(error).__name__ + "\\n", end="", flush=True)  # in one piece

model, data = Tiny(), loader(4000)
trainer = quiet_trainer(strategy="streaming_diloco", devices=2, max_epochs=-1, callbacks=[Slow()])
FIT
print("after fit", flush=True)
"""
FIT = "trainer.fit(model, data)"
(CAUGHT,) = (
    block[block.index("try:") :]
    for block in python_of((ROOT / "docs/troubleshooting.md").read_text("utf-8"))
    if "SIGTERMException" in block
)


def by_itself() -> None:
    """Let Lightning fork the other rank, and be silent on stderr; in this forked process only."""
    subprocess_script.subprocess = forking
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def terminate(fit: str, folder: Path) -> tuple[int | None, list[str]]:
    """Send SIGTERM to a script that starts its ranks; return its exit code and what it prints.

    Its processes are forks, which are spared the imports; those of `test_launch` are new Pythons.
    """
    script = folder / "train.py"
    script.write_text(SCRIPT.replace("FIT", fit, 1))
    read, write = os.pipe()
    with open(read) as printed, open(write, "w") as stdout:
        command = [sys.executable, str(script)]
        process = Fork(command, cwd=folder, stdout=stdout, first=by_itself)
        stdout.close()
        assert printed.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        code = process.end(60)
        return code, sorted(printed.read().split())


def fit_with_ddp() -> None:
    """On one rank: with more, Lightning's broadcast of the signal may meet another collective."""
    trainer = quiet_trainer(strategy="ddp", devices=1, max_epochs=1, callbacks=[TermAt(3, rank=0)])
    trainer.fit(Tiny(), loader(20))
    raise AssertionError("the fit goes on")


def test_a_script_ends_as_with_lightnings_ddp(tmp_path: Path) -> None:
    """Lightning's exception is a `SystemExit` without a code."""
    assert terminate(FIT, tmp_path) == (0, ["SIGTERMException"] * 2)
    process = multiprocessing.get_context("fork").Process(target=fit_with_ddp)
    process.start()
    process.join(60)
    assert process.exitcode == 0


def test_the_documented_lines_give_an_exit_code(tmp_path: Path) -> None:
    code, printed = terminate(CAUGHT, tmp_path)
    assert (code, printed) == (143, ["SIGTERMException"] * 2)
