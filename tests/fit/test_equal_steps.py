"""Ranks with unequal data train as many batches as the rank with the fewest, in every epoch."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_commfree import (
    DistributedLion,
    DistributedLionStrategy,
    DominoTPStrategy,
    StreamingDiLoCoStrategy,
)
from tests.fit import causal_lm
from tests.fit.models import Tiny, dataset, quiet_trainer
from tests.world import run_ranks

SHORT, LONG, EPOCHS = 4, 6, 2


class Validations(pl.Callback):
    """Notes after which step each validation runs, and the totals that a progress bar shows."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.totals: list[float] = []

    def on_validation_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.steps.append(trainer.global_step)

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.totals.append(trainer.num_training_batches)


class Scheduled(Tiny):
    """Makes a scheduler of as many steps as the Trainer estimates."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        self.estimated = self.trainer.estimated_stepping_batches
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, int(self.estimated))]


class Voter(Scheduled):
    def configure_optimizers(self) -> Any:
        self.estimated = self.trainer.estimated_stepping_batches
        return DistributedLion(self.parameters(), lr=1e-3)


class Text(causal_lm.CausalLM):
    def configure_optimizers(self) -> Any:
        self.estimated = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


class TextVoter(Text):
    def configure_optimizers(self) -> Any:
        self.estimated = self.trainer.estimated_stepping_batches
        return DistributedLion(self.parameters(), lr=1e-3)


def diloco(size: int, inside: str) -> Any:
    return StreamingDiLoCoStrategy(
        sync_every=4, num_fragments=2, replica_size=size, inside=inside, wire_dtype="fp32"
    )


def lion(size: int, inside: str) -> Any:
    return DistributedLionStrategy(node_size=size, inside=inside)


def domino(size: int, inside: str) -> Any:
    return DominoTPStrategy(size, "batch")


def fit(make: Any, world: int, size: int, inside: str, short: tuple[int, ...], **on: Any) -> Any:
    strategy = make(size, inside)
    text = inside == "domino"
    if text:
        module: Any = TextVoter() if make is lion else Text()
    else:
        module = Voter() if make is lion else Scheduled()
    validations = Validations()
    trainer = quiet_trainer(
        strategy=strategy,
        devices=world,
        max_epochs=EPOCHS,
        num_sanity_val_steps=0,
        callbacks=[validations],
        use_distributed_sampler=False,
        **on,
    )
    rank = strategy.cluster_environment.global_rank() if strategy.cluster_environment else 0
    batches = SHORT if rank in short else LONG
    rows = causal_lm.words(LONG * 2) if text else dataset(LONG * 2)
    data = DataLoader(list(rows)[: 2 * batches], batch_size=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, data, DataLoader(rows, batch_size=len(rows)))
    return {
        "steps": trainer.global_step,
        "validations": validations.steps,
        "totals": validations.totals,
        "estimated": module.estimated,
        "weights": torch.cat([p.detach().flatten() for p in module.parameters()])
        if inside != "fsdp"
        else torch.zeros(1),
        "said": [str(w.message) for w in caught if "fewest training batches" in str(w.message)],
    }


PAIR: dict[str, tuple[Any, ...]] = {
    "diloco": (diloco, 2, 1, "ddp", (1,)),
    "lion": (lion, 2, 1, "ddp", (1,)),
    "domino": (domino, 2, 1, "domino", (1,)),
    "domino, one group": (domino, 2, 2, "domino", (1,)),
}
FOUR: dict[str, tuple[Any, ...]] = {
    "domino in groups": (domino, 4, 2, "domino", (2, 3)),
    "diloco, ddp": (diloco, 4, 2, "ddp", (1,)),
    "diloco, fsdp": (diloco, 4, 2, "fsdp", (1,)),
    "diloco, domino": (diloco, 4, 2, "domino", (2, 3)),
    "lion, ddp": (lion, 4, 2, "ddp", (1,)),
    "lion, fsdp": (lion, 4, 2, "fsdp", (1,)),
    "lion, domino": (lion, 4, 2, "domino", (2, 3)),
}


def play(rank: int, size: int) -> dict[str, Any]:
    cases = PAIR if size == 2 else FOUR
    found = {name: fit(*case) for name, case in cases.items()}
    if size == 2:
        found["half an epoch"] = fit(*PAIR["diloco"], val_check_interval=0.5)
        found["reloaded"] = fit(*PAIR["diloco"], reload_dataloaders_every_n_epochs=1)
        found["even"] = fit(diloco, 2, 1, "ddp", (0, 1))
    return found


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(play, 2, tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(play, 4, tmp_path_factory.mktemp("four"))


def check(ranks: list[dict[str, Any]], name: str) -> None:
    for found in (rank[name] for rank in ranks):
        assert found["steps"] == SHORT * EPOCHS
        assert found["totals"] == [SHORT] * EPOCHS
        assert found["estimated"] == SHORT * EPOCHS
        assert torch.equal(found["weights"], ranks[0][name]["weights"])
        assert found["validations"] == ranks[0][name]["validations"]


@pytest.mark.parametrize("name", PAIR)
def test_two_ranks_train_the_shorter_ones_batches(pair: list[Any], name: str) -> None:
    check(pair, name)
    assert pair[0][name]["validations"] == [SHORT, 2 * SHORT]


@pytest.mark.parametrize("name", FOUR)
def test_replicas_and_nodes_of_two_ranks_do_so_too(four: list[Any], name: str) -> None:
    check(four, name)


def test_one_warning_names_the_shortest_rank_and_what_the_others_leave_out(
    pair: list[Any], four: list[Any]
) -> None:
    (said,) = pair[0]["diloco"]["said"]
    assert said.startswith("Rank 1 has the fewest training batches (4 per epoch)")
    assert "rank 0 leaves out 2" in said
    assert pair[1]["diloco"]["said"] == []
    (said,) = four[0]["lion, fsdp"]["said"]
    assert "rank 0 leaves out 2, rank 2 leaves out 2, rank 3 leaves out 2" in said
    assert pair[0]["even"]["said"] == []


def test_a_share_of_an_epoch_is_one_of_the_shortened_epoch(pair: list[Any]) -> None:
    check(pair, "half an epoch")
    expected = [epoch * SHORT + step for epoch in range(EPOCHS) for step in (2, 4)]
    assert pair[0]["half an epoch"]["validations"] == expected


def test_reloaded_loaders_are_shortened_again(pair: list[Any]) -> None:
    check(pair, "reloaded")
    assert len(pair[0]["reloaded"]["said"]) == 1
