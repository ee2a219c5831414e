"""The data or the will of one rank ends, and those of the others do not: all end together."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_commfree import DistributedLion, DistributedLionStrategy
from tests.strategies.models import Tiny, dataset, loader, quiet_trainer
from tests.world import run_ranks

SIZE = 3
EVEN = 8  # batches of an epoch


class Voter(Tiny):
    """With buffers that the ranks average when they validate and at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))

    def on_train_start(self) -> None:
        torch.manual_seed(self.global_rank)

    def configure_optimizers(self) -> Any:
        return DistributedLion(self.parameters(), lr=1e-3)


class Stream(IterableDataset[Any]):
    """Rows of no known number; other ones on every rank."""

    def __init__(self, rank: int, batches: int) -> None:
        self.rank, self.batches = rank, batches

    def __iter__(self) -> Iterator[Any]:
        rows = dataset(2 * EVEN * 4)
        for i in range(2 * self.batches):
            yield rows[2 * EVEN * self.rank + i]


class StopIn(pl.Callback):
    """Wants to stop in a hook, after step `step`, on some ranks."""

    def __init__(self, hook: str, step: int, ranks: tuple[int, ...]) -> None:
        self.step, self.ranks = step, ranks
        setattr(self, hook, self.stop)

    def stop(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        if trainer.global_step == self.step and trainer.global_rank in self.ranks:
            trainer.should_stop = True


class Counts(pl.Callback):
    validations = 0

    def on_validation_end(self, *_: Any) -> None:
        self.validations += 1


def end(
    rank: int,
    folder: Path,
    batches: dict[int, int] | None = None,
    stop: StopIn | None = None,
    sized: bool = False,
    node_size: int = 1,
    **settings: Any,
) -> dict[str, Any]:
    strategy = DistributedLionStrategy(node_size=node_size)
    counts, save = Counts(), ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)
    trainer = quiet_trainer(
        strategy=strategy,
        devices=settings.pop("devices", SIZE),
        **{"max_epochs": 3, **settings},
        num_sanity_val_steps=0,
        enable_checkpointing=True,
        callbacks=[counts, save, *([stop] if stop else [])],
        use_distributed_sampler=False,
    )
    mine = (batches or {}).get(rank, EVEN)
    rows = Stream(rank, mine)
    data: Any = DataLoader(list(rows) if sized else rows, batch_size=2)
    module, error = Voter(), ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(module, data, loader(2 * SIZE))
        except RuntimeError as failure:
            error = str(failure)
    return {
        "step": trainer.global_step,
        "state": {name: tensor.clone() for name, tensor in module.state_dict().items()},
        "said": [str(w.message) for w in caught if "All ranks end" in str(w.message)],
        "error": error,
        "validations": counts.validations,
        "sent": dict(strategy.ledger.bytes_by_tag),
    }


CASES: dict[str, dict[str, Any]] = {
    "data": {"batches": {1: 5}},
    "the same, even": {"limit_train_batches": 5, "max_epochs": 1},
    "data of known number": {"batches": {0: 3, 2: 3}, "sized": True},
    "data, accumulated": {"batches": {1: 5}, "accumulate_grad_batches": 2},
    "data, not to be ended": {"batches": {1: 5}, "min_epochs": 2},
    "will in a batch": {"stop": StopIn("on_before_zero_grad", 2, (1,))},
    "will after a batch": {"stop": StopIn("on_train_batch_end", 3, (1,))},
    "will of all after a batch": {"stop": StopIn("on_train_batch_end", 3, (0, 1, 2))},
    "will after a validation": {"stop": StopIn("on_validation_end", EVEN, (0, 2))},
    "will of all after a validation": {"stop": StopIn("on_validation_end", EVEN, (0, 1, 2))},
    "will at an epoch's end": {"stop": StopIn("on_train_epoch_end", EVEN, (2,))},
    "will at the last epoch's end": {
        "stop": StopIn("on_train_epoch_end", EVEN, (2,)),
        "max_epochs": 1,
    },
    "data of one at the last step of all": {"batches": {1: 5}, "max_steps": 5},
}
PARTED = {
    "data": ("The data of rank 1 ended after step 5, and ranks 0, 2 would", 5),
    "data of known number": ("The data of ranks 0, 2 ended after step 3, and rank 1 would", 3),
    "data, accumulated": ("The data of rank 1 ended after step 3, and ranks 0, 2 would", 3),
    "will in a batch": ("rank 1 wanted to stop (`trainer.should_stop`) after step 3", 3),
    "will after a batch": ("rank 1 wanted to stop (`trainer.should_stop`) after step 4", 4),
    "will after a validation": (
        "ranks 0, 2 wanted to stop (`trainer.should_stop`) after",
        EVEN + 1,
    ),
    "will at an epoch's end": ("rank 2 wanted to stop", EVEN + 1),
}
TOGETHER = {
    "will of all after a batch": 3,
    "will of all after a validation": EVEN,
    "will at the last epoch's end": EVEN,
}


def play(rank: int, size: int, folder: Path) -> dict[str, dict[str, Any]]:
    return {name: end(rank, folder / name, **case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("ends")
    return run_ranks(play, SIZE, folder, folder / "saved")


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        if tensor.is_floating_point():  # else it counts the batches that a rank has seen
            assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("case", PARTED)
def test_all_end_after_the_same_step_with_the_same_weights_and_say_whose_it_was(
    case: str, ends: list[dict[str, dict[str, Any]]]
) -> None:
    said, step = PARTED[case]
    for rank in ends:
        assert rank[case]["error"] == ""
        assert rank[case]["step"] == step
        assert [said in text for text in rank[case]["said"]] == [True], rank[case]["said"]
        assert rank[case]["validations"] == ends[0][case]["validations"] > 0
        assert_same(rank[case]["state"], ends[0][case]["state"])


def test_nothing_is_lost_of_the_step_that_is_the_last(
    ends: list[dict[str, dict[str, Any]]],
) -> None:
    for rank in ends:
        assert_same(rank["data"]["state"], rank["the same, even"]["state"])


@pytest.mark.parametrize("case", TOGETHER)
def test_where_all_stop_at_once_they_do_and_nothing_is_sent_for_it(
    case: str, ends: list[dict[str, dict[str, Any]]]
) -> None:
    for rank in ends:
        assert (rank[case]["error"], rank[case]["said"]) == ("", [])
        assert rank[case]["step"] == TOGETHER[case]
        assert "end" not in rank[case]["sent"]
        assert_same(rank[case]["state"], ends[0][case]["state"])


def test_where_the_fit_ends_on_all_for_other_reasons_they_validate_alike(
    ends: list[dict[str, dict[str, Any]]],
) -> None:
    case = "data of one at the last step of all"
    for rank in ends:
        assert (rank[case]["error"], rank[case]["said"], rank[case]["step"]) == ("", [], 5)
        assert rank[case]["validations"] == 1
        assert_same(rank[case]["state"], ends[0][case]["state"])


def test_a_fit_that_may_not_end_there_fails_on_all_ranks_alike(
    ends: list[dict[str, dict[str, Any]]],
) -> None:
    for rank in ends:
        error = rank["data, not to be ended"]["error"]
        assert error.startswith("The data of rank 1 ended after step 5, and ranks 0, 2 would have")
        assert "The fit cannot end here, for `min_epochs=2` and `min_steps=None`." in error


def play_nodes(rank: int, size: int, folder: Path) -> list[dict[str, Any]]:
    return [
        end(rank, folder / "data", {1: 4}, node_size=2, devices=4),
        end(
            rank,
            folder / "will",
            None,
            StopIn("on_train_batch_end", 3, (2,)),
            node_size=2,
            devices=4,
        ),
    ]


def test_ranks_of_a_node(tmp_path: Path) -> None:
    ranks = run_ranks(play_nodes, 4, tmp_path, tmp_path / "saved")
    for data, will in ranks:
        assert (data["step"], will["step"]) == (4, 4)
        assert "The data of rank 1 ended after step 4" in data["said"][0]
        assert "rank 2 wanted to stop" in will["said"][0]
        assert_same(data["state"], ranks[0][0]["state"])
        assert_same(will["state"], ranks[0][1]["state"])
