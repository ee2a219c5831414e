"""The data or the will of one rank ends under DiLoCo, and those of the others do not."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_commfree import StreamingDiLoCoStrategy
from tests.strategies.models import Tiny, dataset, loader, quiet_trainer
from tests.world import run_ranks

SIZE = 3
EVEN = 12  # batches of an epoch
SETTINGS: dict[str, Any] = {"sync_every": 4, "num_fragments": 2, "wire_dtype": "fp32"}


class Stream(IterableDataset[Any]):
    """Rows of no known number; other ones on every rank."""

    def __init__(self, rank: int, batches: int) -> None:
        self.rank, self.batches = rank, batches

    def __iter__(self) -> Iterator[Any]:
        rows = dataset(2 * EVEN * 4)
        for i in range(2 * self.batches):
            yield rows[2 * EVEN * self.rank + i]


class Meaning(Tiny):
    """Logs a mean over an epoch and all ranks: a collective at the end of each."""

    def training_step(self, batch: Any, i: int) -> Tensor:
        loss = super().training_step(batch, i)
        self.log("mean_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss


class StopIn(pl.Callback):
    """Wants to stop in a hook, after step `step`, on some ranks."""

    def __init__(self, hook: str, step: int, ranks: tuple[int, ...]) -> None:
        self.step, self.ranks = step, ranks
        setattr(self, hook, self.stop)

    def stop(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        if trainer.global_step == self.step and trainer.global_rank in self.ranks:
            trainer.should_stop = True


class Watch(pl.Callback):
    """Keeps the local weights of the last round, and counts validations."""

    def __init__(self) -> None:
        self.validations = 0
        self.before: dict[str, Tensor] | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        diloco = trainer.strategy.now.between
        settle = diloco.settle_arrived

        def remember(p: int) -> bool:
            if self.before is None:
                self.before = {n: t.detach().clone() for n, t in pl_module.named_parameters()}
            return settle(p)

        diloco.settle_arrived = remember

    def on_validation_end(self, *_: Any) -> None:
        self.validations += 1


def end(
    rank: int,
    size: int,
    folder: Path,
    batches: dict[int, int] | None = None,
    stop: StopIn | None = None,
    module: type[Tiny] = Tiny,
    validate: bool = True,
    save: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    **trained: Any,
) -> dict[str, Any]:
    watch, callbacks = Watch(), [stop] if stop else []
    if save is not None:
        callbacks.append(ModelCheckpoint(folder, "{epoch}-{step}", save_top_k=-1, **save))
    trainer = quiet_trainer(
        strategy=StreamingDiLoCoStrategy(**{**SETTINGS, **(settings or {})}),
        devices=size,
        **{"max_epochs": 3, **trained},
        num_sanity_val_steps=0,
        enable_checkpointing=save is not None,
        callbacks=[watch, *callbacks],
        use_distributed_sampler=False,
    )
    data = DataLoader(Stream(rank, (batches or {}).get(rank, EVEN)), batch_size=2)
    made, error = module(), ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(made, data, loader(2 * size) if validate else None)
        except RuntimeError as failure:
            error = str(failure)
    return {
        "step": trainer.global_step,
        "before": watch.before,
        "after": {name: p.detach().clone() for name, p in made.named_parameters()},
        "said": [str(w.message) for w in caught if "All ranks end" in str(w.message)],
        "error": error,
        "validations": watch.validations,
    }


DATA_1 = "The data of rank 1 ended after step 5, and ranks 0, 2 would have gone on."
WILL_1 = "rank 1 wanted to stop (`trainer.should_stop`) after step {}, and ranks 0, 2 would have"

# what is done; the steps of the ranks; what is said
CASES: dict[str, tuple[dict[str, Any], list[int], str]] = {
    "one epoch": ({"batches": {1: 5}, "max_epochs": 1}, [7, 5, 7], DATA_1),
    "before the first exchange": (
        {"batches": {0: 5}, "max_epochs": 1, "settings": {"sync_every": 8}},
        [5, 9, 9],
        "The data of rank 0 ended after step 5, and ranks 1, 2 would have gone on.",
    ),
    "nothing else": ({"batches": {1: 5}, "max_epochs": 1, "validate": False}, [7, 5, 7], DATA_1),
    "epochs with validation": ({"batches": {1: 5}}, [7, 5, 7], DATA_1),
    "epochs with checkpoints": (
        {"batches": {1: 5}, "validate": False, "save": {}},
        [7, 5, 7],
        DATA_1,
    ),
    "epochs with a mean": (
        {"batches": {1: 5}, "validate": False, "module": Meaning},
        [7, 5, 7],
        DATA_1,
    ),
    "both ends": (
        {"batches": {0: 10, 1: 5}, "save": {"every_n_train_steps": 2}},
        [6, 5, 6],
        DATA_1,
    ),
    "will after a batch": (
        {"stop": StopIn("on_train_batch_end", 6, (1,)), "save": {}},
        [9, 6, 9],
        WILL_1.format(6),
    ),
    "will in validation": (
        {"stop": StopIn("on_validation_end", 6, (1,)), "val_check_interval": 3, "save": {}},
        [6, 6, 6],
        WILL_1.format(6),
    ),
    "evaluated by the mean": (
        {"batches": {1: 5}, "val_check_interval": 5, "settings": {"evaluate": "mean"}},
        [17, 15, 17],  # after 5 and 10 steps all come to a validation, in different epochs
        "The data of rank 1 ended after step 15, and ranks 0, 2 would have gone on.",
    ),
    "validations apart": (
        {"batches": {1: 5}, "val_check_interval": 2},
        [6, 7, 6],
        "",  # of 0 and 2, which wait, one may be told by the other
    ),
}


REFUSED = {"batches": {1: 5}, "max_epochs": 1, "min_steps": 11}
CHECKPOINTED = ("epochs with checkpoints", "both ends", "will after a batch", "will in validation")


def play(rank: int, size: int, folder: Path) -> dict[str, Any]:
    ends = {
        name: end(rank, size, folder / str(i), **done)
        for i, (name, (done, _, _)) in enumerate(CASES.items())
    }
    return {**ends, "refused": end(rank, size, folder, **REFUSED)}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], Path]:
    folder = tmp_path_factory.mktemp("ends")
    return run_ranks(play, SIZE, folder, folder), folder


@pytest.fixture
def played(outcomes: tuple[list[Any], Path]) -> list[Any]:
    return outcomes[0]


@pytest.mark.parametrize("name", list(CASES))
def test_all_end_within_one_exchange_with_the_mean_of_all(played: Any, name: str) -> None:
    _, steps, text = CASES[name]
    ranks = [rank[name] for rank in played]
    assert [rank["error"] for rank in ranks] == [""] * SIZE
    assert [rank["step"] for rank in ranks] == steps
    for rank in ranks:
        (said,) = rank["said"]
        assert said.startswith(text)
        if not text:
            assert "waited at the end of an epoch, a validation or a checkpoint after st" in said
        assert "All ranks end the fit when they learn of it, after step " in said
        for key, tensor in rank["after"].items():
            assert torch.equal(tensor, ranks[0]["after"][key])
            mean = sum(one["before"][key] for one in ranks) / SIZE
            torch.testing.assert_close(tensor, mean, rtol=1e-5, atol=1e-6)
    apart = ranks[0]["before"]["head.weight"] - ranks[1]["before"]["head.weight"]
    assert apart.abs().max() > 1e-3
    assert len({rank["validations"] for rank in ranks}) == 1


@pytest.mark.parametrize("name", CHECKPOINTED)
def test_the_last_checkpoint_holds_the_mean(outcomes: Any, name: str) -> None:
    """Also one for which not all ranks were there, as at step 6 of "both ends"."""
    ranks, folder = outcomes
    files = list((folder / str(list(CASES).index(name))).glob("*.ckpt"))
    newest = max(files, key=lambda file: file.stat().st_mtime)
    saved = torch.load(newest, weights_only=True)["state_dict"]
    for key, tensor in ranks[0][name]["after"].items():
        assert torch.equal(saved[key], tensor), (newest, key)


def test_a_minimum_that_forbids_the_end_is_an_error_on_all_ranks(played: Any) -> None:
    for rank in played:
        error = rank["refused"]["error"]
        assert error.startswith(DATA_1)
        assert "The fit cannot end here, for `min_epochs=1` and `min_steps=11`" in error


def end_in_pairs(rank: int, size: int, folder: Path) -> Any:
    settings = {"replica_size": 2}
    return end(rank, size, folder, {2: 5, 3: 5}, settings=settings, max_epochs=1)


def test_a_whole_replica_that_ends_is_named_by_its_ranks(tmp_path: Path) -> None:
    ranks = run_ranks(end_in_pairs, 4, tmp_path, tmp_path)
    assert [rank["error"] for rank in ranks] == [""] * 4
    assert [rank["step"] for rank in ranks] == [7, 7, 5, 5]
    for rank in ranks:
        assert rank["said"][0].startswith(
            "The data of ranks 2, 3 ended after step 5, and ranks 0, 1 would have gone on."
        )
        for key, tensor in rank["after"].items():
            assert torch.equal(tensor, ranks[0]["after"][key])
