"""Replicas of several ranks: DDP inside, Streaming DiLoCo between, each rank with its shard."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from lightning_commfree import StreamingDiLoCoStrategy
from tests.fit.models import (
    Recorder,
    Tiny,
    assert_same,
    dataset,
    loader,
    quiet_trainer,
    rank_loader,
)
from tests.world import run_ranks

STEPS = 11
BATCH = 2
SETTINGS: dict[str, Any] = {
    "sync_every": 4,
    "num_fragments": 2,
    "overlap_steps": 1,
    "outer_optimizer": partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True),
    "wire_dtype": "fp32",
}


class Logging(Tiny):
    """Keeps what a per-step log with `sync_dist=True` makes of the rank's number."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, float] = {}
        self.landings: dict[int, tuple[float, float]] = {}

    def training_step(self, batch: Any, i: int) -> Tensor:
        self.log("rank", float(self.global_rank), on_step=True, sync_dist=True)
        return super().training_step(batch, i)

    def validation_step(self, batch: Any, i: int) -> None:
        super().validation_step(batch, i)
        self.log("val_rank", float(self.global_rank), sync_dist=True, batch_size=1)

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen["rank"] = float(self.trainer.callback_metrics["rank"])
        if isinstance(self.trainer.strategy, StreamingDiLoCoStrategy):
            landings = self.trainer.strategy.algorithm.landings
            self.landings = {p: (one.gradient_norm, one.cosine) for p, one in landings.items()}


class Drifting(Logging):
    """One value of the outer weights that rank 3 holds changes; rank 1 alone holds the same."""

    def on_train_batch_start(self, batch: Any, i: int) -> None:
        if i == 4 and self.global_rank == 3:
            with torch.no_grad():
                self.trainer.strategy.algorithm.fragments[1].global_copy[0] += 1e-6


def fit(rank: int, size: int, replica_size: int, batch: int, **changes: Any) -> Any:
    recorder = Recorder()
    strategy = StreamingDiLoCoStrategy(**{**SETTINGS, "replica_size": replica_size, **changes})
    trainer = quiet_trainer(
        strategy=strategy, devices=size, max_epochs=1, callbacks=[recorder], num_sanity_val_steps=0
    )
    module = Logging()
    trainer.fit(module, rank_loader(STEPS * batch * size, batch, rank, size), loader(4 * size))
    numel = [copy.numel() for copy in recorder.outer[-1]]
    return {
        "local": recorder.local,
        "final": {name: p.detach().clone() for name, p in module.named_parameters()},
        "seen": module.seen,
        "landings": module.landings,
        "val_rank": float(trainer.callback_metrics["val_rank"]),
        "bytes": strategy.ledger.bytes_by_tag["outer_gradient"],
        "shard": numel,
        "weights": sum(p.numel() for p in module.parameters()),
    }


def compare(rank: int, size: int) -> Any:
    outcomes = {"k2": fit(rank, size, 2, BATCH), "k4": fit(rank, size, 4, BATCH)}
    module = Tiny()
    recorder = Recorder()
    trainer = quiet_trainer(
        strategy=DDPStrategy(), devices=size, max_epochs=1, callbacks=[recorder]
    )
    trainer.fit(module, rank_loader(STEPS * BATCH * size, BATCH, rank, size))
    outcomes["ddp"] = {"local": recorder.local}
    outcomes["drift"] = drift(rank, size)
    return outcomes


def drift(rank: int, size: int) -> str:
    strategy = StreamingDiLoCoStrategy(**SETTINGS, replica_size=2)
    trainer = quiet_trainer(strategy=strategy, devices=size, max_epochs=1)
    try:
        trainer.fit(Drifting(), rank_loader(STEPS * BATCH * size, BATCH, rank, size))
    except RuntimeError as error:
        return str(error)
    return "no error"


def two_replicas(rank: int, size: int) -> Any:
    """As two ranks: batch i of replica m is the batches of its two ranks, in their order."""
    recorder = Recorder()
    rows = torch.arange(STEPS * BATCH * 4).view(STEPS, BATCH, 4)  # step, sample, rank
    mine = rows[:, :, 2 * rank : 2 * rank + 2].transpose(1, 2).reshape(-1)
    x, y = dataset(STEPS * BATCH * 4).tensors
    data = torch.utils.data.TensorDataset(x[mine], y[mine])
    sampler = torch.utils.data.DistributedSampler(data, num_replicas=1, rank=0, shuffle=False)
    batches = torch.utils.data.DataLoader(data, batch_size=2 * BATCH, sampler=sampler)
    trainer = quiet_trainer(
        strategy=StreamingDiLoCoStrategy(**SETTINGS),
        devices=size,
        max_epochs=1,
        callbacks=[recorder],
        use_distributed_sampler=False,
    )
    module = Logging()
    trainer.fit(module, batches)
    return recorder.local, module.landings


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Any:
    four = run_ranks(compare, 4, tmp_path_factory.mktemp("four"))
    two = run_ranks(two_replicas, 2, tmp_path_factory.mktemp("two"))
    return four, two


def test_two_replicas_of_two_ranks_are_two_replicas_with_their_batches(played: Any) -> None:
    """To rounding: DDP adds the ranks' mean gradients, one rank averages over all samples."""
    four, two = played
    for rank in range(4):
        for got, expected in zip(four[rank]["k2"]["local"], two[rank // 2][0], strict=True):
            for name in expected:
                torch.testing.assert_close(got[name], expected[name], rtol=1e-4, atol=1e-5)
        assert_same(four[rank]["k2"]["local"], four[rank ^ 1]["k2"]["local"])  # one replica
        final = four[rank]["k2"]["final"]
        assert_same(final, four[0]["k2"]["final"])
    one, other = two[0][0][2], two[1][0][2]  # the replicas themselves differ by far more
    assert max((one[name] - other[name]).abs().max() for name in one) > 1e-3


def test_figures_are_of_whole_fragments_on_every_rank(played: Any) -> None:
    """A rank exchanges half of each: norm and cosine are put together within the replica."""
    four, two = played
    assert len(two[0][1]) == SETTINGS["num_fragments"]
    for rank in four:
        assert rank["k2"]["landings"] == four[0]["k2"]["landings"]
        for p, figures in two[0][1].items():
            assert rank["k2"]["landings"][p] == pytest.approx(figures, rel=1e-3, abs=1e-4)


def test_drift_of_one_shard_ends_the_fit_on_all_ranks(played: Any) -> None:
    for rank in played[0]:
        assert "global copies of fragment 1 differ" in rank["drift"]


def test_one_replica_of_all_ranks_is_ddp_until_its_first_landing(played: Any) -> None:
    four, _ = played
    for step in range(4):
        assert_same(four[0]["k4"]["local"][step], four[0]["ddp"]["local"][step])
    assert all(rank["k4"]["bytes"] == 0 for rank in four)


def test_every_rank_holds_and_sends_its_part(played: Any) -> None:
    four, _ = played
    for rank in four:
        total = rank["k2"]["weights"]
        assert total / 2 <= sum(rank["k2"]["shard"]) <= total / 2 + len(rank["k2"]["shard"])
        headers = 72 + 8  # and padding, for each of 2 fragments in 2 launches and the last round
        launches = 2 + 2 + 2
        assert rank["k2"]["bytes"] <= 3 * (4 * total / 2) + launches * headers
        assert rank["k2"]["bytes"] >= 3 * (4 * total / 2)


def test_logging_stays_within_the_replica_and_means_the_world_at_validation(played: Any) -> None:
    four, _ = played
    assert [rank["k2"]["seen"]["rank"] for rank in four] == [0.5, 0.5, 2.5, 2.5]
    assert [rank["k2"]["val_rank"] for rank in four] == [1.5] * 4


def resume(rank: int, size: int, folder: Path) -> Any:
    outcomes = []
    for path in (None, folder / "step=9.ckpt"):
        recorder = Recorder()
        save = ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=1)
        trainer = quiet_trainer(
            strategy=StreamingDiLoCoStrategy(
                **{**SETTINGS, "replica_size": 2, "wire_dtype": "fp4"}
            ),
            devices=size,
            max_epochs=1,
            enable_checkpointing=True,
            callbacks=[recorder, save] if path is None else [recorder],
        )
        trainer.fit(Tiny(), rank_loader(STEPS * BATCH * size, BATCH, rank, size), ckpt_path=path)
        outcomes.append(recorder.local)
    validated = quiet_trainer(strategy=DDPStrategy(), devices=size).validate(
        Tiny(), loader(8), ckpt_path=folder / f"step={STEPS}.ckpt", verbose=False
    )
    ours = trainer.validate(trainer.lightning_module, loader(8), verbose=False)
    return outcomes, validated, ours


def test_resume_is_exact_and_the_last_checkpoint_is_the_model(tmp_path: Path) -> None:
    for (straight, resumed), validated, ours in run_ranks(resume, 4, tmp_path, tmp_path):
        assert len(resumed) == STEPS - 9
        assert_same(resumed, straight[9:])
        assert validated == ours
