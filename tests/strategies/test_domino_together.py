"""Where data or will of one rank end, a Domino fit ends on all ranks after the same step, and every
rank says whose it was."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_commfree import DominoTPStrategy
from tests.mortal import End, run_mortals
from tests.strategies.causal_lm import LENGTH, WORDS, CausalLM, loader
from tests.strategies.models import quiet_trainer

SIZE = 4
LONG = 6  # batches of an epoch of who has most
TIMEOUT = timedelta(seconds=20)


class Stream(IterableDataset[list[Tensor]]):
    """So many batches, the same for all who have the seed; its length is not known."""

    def __init__(self, batches: int, seed: int) -> None:
        self.batches, self.seed = batches, seed

    def __iter__(self) -> Iterator[list[Tensor]]:
        random = torch.Generator().manual_seed(self.seed)
        for _ in range(self.batches):
            yield [torch.randint(0, WORDS, (2, LENGTH), generator=random)]


class Act(pl.Callback):
    """On some ranks something happens once, in a hook, when so many steps have been taken."""

    def __init__(self, hook: str, step: int, ranks: tuple[int, ...], term: str = "") -> None:
        def act(trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step >= step and trainer.global_rank in ranks:
                if term == "requeue":  # Lightning registers its handler in a SLURM job only
                    trainer._signal_connector._slurm_sigusr_handler_fn(signal.SIGUSR1, None)
                elif term:
                    os.kill(os.getpid(), signal.SIGTERM)
                else:
                    trainer.should_stop = True

        setattr(self, hook, act)


EVERYBODY = (0, 1, 2, 3)
# tensor parallel size, batches of an epoch by rank, what happens, what else the Trainer gets
CASES: dict[str, tuple[int, dict[int, int], tuple[Any, ...], dict[str, Any]]] = {
    "a group's data": (2, {2: 3, 3: 3}, (), {}),
    "a rank's data": (4, {1: 3}, (), {}),
    "data with max_steps": (2, {2: 5, 3: 5}, (), {"max_steps": 5}),
    "at a batch's end": (2, {}, ("on_train_batch_end", 2, (1,)), {}),
    "behind a validation": (4, {}, ("on_validation_end", 2, (3,)), {"val_check_interval": 2}),
    "at an epoch's end": (2, {}, ("on_train_epoch_end", LONG, (2,)), {}),
    "everybody's": (2, {}, ("on_train_batch_end", 2, EVERYBODY), {}),
    "SIGTERM": (2, {}, ("on_train_batch_start", 2, (3,), "term"), {"accumulate_grad_batches": 2}),
    "requeue": (2, {}, ("on_train_batch_start", 2, (3,), "requeue"), {}),
    "nobody's": (2, {}, (), {}),
    "accumulating": (2, {2: 3, 3: 3}, (), {"accumulate_grad_batches": 2}),
    "no data": (2, {2: 0, 3: 0}, (), {}),
    "no data of one": (4, {1: 0}, (), {}),
    "too early": (2, {0: 3, 1: 3}, (), {"min_epochs": 2}),
}


def fit(rank: int, folder: Path, case: str) -> dict[str, Any]:
    group, batches, act, kwargs = CASES[case]
    module, error = CausalLM(), ""
    trainer = quiet_trainer(
        strategy=DominoTPStrategy(group, timeout=TIMEOUT),
        devices=SIZE,
        max_epochs=2,
        num_sanity_val_steps=0,
        enable_checkpointing=True,
        callbacks=[*([Act(*act)] if act else []), ModelCheckpoint(folder, "{step}")],
        **kwargs,
    )
    data = DataLoader(Stream(batches.get(rank, LONG), rank // group), batch_size=None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(module, data, loader(4 * SIZE, 2))
        except (RuntimeError, SIGTERMException) as raised:
            error = f"{type(raised).__name__}: {raised}"
    return {
        "error": error,
        "steps": trainer.global_step,
        "said": [str(one.message) for one in caught if "would have gone on" in str(one.message)],
        "weights": torch.cat([p.detach().flatten() for p in module.parameters()]),
        "validated": "val_loss" in trainer.callback_metrics,
        "files": sorted(path.name for path in folder.iterdir()) if folder.exists() else [],
    }


def play(rank: int, size: int, folder: Path) -> dict[str, Any]:
    return {case: fit(rank, folder / case, case) for case in CASES}


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> list[End]:
    folder = tmp_path_factory.mktemp("together")
    return run_mortals(play, SIZE, folder, folder, timeout=TIMEOUT, limit_s=120.0)


def of(ends: list[End], case: str) -> list[dict[str, Any]]:
    assert not any(end.error for end in ends), [end.error for end in ends]
    assert all(end.result is not None for end in ends), [end.exit_code for end in ends]
    return [end.result[case] for end in ends]


@pytest.mark.parametrize(
    ("case", "steps", "said"),
    [
        ("a group's data", 3, "The data of ranks 2, 3 ended after step 3, and ranks 0, 1 would"),
        ("a rank's data", 3, "The data of rank 1 ended after step 3, and ranks 0, 2, 3 would"),
        ("data with max_steps", 5, ""),
        # a will that comes behind a step's words ends the fit with the next one
        ("at a batch's end", 3, "rank 1 wanted to stop (`trainer.should_stop`) after step 3, and"),
        ("behind a validation", 3, "rank 3 wanted to stop (`trainer.should_stop`) after step 3,"),
        ("at an epoch's end", LONG + 1, "rank 2 wanted to stop (`trainer.should_stop`) after step"),
        ("everybody's", 2, ""),
        ("nobody's", 2 * LONG, ""),
    ],
)
def test_all_ranks_end_after_the_same_step_and_say_why(
    ends: list[End], case: str, steps: int, said: str
) -> None:
    found = of(ends, case)
    for outcome in found:
        assert not outcome["error"]
        assert outcome["steps"] == steps
        assert len(outcome["said"]) == bool(said)
        assert all(text.startswith(said) for text in outcome["said"])
        assert outcome["validated"]
        assert outcome["files"] == [".commfree", f"step={steps}.ckpt"], "saved, and nothing else"
        assert torch.equal(outcome["weights"], found[0]["weights"])


@pytest.mark.parametrize("case", ["SIGTERM", "requeue"])
def test_sigterm_of_any_rank_ends_all_after_the_same_step(ends: list[End], case: str) -> None:
    """SLURM's signal to requeue, on which Lightning would save at once, is taken for it."""
    for outcome in of(ends, case):
        assert outcome["error"].startswith("SIGTERMException")
        assert outcome["steps"] == 3


@pytest.mark.parametrize(
    ("case", "text"),
    [
        (
            "accumulating",
            "The data of the ranks [2, 3] ended with a batch in the middle of accumulated ones,"
            " after step 1, and the other ranks would have gone on. Give all ranks equally many",
        ),
        (
            "no data",
            "The ranks of this fit have gone different ways: ranks 2, 3 are at the end of epoch 0,"
            " without a batch; ranks 0, 1 are in batch 0 of epoch 0. Give all ranks equally many",
        ),
        (
            "no data of one",
            "The ranks of this fit have gone different ways: rank 1 is at the end of epoch 0,"
            " without a batch; ranks 0, 2, 3 are in batch 0 of epoch 0. Give all ranks equally",
        ),
        (
            "too early",
            "The data of ranks 0, 1 ended after step 3, and ranks 2, 3 would have gone on. The fit"
            " cannot end here, for `min_epochs=2` and `min_steps=None`.",
        ),
    ],
)
def test_what_cannot_end_well_is_an_error_on_all_ranks(
    ends: list[End], case: str, text: str
) -> None:
    for outcome in of(ends, case):
        assert outcome["error"].startswith(f"RuntimeError: {text}")
        assert not outcome["files"], "nothing half-written"
