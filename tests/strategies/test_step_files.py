"""Through how many files of the library one optimizer step goes: so many does its reader open. And
what a profile of a fit shows of it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

import lightning_commfree
from lightning_commfree import DistributedLion, DistributedLionStrategy, StreamingDiLoCoStrategy
from lightning_commfree.comm.view import View
from lightning_commfree.diloco import default_outer_optimizer
from lightning_commfree.lion import LionSettings
from tests.diloco import training
from tests.strategies.models import Tiny, loader, quiet_trainer
from tests.world import run_ranks

PACKAGE = f"{Path(lightning_commfree.__file__).parent}/"
STEP = 6  # warm: everything has been made and chosen
# With the default wire, fp4, in numba's loops. Fragment 0 leaves in step 6; fragment 1 lands, which
# has left in step 5.
DILOCO: dict[str, Any] = {"sync_every": 2, "num_fragments": 2}
# Files of comm and the wing, trained without Lightning; files of the package in a fit.
MOST = {"diloco": (12, 18), "lion": (12, 19)}


class Files:
    """Takes note of the library's files in which a function runs, while `counts` is set."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.counts = False

    def profile(self, frame: FrameType, event: str, _: Any) -> None:
        # the exchange's thread is part of a step, the one that answers other ranks is not
        thread = threading.current_thread().name
        if self.counts and event == "call" and thread.startswith(("MainThread", "exchange")):
            path = frame.f_code.co_filename
            if path.startswith(PACKAGE):
                self.names.add(path.removeprefix(PACKAGE))


@contextmanager
def profiled(files: Files) -> Iterator[None]:
    """Look at every call, in this thread and in those that begin in the body."""
    threading.setprofile(files.profile)
    sys.setprofile(files.profile)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


# Without Lightning


def diloco_steps(rank: int, size: int) -> Iterator[Callable[[], None]]:
    module = training.Net()
    wire = {"wire_dtype": "fp4", "outer_optimizer": default_outer_optimizer}
    diloco = training.start(module, training.world(rank, size), **DILOCO, **wire)
    inner = training.ADAMW(module.parameters())

    def step() -> None:
        with diloco.stepping():
            inner.step()
        diloco.after_step()

    for number in range(1, STEP + 1):
        training.backward(module, rank, number)
        yield step
    diloco.finish()
    diloco.close()


def lion_steps(rank: int, size: int) -> Iterator[Callable[[], None]]:
    module = training.Net()
    optimizer = DistributedLion(module.parameters())
    named, channel = list(module.named_parameters()), training.world(rank, size)
    voting = optimizer.join(named, View.of(channel), LionSettings())

    def step() -> None:
        with voting.during_backward():
            training.backward(module, rank, 1)
        optimizer.step()

    for _ in range(STEP):
        yield step
    optimizer.leave()


def files_of_algorithm(kind: str, rank: int, size: int) -> set[str]:
    steps = diloco_steps if kind == "diloco" else lion_steps
    files = Files()
    with profiled(files):
        for number, step in enumerate(steps(rank, size), 1):
            files.counts = number == STEP
            step()
            files.counts = False
    return files.names


# In a fit


class Voter(Tiny):
    def configure_optimizers(self) -> Any:
        return DistributedLion(self.parameters())


class Counting(pl.Callback):
    """Counts the files of one batch, from its start to its end."""

    def __init__(self) -> None:
        self.files = Files()

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.files.counts = trainer.global_step + 1 == STEP

    def on_train_batch_end(self, *_: Any) -> None:
        self.files.counts = False


def fit(kind: str, size: int, steps: int, *callbacks: pl.Callback) -> None:
    diloco = kind == "diloco"
    strategy = StreamingDiLoCoStrategy(**DILOCO) if diloco else DistributedLionStrategy()
    trainer = quiet_trainer(
        strategy=strategy, devices=size, max_steps=steps, callbacks=list(callbacks)
    )
    trainer.fit(Tiny() if diloco else Voter(), loader(steps * 2 * size))


def files_of_fit(kind: str, size: int) -> set[str]:
    counting = Counting()
    with profiled(counting.files):
        fit(kind, size, STEP + 2, counting)
    return counting.files.names


def ranges_of_fit(kind: str, size: int) -> list[str]:
    """Return our ranges in a profile of four steps, in order."""
    with torch.profiler.profile() as profile:
        fit(kind, size, 4)
    ours = ("launch ", "land ", "apply ")
    events = [event for event in profile.events() if event.name.startswith(ours)]
    return [event.name for event in sorted(events, key=lambda event: event.time_range.start)]


def play(rank: int, size: int) -> dict[str, tuple[set[str], set[str], list[str]]]:
    return {
        kind: (
            files_of_algorithm(kind, rank, size),
            files_of_fit(kind, size),
            ranges_of_fit(kind, size),
        )
        for kind in MOST
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(play, 2, tmp_path_factory.mktemp("files"))


@pytest.mark.parametrize("kind", MOST)
def test_a_step_goes_through_few_files(kind: str, ranks: list[dict[str, Any]]) -> None:
    some = {"diloco": {"outer.py", "wire.py"}, "lion": {"worker.py", "vote.py"}}[kind]
    for found in ranks:
        alone, in_fit, _ = found[kind]
        assert {f"{kind}/{name}" for name in some} < alone < in_fit, "launched and landed"
        assert len(alone) <= MOST[kind][0], sorted(alone)
        assert len(in_fit) <= MOST[kind][1], sorted(in_fit)


def test_a_profile_shows_launches_and_landings(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        # after steps 2, 3 and 4; the end lands fragment 0, and the last round begins with the one
        # that is due next
        steps = ["launch #0", "launch #1", "land #0", "launch #0", "land #1"]
        end = ["land #0", "launch #1", "land #1", "launch #0", "land #0"]
        expected = [name.replace("#", "fragment #") for name in (*steps, *end)]
        assert found["diloco"][2] == expected

        assert found["lion"][2] == ["launch vote #0", "land vote #0", "apply vote #0"] * 4
