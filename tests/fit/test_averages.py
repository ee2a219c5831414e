"""Lightning's moving average of weights, under DiLoCo one of the outer weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_commfree import StreamingDiLoCoStrategy
from tests.fit.models import Recorder, Tiny, assert_same, quiet_trainer, rank_loader
from tests.fit.models import loader as all_rows
from tests.world import run_ranks

Average = getattr(callbacks, "EMAWeightAveraging", None)
pytestmark = pytest.mark.skipif(Average is None, reason="came with Lightning 2.6")

DECAY, STEPS = 0.8, 20
EVERY, SAVED = 8, 5  # steps from one validation, and one checkpoint, to the next


class Seeing(Tiny):
    """Keeps the parameters with which each validation begins, and has running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.seen: list[dict[str, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.embed(x))
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)

    def validation_step(self, batch: Any, index: int) -> None:
        super().validation_step(batch, index)
        if index == 0 and not self.trainer.sanity_checking:
            self.seen.append(parameters(self))


def parameters(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


class Stop(pl.Callback):
    """Ends the fit at a moment that the strategy cannot foresee."""

    def on_train_epoch_end(self, trainer: pl.Trainer, _: pl.LightningModule) -> None:
        trainer.should_stop = trainer.current_epoch == 1


def fit(rank: int, size: int, folder: Path, path: Path | None = None, **settings: Any) -> Any:
    stop = settings.pop("stop", False)
    recorder, module = Recorder(), Seeing()
    saves = ModelCheckpoint(folder, every_n_train_steps=SAVED, save_top_k=-1, save_last=True)
    strategy = StreamingDiLoCoStrategy(
        sync_every=4, num_fragments=2, overlap_steps=2, wire_dtype="fp32", **settings
    )
    trainer = quiet_trainer(
        strategy=strategy,
        devices=size,
        max_steps=-1 if stop else STEPS,
        max_epochs=9 if stop else None,
        val_check_interval=EVERY,
        check_val_every_n_epoch=None,
        enable_checkpointing=True,
        callbacks=[Average(decay=DECAY), recorder, saves, *([Stop()] if stop else [])],
        use_distributed_sampler=False,
    )
    data = rank_loader(STEPS * size, 2, rank, size)  # STEPS / 2 of an epoch
    trainer.fit(module, data, all_rows(8), ckpt_path=path)
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    return {
        "outer": recorder.outer,
        "local": recorder.local,
        "seen": module.seen,
        "state": state,
        "names": strategy.fragments,
        "numel": {name: p.numel() for name, p in module.named_parameters()},
    }


def many(rank: int, size: int, folder: Path) -> Any:
    plain = fit(rank, size, folder / "plain")
    path = next((folder / "plain").glob(f"*step={SAVED}.ckpt"))
    return {
        "plain": plain,
        "resumed": fit(rank, size, folder / "resumed", path),
        "stopped": fit(rank, size, folder / "stopped", stop=True),
        "one replica of two": fit(rank, size, folder / "shards", replica_size=2),
    }


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("averages")
    return run_ranks(many, 2, folder, folder), folder


def averages(outcome: dict[str, Any]) -> list[list[Tensor]]:
    """Return the average of each fragment's parameters after every step, by the formula."""
    average = [outer.clone() for outer in outcome["outer"][0]]
    steps = [average]
    for outer in outcome["outer"][1:]:
        average = [DECAY * a + (1 - DECAY) * o for a, o in zip(average, outer, strict=True)]
        steps.append(average)
    return steps


def flat(outcome: dict[str, Any], weights: dict[str, Tensor]) -> list[Tensor]:
    """Return parameters as fragments have them."""
    return [torch.cat([weights[name].flatten() for name in f]) for f in outcome["names"]]


def assert_near(outcome: dict[str, Any], weights: dict[str, Tensor], average: Any) -> None:
    for got, wanted in zip(flat(outcome, weights), average, strict=True):
        torch.testing.assert_close(got, wanted[: got.numel()])  # behind it are buffers


def test_validations_and_the_end_see_the_average_of_outer_weights(played: Any) -> None:
    ranks, _ = played
    for name in ("plain", "stopped"):
        outcome = ranks[0][name]
        expected = averages(outcome)
        assert len(outcome["seen"]) == STEPS // EVERY
        for i, seen in enumerate(outcome["seen"], start=1):
            assert_near(outcome, seen, expected[i * EVERY - 1])
        assert_near(outcome, outcome["state"], expected[-1])
        apart = flat(outcome, outcome["state"])[0] - outcome["outer"][-1][0][:1]
        assert apart.abs().max() > 1e-4, "not the outer weights themselves"


def test_all_ranks_have_the_same_average(played: Any) -> None:
    first, second = played[0]
    for name in first:
        assert_same(second[name]["seen"], first[name]["seen"])
        assert_same(second[name]["state"], first[name]["state"])
    local = [outcome["plain"]["local"][5]["head.weight"] for outcome in played[0]]
    assert not torch.equal(*local), "of different local weights"


def test_shards_of_a_replica_are_put_together(played: Any) -> None:
    outcome = played[0][0]["one replica of two"]
    average = None
    shards = [rank["one replica of two"]["outer"] for rank in played[0]]
    for step in range(STEPS):
        outer = [torch.cat(parts) for parts in zip(*(shard[step] for shard in shards), strict=True)]
        update = partial(zip, strict=True)
        average = (
            outer
            if average is None
            else [DECAY * a + (1 - DECAY) * o for a, o in update(average, outer)]
        )
    assert_near(outcome, outcome["state"], average)


def test_checkpoints_hold_the_average_and_resume_exactly(played: Any) -> None:
    ranks, folder = played
    plain = ranks[0]["plain"]
    saved = torch.load(next((folder / "plain").glob(f"*step={SAVED}.ckpt")), weights_only=True)
    assert_near(plain, saved["state_dict"], averages(plain)[SAVED - 1])
    last = torch.load(folder / "plain" / "last.ckpt", weights_only=True)["state_dict"]
    assert_same(last, plain["state"])
    for rank in ranks:
        resumed, plain = rank["resumed"], rank["plain"]
        assert_same(resumed["local"], plain["local"][SAVED:])
        assert_same(resumed["state"], plain["state"])
