"""NaN on one replica: no checkpoint holds it, and all ranks stop and name it, or it abstains."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_commfree import StreamingDiLoCoStrategy
from tests.fit.models import Tiny, assert_same, quiet_trainer, rank_loader
from tests.world import run_ranks

STEPS = 15  # H = 4, P = 2: fragment 0 leaves after 4, 8, 12, fragment 1 after 6, 10, 14
SICK_AT = 6


class Sick(Tiny):
    """One rank's loss is NaN in one step."""

    def __init__(self, rank: int, at: int = SICK_AT) -> None:
        super().__init__()
        self.sick_rank, self.at = rank, at

    def training_step(self, batch: Any, i: int) -> Tensor:
        loss = super().training_step(batch, i)
        sick = self.global_rank == self.sick_rank and self.trainer.global_step == self.at - 1
        return loss * torch.nan if sick else loss


@dataclass
class Outcome:
    error: str
    final: dict[str, Tensor]
    told: list[str]
    figures: dict[str, float]
    saved: dict[str, int] = field(default_factory=dict)  # files: after how many steps


def fit(module: Tiny, rank: int, size: int, folder: Path | None = None, **changes: Any) -> Outcome:
    """Train; with a `folder` a file after every step that `every` divides, and `last.ckpt`."""
    every, resume = changes.pop("every", 1), changes.pop("resume", None)
    settings = {"sync_every": 4, "num_fragments": 2, "wire_dtype": "fp32", "evaluate": "outer"}
    strategy = StreamingDiLoCoStrategy(**{**settings, **changes})
    keep = ModelCheckpoint(
        folder, "{step}", save_last=True, save_top_k=-1, every_n_train_steps=every
    )
    trainer = quiet_trainer(
        strategy=strategy,
        devices=size,
        max_epochs=1,
        log_every_n_steps=1,
        callbacks=[] if folder is None else [keep],
        enable_checkpointing=folder is not None,
    )
    error = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(module, rank_loader(STEPS * 2 * size, 2, rank, size), ckpt_path=resume)
        except RuntimeError as problem:
            error = str(problem)
    return Outcome(
        error,
        {name: p.detach().clone() for name, p in module.named_parameters()},
        [str(one.message) for one in caught if "were not finite" in str(one.message)],
        strategy.figures(),
        {} if folder is None else {p.name: steps_of(p) for p in folder.glob("*.ckpt")},
    )


def steps_of(path: Path) -> int:
    """Return after how many steps it was written; its weights are finite."""
    checkpoint = torch.load(path, weights_only=False)
    assert all(bool(tensor.isfinite().all()) for tensor in checkpoint["state_dict"].values())
    return int(checkpoint["global_step"])


def on_two_ranks(rank: int, size: int, folder: Path) -> dict[str, Outcome]:
    run = partial(fit, rank=rank, size=size)
    abstain = partial(run, nonfinite="abstain", every=SICK_AT)
    outcomes = {
        "saved in mid-cycle": run(Sick(1), folder=folder / "a"),
        "landed": run(Sick(1), folder=folder / "b", every=4),
        "last round": run(Sick(0, at=STEPS), folder=folder / "c", every=4),
        "abstains": abstain(Sick(1), folder=folder / "d"),
    }
    resume = folder / "d" / f"step={SICK_AT}.ckpt"
    outcomes["resumed"] = abstain(Sick(1), folder=folder / "e", resume=resume)
    good = folder / "a" / "last.ckpt"  # what a run that has stopped goes on from
    outcomes["goes on"] = abstain(Sick(1), folder=folder / "f", resume=good)
    return outcomes


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Outcome]]:
    folder = tmp_path_factory.mktemp("nonfinite")
    return run_ranks(on_two_ranks, 2, folder, folder)


def test_a_save_before_the_next_landing_is_refused(two_ranks: list[dict[str, Outcome]]) -> None:
    for outcomes in two_ranks:
        got = outcomes["saved in mid-cycle"]
        assert (
            "after inner step 6 on rank 1: fragment 0. All ranks are stopping, and no checkpoint"
            in (got.error)
        )
        assert got.saved == {"last.ckpt": 5, **{f"step={i}.ckpt": i for i in range(1, 6)}}


def test_at_a_landing_all_ranks_stop_and_it_is_named(two_ranks: list[dict[str, Outcome]]) -> None:
    for outcomes in two_ranks:
        got = outcomes["landed"]
        assert "The outer gradient of fragment 1 from replica 1 (rank 1) is not finite" in got.error
        assert "due to be applied after inner step 7" in got.error
        assert got.saved == {"last.ckpt": 4, "step=4.ckpt": 4}


def test_the_last_round_looks_too(two_ranks: list[dict[str, Outcome]]) -> None:
    for outcomes in two_ranks:
        got = outcomes["last round"]
        assert "The outer gradient of fragment 0 from replica 0 (rank 0) is not finite" in got.error
        assert (
            f"due to be applied after inner step {STEPS};" in got.error
        )  # not the launch it was due for
        assert got.saved.keys() == {"last.ckpt", "step=4.ckpt", "step=8.ckpt", "step=12.ckpt"}
        assert got.saved["last.ckpt"] == 12


def test_with_abstain_the_fit_continues(two_ranks: list[dict[str, Outcome]]) -> None:
    for outcomes in two_ranks:
        got = outcomes["abstains"]
        assert not got.error
        assert got.figures["outer/abstentions_1"] == 1
        assert got.figures["outer/abstentions_0"] == 0
        assert all(tensor.isfinite().all() for tensor in got.final.values())
        assert_same(got.final, two_ranks[0]["abstains"].final)
    first, second = (outcomes["abstains"].told for outcomes in two_ranks)
    assert not first
    assert len(second) == 1
    assert "left out of the mean of fragment 1" in second[0]


def test_a_checkpoint_saved_during_an_abstention_resumes_exactly(
    two_ranks: list[dict[str, Outcome]],
) -> None:
    for outcomes in two_ranks:
        assert not outcomes["goes on"].error
        for resumed in ("resumed", "goes on"):  # the latter from before it was sick
            assert_same(outcomes[resumed].final, outcomes["abstains"].final)


def on_four_ranks(rank: int, size: int) -> list[Outcome]:
    run = partial(fit, rank=rank, size=size, replica_size=2)
    return [run(Sick(3)), run(Sick(3), nonfinite="abstain")]


def test_the_ranks_of_a_replica_act_together(tmp_path: Path) -> None:
    ranks = run_ranks(on_four_ranks, 4, tmp_path)
    for rank, (stopped, went_on) in enumerate(ranks):
        assert "fragment 1 from replica 1 (ranks 2 to 3) is not finite" in stopped.error
        assert not went_on.error
        assert went_on.figures["outer/abstentions_1"] == 1
        assert bool(went_on.told) == (rank >= 2)
        assert all(tensor.isfinite().all() for tensor in went_on.final.values())
        assert_same(went_on.final, ranks[0][1].final)
