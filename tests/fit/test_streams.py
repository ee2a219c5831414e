"""Epochs that end after different steps: streams without a length end on all ranks with the first
one's data. Where ranks train apart, and where a loader has fewer batches than its length or a hook
ends the epoch of one rank, all raise an error that names the rank."""

from __future__ import annotations

import os
import re
import signal
import time
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_commfree import (
    DistributedLion,
    DistributedLionStrategy,
    DominoTPStrategy,
    StreamingDiLoCoStrategy,
)
from tests.fit import causal_lm
from tests.fit.models import Tiny, dataset, quiet_trainer
from tests.mortal import End, run_mortals

LONG, SHORT = 8, 5  # batches of an epoch
EPOCHS = 2
TIMEOUT = timedelta(seconds=60)
SECONDS = 20  # within which an error comes; the timeout of an exchange is three times that


class Stream(IterableDataset[Any]):
    """Rows of no known number."""

    def __init__(self, rows: Any, batches: int) -> None:
        self.rows, self.batches = rows, batches

    def __iter__(self) -> Iterator[Any]:
        for i in range(2 * self.batches):
            yield self.rows[i]


class Liar(Stream):
    """As many rows as its length says, on the ranks that are not short."""

    def __len__(self) -> int:
        return 2 * LONG


class SkipsTheRest(pl.Callback):
    """Ends every epoch of one rank after so many batches, as the hook of a module may."""

    def __init__(self, after: dict[int, int]) -> None:
        self.after = after

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        after = self.after.get(trainer.global_rank, LONG)
        pl_module.on_train_batch_start = lambda batch, index: -1 if index >= after else None


class Voter(Tiny):
    def configure_optimizers(self) -> Any:
        return DistributedLion(self.parameters(), lr=1e-3)


class TextVoter(causal_lm.CausalLM):
    def configure_optimizers(self) -> Any:
        return DistributedLion(self.parameters(), lr=1e-3)


def strategy(kind: str, size: int, inside: str, timeout: timedelta) -> Any:
    if kind == "diloco":
        settings: dict[str, Any] = {"sync_every": 4, "num_fragments": 2, "wire_dtype": "fp32"}
        return StreamingDiLoCoStrategy(
            **settings, replica_size=size, inside=inside, timeout=timeout
        )
    if kind == "lion":
        return DistributedLionStrategy(node_size=size, inside=inside, timeout=timeout)
    return DominoTPStrategy(size, "batch", timeout=timeout)


def fit(
    rank: int,
    world: int,
    kind: str,
    size: int,
    inside: str,
    batches: dict[int, int],
    data: type[Stream] = Stream,
    liveness: bool = True,
    timeout: timedelta = TIMEOUT,
    **on: Any,
) -> dict[str, Any]:
    text = inside == "domino"
    rows = causal_lm.words(2 * LONG) if text else dataset(2 * LONG)
    if text:
        module: Any = TextVoter() if kind == "lion" else causal_lm.CausalLM()
    else:
        module = Voter() if kind == "lion" else Tiny()
    replicas = strategy(kind, size, inside, timeout)
    replicas.liveness = liveness
    trainer = quiet_trainer(
        strategy=replicas,
        devices=world,
        num_sanity_val_steps=0,
        **{"max_epochs": EPOCHS, **on},
    )
    error, start = "", time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            loader = DataLoader(data(rows, batches.get(rank, LONG)), batch_size=2)
            trainer.fit(module, loader, DataLoader(rows, batch_size=len(rows)))
        except RuntimeError as raised:
            error = str(raised)
    weights = [p.detach().flatten() for p in module.parameters()] if inside != "fsdp" else []
    return {
        "steps": trainer.global_step,
        "error": error,
        "seconds": time.monotonic() - start,
        "said": [str(w.message) for w in caught if "the epoch ends there" in str(w.message)],
        "weights": torch.cat([torch.zeros(1), *weights]),
    }


# strategy, ranks of a replica, inside, batches by rank, what else the Trainer gets
Case = tuple[str, int, str, dict[int, int], dict[str, Any]]
PAIR: dict[str, tuple[Case, int]] = {
    "lion": (("lion", 1, "ddp", {1: SHORT}, {}), EPOCHS * SHORT),
    "lion, accumulating": (
        ("lion", 1, "ddp", {1: SHORT}, {"accumulate_grad_batches": 2}),
        EPOCHS * 3,  # two of two batches and one of the last
    ),
    "domino": (("domino", 1, "domino", {1: SHORT}, {}), EPOCHS * SHORT),
    "domino, one group": (("domino", 2, "domino", {1: SHORT}, {}), EPOCHS * SHORT),
    "domino, accumulating": (
        ("domino", 2, "domino", {1: SHORT}, {"accumulate_grad_batches": 2}),
        EPOCHS * 3,
    ),
    "diloco, one replica": (("diloco", 2, "ddp", {1: SHORT}, {}), EPOCHS * SHORT),
    "diloco, even": (("diloco", 1, "ddp", {}, {}), EPOCHS * LONG),
    "diloco, max_steps": (("diloco", 1, "ddp", {1: SHORT}, {"max_steps": 5}), SHORT),
    "diloco, skipping": (
        ("diloco", 1, "ddp", {}, {"callbacks": SkipsTheRest({0: 5, 1: 5})}),
        EPOCHS * 5,
    ),
    "diloco, as many steps": (
        ("diloco", 1, "ddp", {1: LONG - 1}, {"accumulate_grad_batches": 2}),
        EPOCHS * LONG // 2,
    ),
}
FOUR: dict[str, tuple[Case, int]] = {
    "diloco, ddp": (("diloco", 2, "ddp", {1: SHORT, 2: SHORT}, {}), EPOCHS * SHORT),
    "diloco, fsdp": (("diloco", 2, "fsdp", {0: SHORT, 3: SHORT}, {}), EPOCHS * SHORT),
    "diloco, domino": (("diloco", 2, "domino", {1: SHORT, 2: SHORT}, {}), EPOCHS * SHORT),
    "lion, ddp": (("lion", 2, "ddp", {3: SHORT}, {}), EPOCHS * SHORT),
    "lion, fsdp": (("lion", 2, "fsdp", {3: SHORT}, {}), EPOCHS * SHORT),
    "lion, domino": (("lion", 2, "domino", {3: SHORT}, {}), EPOCHS * SHORT),
    "domino, groups": (("domino", 2, "domino", {3: SHORT}, {}), EPOCHS * SHORT),
}


def play(rank: int, world: int) -> dict[str, Any]:
    cases = PAIR if world == 2 else FOUR
    return {name: fit(rank, world, *case[:4], **case[4]) for name, (case, _) in cases.items()}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for world, cases in ((2, PAIR), (4, FOUR)):
        folder = tmp_path_factory.mktemp("streams")
        ends = run_mortals(play, world, folder, timeout=TIMEOUT, limit_s=150.0)
        assert not any(end.error for end in ends), [end.error for end in ends]
        assert all(end.result is not None for end in ends), [end.exit_code for end in ends]
        found |= {f"{world} {name}": [end.result[name] for end in ends] for name in cases}
    return found


ALL = {f"2 {name}": steps for name, (_, steps) in PAIR.items()}
ALL |= {f"4 {name}": steps for name, (_, steps) in FOUR.items()}


@pytest.mark.parametrize("name", ALL)
def test_all_ranks_end_an_epoch_after_the_same_step(played: Any, name: str) -> None:
    for rank in played[name]:
        assert rank["error"] == ""
        assert rank["steps"] == ALL[name]
        assert torch.equal(rank["weights"], played[name][0]["weights"])


def test_one_warning_names_the_ranks(played: Any) -> None:
    (said,) = played["2 lion"][0]["said"]
    assert said.startswith("Rank 1 ran out of data at batch 4 of epoch 0, so the epoch ends there")
    assert len(played["2 domino"][0]["said"]) == 1
    assert played["2 diloco, even"][0]["said"] == []
    assert not any(rank["said"] for case in played.values() for rank in case[1:])


# -- what cannot end well

UNEVEN: dict[str, Case] = {
    "between exchanges": ("diloco", 1, "ddp", {1: SHORT}, {}),
    "in the last epoch": ("diloco", 1, "ddp", {0: SHORT}, {"max_epochs": 1}),
    "at a validation": ("diloco", 1, "ddp", {0: SHORT}, {"val_check_interval": SHORT}),
}
SIZED: dict[str, Case] = {
    "lion, fewer batches than its length": ("lion", 1, "ddp", {1: SHORT}, {"data": Liar}),
    "domino, fewer batches than its length": ("domino", 2, "domino", {1: SHORT}, {"data": Liar}),
    "lion, a hook": ("lion", 1, "ddp", {}, {"callbacks": SkipsTheRest({1: SHORT})}),
}


class Late(pl.Callback):
    """The rank whose data have ended is the last of its replica to say so."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == SHORT and trainer.global_rank == 1:
            time.sleep(1.5)


REPLICAS: dict[str, Case] = {
    "replicas": ("diloco", 2, "ddp", {2: SHORT, 3: SHORT}, {}),
    "fsdp": ("diloco", 2, "fsdp", {1: SHORT}, {}),
    "its neighbor says so": ("diloco", 2, "ddp", {1: SHORT}, {"callbacks": Late()}),
}
EMPTY: Case = ("diloco", 1, "ddp", {1: 0}, {})


def play_one(rank: int, world: int, case: Case) -> dict[str, Any]:
    return fit(rank, world, *case[:4], **case[4])


def errors(folder: Path, world: int, case: Case) -> list[str]:
    ends: list[End] = run_mortals(play_one, world, folder, case, timeout=TIMEOUT, limit_s=50.0)
    assert all(end.result is not None for end in ends), [end.exit_code for end in ends]
    assert max(end.result["seconds"] for end in ends) < SECONDS
    return [end.result["error"] for end in ends]


@pytest.mark.parametrize("name", UNEVEN)
def test_ranks_that_train_apart_raise_the_same_error(tmp_path: Path, name: str) -> None:
    case = UNEVEN[name]
    ((short, batches),) = case[3].items()
    found = errors(tmp_path, 3, case)
    assert len(set(found)) == 1
    assert found[0].startswith(
        f"The data of rank {short} ended after step {batches}, in epoch 0, and rank "
    )
    assert "`limit_train_batches`" in found[0]


@pytest.mark.parametrize("name", REPLICAS)
def test_replicas_of_two_ranks_do_so_too(tmp_path: Path, name: str) -> None:
    found = errors(tmp_path, 4, REPLICAS[name])
    assert len(set(found)) == 1
    short = "|".join(map(str, REPLICAS[name][3]))
    text = f"The data of rank ({short}) ended after step {SHORT}, in epoch 0, and rank "
    assert re.match(text, found[0]), found[0]


@pytest.mark.parametrize("name", SIZED)
def test_an_epoch_that_ends_early_on_one_rank_is_the_same_error(tmp_path: Path, name: str) -> None:
    found = errors(tmp_path, 2, SIZED[name])
    assert len(set(found)) == 1
    assert found[0].startswith(f"The data of rank 1 ended after step {SHORT}, in epoch 0, and rank")
    assert re.search("has begun step [678]", found[0])


def test_a_rank_without_any_batch_is_named(tmp_path: Path) -> None:
    """Asked before an epoch's first batch, under every strategy in the same way."""
    for error in errors(tmp_path, 2, EMPTY):
        assert error.startswith(
            "Rank 1 got no training batches in epoch 0, but the other ranks did"
        )


class DiesAfter(pl.Callback):
    """Kills rank 1 while rank 0 waits at the end of its stream."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == SHORT - 1:
            time.sleep(2.0)
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_dies_before_its_stream_ends_is_named(tmp_path: Path) -> None:
    even = {0: SHORT, 1: SHORT, 2: SHORT}
    case: Case = ("diloco", 1, "ddp", even, {"callbacks": DiesAfter()})
    ends = run_mortals(play_one, 3, tmp_path, case, timeout=TIMEOUT, limit_s=50.0)
    assert ends[1].exit_code == -signal.SIGKILL
    for end in (ends[0], ends[2]):
        assert "'end of epoch' failed" in end.result["error"]
        assert "rank 1 is gone (no heartbeat" in end.result["error"]
        assert end.result["seconds"] < SECONDS, "the timeout is 60 s"


SOON = timedelta(seconds=5)


def play_unwatched(rank: int, world: int) -> dict[str, Any]:
    case: Case = ("diloco", 1, "ddp", {1: SHORT}, {"liveness": False, "timeout": SOON})
    return fit(rank, world, *case[:4], **case[4])


def test_with_liveness_off_uneven_streams_fail_at_the_timeout(tmp_path: Path) -> None:
    for end in run_mortals(play_unwatched, 2, tmp_path, timeout=SOON, limit_s=50.0):
        assert end.result is not None, "it hangs"
        assert end.result["error"]
        assert end.result["seconds"] < 3 * SOON.total_seconds()
