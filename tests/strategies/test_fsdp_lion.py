"""Nodes whose ranks hold parts of the model: FSDP2 inside, between them each votes on its part."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_commfree import DistributedLion, DistributedLionStrategy
from lightning_commfree.model.fsdp import why_not_divided
from lightning_commfree.model.shards import own
from tests.strategies.models import loader, quiet_trainer, rank_loader
from tests.strategies.test_fsdp import Uneven, Watch, weights
from tests.world import run_ranks

WHY_NOT = why_not_divided()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

STEPS = 21
BATCH = 2


class Voter(Uneven):
    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return DistributedLion(trained, lr=0.01, weight_decay=0.3)


class Faulty(Voter):
    """In step 3 one rank's part of a gradient holds NaN."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_step == 2 and self.global_rank == 3:
            own(self.blocks[1].weight.grad)[0, 0] = torch.nan


def fit(rank: int, size: int, folder: Path | None = None, **changes: Any) -> Any:
    resumed, kind = changes.pop("ckpt_path", None), changes.pop("module", Voter)
    options = changes.pop("trainer", {})
    strategy, watch = DistributedLionStrategy(node_size=2, **changes), Watch()
    callbacks: list[pl.Callback] = [watch]
    if folder is not None:
        callbacks.append(ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=9))
    trainer = quiet_trainer(
        strategy=strategy,
        devices=size,
        max_epochs=1,
        enable_checkpointing=folder is not None,
        callbacks=callbacks,
        num_sanity_val_steps=0,
        **options,
    )
    module, data = kind(), rank_loader(STEPS * BATCH * size, BATCH, rank, size)
    trainer.fit(module, data, loader(4 * size), ckpt_path=resumed)
    (optimizer,) = trainer.optimizers
    return {
        "local": watch.local,
        "final": weights(module),
        "val_loss": float(trainer.callback_metrics["val_loss"]),
        "momenta": sum(state["momentum"].numel() for state in optimizer.state.values()),
        "bytes": sum(strategy.ledger.bytes_by_tag[tag] for tag in ("vote_up", "vote_down")),
    }


VARIANTS: dict[str, dict[str, Any]] = {
    "majority": {},
    "average, bf16": {
        "vote": "average",
        "momentum_sync_every": 4,
        "trainer": {"precision": "bf16-true"},
    },
    "clipped": {"trainer": {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}},
}


def compare(rank: int, size: int, folder: Path) -> Any:
    played = {
        (inside, name): fit(
            rank,
            size,
            folder / inside / name if name == "majority" else None,
            inside=inside,
            **changes,
        )
        for name, changes in VARIANTS.items()
        for inside in ("ddp", "fsdp")
    }
    for layout, saved in (("fsdp", "fsdp"), ("fsdp", "ddp"), ("ddp", "fsdp")):
        path = folder / saved / "majority" / "step=9.ckpt"
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            resumed = fit(rank, size, inside=layout, ckpt_path=path)
        played[layout, saved] = {**resumed, "said": " ".join(str(one.message) for one in said)}
    try:
        fit(rank, size, inside="fsdp", module=Faulty)
    except RuntimeError as error:
        played["fault"] = str(error)
    return played


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("saved")
    return run_ranks(compare, 4, tmp_path_factory.mktemp("four"), folder), folder


def equal(got: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return all(torch.equal(got[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("name", ["majority", "average, bf16"])
def test_parts_are_voted_on_as_whole_copies_are(played: Any, name: str) -> None:
    """To the bit: a vote is on single elements, whoever holds them."""
    for rank in played[0]:
        ours, ddp = rank["fsdp", name], rank["ddp", name]
        assert len(ours["local"]) == STEPS
        for step, (got, expected) in enumerate(zip(ours["local"], ddp["local"], strict=True)):
            assert equal(got, expected), step
        assert equal(ours["final"], ddp["final"])
        assert ours["val_loss"] == ddp["val_loss"]


def test_gradients_are_clipped_by_the_norm_of_the_whole(played: Any) -> None:
    """A part's own norm would be smaller, and other signs would win; a sign near 0 may flip."""
    for rank in played[0]:
        ours, ddp = rank["fsdp", "clipped"]["final"], rank["ddp", "clipped"]["final"]
        differ = sum(int((ours[name] != tensor).sum()) for name, tensor in ddp.items())
        assert differ <= 2


def test_all_ranks_hold_the_same_weights_and_a_part_of_the_momenta(played: Any) -> None:
    trained = sum(p.numel() for p in Voter().parameters() if p.requires_grad)
    first, *others = (rank["fsdp", "majority"]["local"] for rank in played[0])
    for other in others:
        assert all(equal(got, expected) for got, expected in zip(other, first, strict=True))
    momenta = [rank["fsdp", "majority"]["momenta"] for rank in played[0]]
    assert momenta[0] + momenta[1] == momenta[2] + momenta[3] == trained
    assert all(rank["ddp", "majority"]["momenta"] == trained for rank in played[0])


def test_checkpoints_are_those_of_ddp(played: Any) -> None:
    ours, ddp = (
        torch.load(played[1] / inside / "majority" / "step=9.ckpt", weights_only=True)
        for inside in ("fsdp", "ddp")
    )
    assert equal(ours["state_dict"], ddp["state_dict"])
    (got,), (expected,) = ours["optimizer_states"], ddp["optimizer_states"]
    for index, state in expected["state"].items():
        assert equal(got["state"][index], state), index


def test_a_resume_is_exact(played: Any) -> None:
    for rank in played[0]:
        straight, resumed = rank["fsdp", "majority"]["local"], rank["fsdp", "fsdp"]["local"]
        assert len(resumed) == STEPS - 9
        for got, expected in zip(resumed, straight[9:], strict=True):
            assert equal(got, expected)


def test_another_layout_resumes_from_the_weights_and_says_so(played: Any) -> None:
    """Parts take up the momentum that the worker had as a whole one; not the other way round."""
    first, parts_of_whole = played[0][0], played[0][0]["fsdp", "ddp"]
    assert "inside was 'ddp' and is 'fsdp'" in parts_of_whole["said"]
    assert "takes up the momentum that it had" in parts_of_whole["said"]
    whole_of_parts = first["ddp", "fsdp"]
    assert "inside was 'fsdp' and is 'ddp'" in whole_of_parts["said"]
    assert len(whole_of_parts["local"]) == STEPS - 9


def test_one_bad_part_stops_all_ranks(played: Any) -> None:
    faults = [rank["fault"] for rank in played[0]]
    assert "'blocks.1.weight'" in faults[3]
    assert "'blocks.1.weight'" in faults[1]
    assert all("has refused step 3" in faults[i] for i in (0, 2))
