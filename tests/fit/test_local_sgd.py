"""A new algorithm between replicas is small: the LocalSGD of the examples."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from examples.local_sgd import LocalSGDStrategy
from tests.fit.models import Noisy, Recorder, dataset, quiet_trainer
from tests.world import run_ranks

H, STEPS, SAVED = 4, 11, 6


class Watch(pl.Callback):
    """Keeps what the module holds in validations, by step."""

    def __init__(self) -> None:
        self.seen: dict[int, dict[str, Tensor]] = {}

    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        self.seen[trainer.global_step] = weights(pl_module)


class Zeroed(Noisy):
    """Changes the weights of the checkpoint that it resumes from, and keeps those of its start."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        for name, tensor in checkpoint["state_dict"].items():
            checkpoint["state_dict"][name] = torch.zeros_like(tensor)

    def on_train_batch_start(self, *_: Any) -> None:
        if self.trainer.global_step == SAVED:
            self.start = weights(self)


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def fit(
    size: int,
    folder: Path,
    ckpt_path: Path | None = None,
    module: Noisy | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    recorder, watch, module = Recorder(), Watch(), module or Noisy()
    saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=SAVED, save_top_k=-1)
    strategy = LocalSGDStrategy(H)
    trainer = quiet_trainer(
        strategy=strategy,
        devices=size,
        max_steps=STEPS,
        callbacks=[recorder, watch, *([] if ckpt_path else [saving])],
        enable_checkpointing=not ckpt_path,
        val_check_interval=5,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        **kwargs,
    )
    data = DataLoader(dataset(16 * size), batch_size=2, shuffle=True)
    trainer.fit(module, data, DataLoader(dataset(4), batch_size=2), ckpt_path=ckpt_path)
    return {
        "local": recorder.local,
        "seen": watch.seen,
        "end": weights(module),
        "sent": strategy.ledger.bytes_by_phase["steps"]["average"],
        "planned": strategy.traffic().bytes_per_step,
        "figures": strategy.figures(),
    }


def play(rank: int, size: int, folder: Path) -> dict[str, Any]:
    straight, saved, zeroed = fit(size, folder), folder / f"step={SAVED}.ckpt", Zeroed()
    resumed = fit(size, folder, saved)
    with (
        pytest.warns(UserWarning, match="`on_load_checkpoint` changed")
        if rank == 0
        else nullcontext()
    ):
        fit(size, folder, saved, zeroed)
    return {"straight": straight, "resumed": resumed, "zeroed": zeroed.start}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("local_sgd")
    return run_ranks(play, 2, folder, folder), folder


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def test_replicas_train_apart_and_meet(ranks: Any) -> None:
    (one, other), _ = ranks
    for step, (mine, theirs) in enumerate(
        zip(one["straight"]["local"], other["straight"]["local"], strict=True), start=1
    ):
        assert same(mine, theirs) == (step % H == 0 or step == STEPS), step


def test_all_ranks_end_with_the_same_weights(ranks: Any) -> None:
    (one, other), _ = ranks
    assert same(one["straight"]["end"], other["straight"]["end"])
    assert not same(one["straight"]["end"], one["straight"]["local"][H - 1])


def test_validations_and_checkpoints_hold_the_shared_weights(ranks: Any) -> None:
    (one, other), folder = ranks
    assert same(one["straight"]["seen"][5], one["straight"]["local"][H - 1])
    assert not same(one["straight"]["seen"][5], one["straight"]["local"][4])
    saved = torch.load(folder / f"step={SAVED}.ckpt", weights_only=True)["state_dict"]
    assert same(one["straight"]["local"][H - 1], saved)


def test_it_resumes_bit_for_bit(ranks: Any) -> None:
    for rank in ranks[0]:
        after = rank["straight"]["local"][SAVED:]
        assert len(rank["resumed"]["local"]) == STEPS - SAVED
        assert all(map(same, rank["resumed"]["local"], after))
        assert same(rank["resumed"]["end"], rank["straight"]["end"])


def test_a_hooks_change_of_the_weights_is_kept(ranks: Any) -> None:
    for rank in ranks[0]:
        assert not any(tensor.any() for tensor in rank["zeroed"].values())


def test_the_forecast_equals_the_counted_bytes(ranks: Any) -> None:
    for rank in ranks[0]:
        straight = rank["straight"]
        assert straight["sent"] == STEPS // H * H * straight["planned"]
        assert straight["figures"]["comm/compression"] > 1
