"""Lightning features under `StreamingDiLoCoStrategy` on two real ranks; every byte is counted."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_commfree import StreamingDiLoCoStrategy
from lightning_commfree.host import ModelCheckpoint, pl
from tests.fit.models import Recorder, Tiny, assert_same, loader, quiet_trainer
from tests.world import run_ranks


class Habits(Tiny):
    """A scheduler, a metric per epoch, and a look at what clipping left of the gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.grad_norms: list[float] = []
        self.validated_with: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("rank_mean", float(self.global_rank), on_step=True, on_epoch=True, sync_dist=True)
        return 100 * loss

    def on_validation_epoch_start(self) -> None:
        self.validated_with.append(self.head.weight.detach().clone())

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        # after clipping, unlike the module's own hook
        optimizer.register_step_post_hook(lambda *_: self.grad_norms.append(self.grad_norm()))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def grad_norm(self) -> float:
        return float(
            torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in self.parameters()]))
        )


def fit_with_habits(rank: int, size: int, folder: Path) -> Any:
    strategy = StreamingDiLoCoStrategy(
        sync_every=6, num_fragments=2, overlap_steps=2, wire_dtype="bf16", evaluate="outer"
    )
    recorder = Recorder()
    trainer = quiet_trainer(
        strategy=strategy,
        devices=size,
        max_epochs=2,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        precision="bf16-mixed",
        val_check_interval=10,
        callbacks=[recorder],
        logger=pl.loggers.CSVLogger(folder),
        log_every_n_steps=5,
    )
    module = Habits()
    trainer.fit(module, loader(40 * 2 * size), loader(8))
    return {
        "steps": trainer.global_step,
        "lr": trainer.optimizers[0].param_groups[0]["lr"],
        "norms": module.grad_norms,
        "traffic": strategy.traffic(),
        "bytes": dict(strategy.ledger.bytes_by_tag),
        "phases": {phase: dict(sent) for phase, sent in strategy.ledger.bytes_by_phase.items()},
        "numel": [len(outer) for outer in recorder.outer[0]],
        "validated_with": module.validated_with,
        "outer": [[outer.clone() for outer in step] for step in recorder.outer],
        "head": [step["head.weight"] for step in recorder.local],
        "metrics": {k: float(v) for k, v in trainer.callback_metrics.items()},
        "dtypes": {p.dtype for p in module.parameters()},
        "fragments": strategy.fragments,
    }


@pytest.fixture(scope="module")
def habits(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    folder = tmp_path_factory.mktemp("habits")
    return run_ranks(fit_with_habits, 2, folder, folder), folder


def test_steps_are_optimizer_steps_and_bytes_are_counted(habits: Any) -> None:
    """80 batches, accumulated by 2, are 40 steps. H = 6: fragment 0 leaves 6 times, fragment 1
    (offset 3) 6 times."""
    for rank in habits[0]:
        assert rank["steps"] == 40
        sizes = [-(-(72 + 2 * numel) // 8) * 8 for numel in rank["numel"]]  # header, bf16, aligned
        launches = [len(range(6, 41, 6)) + 1, len(range(9, 41, 6)) + 1]  # and the final round
        assert rank["bytes"]["outer_gradient"] == sum(
            n * s for n, s in zip(launches, sizes, strict=True)
        )
        steps = [len(range(6, 41, 6)), len(range(9, 41, 6))]
        assert rank["phases"]["steps"] == {
            "outer_gradient": sum(n * s for n, s in zip(steps, sizes, strict=True))
        }
        assert rank["phases"]["end"] == {"outer_gradient": sum(sizes)}
        assert set(rank["phases"]["start"]) == {"peers", "handshake", "start"}
        assert sum(sum(sent.values()) for sent in rank["phases"].values()) == sum(
            rank["bytes"].values()
        )
        traffic = rank["traffic"]
        assert traffic.bytes_by_tag == {"outer_gradient": sum(sizes)}
        assert traffic.bytes_per_cycle == sum(sizes)
        assert traffic.bytes_per_step == sum(sizes) / 6
        assert traffic.ddp_bytes_per_step == 4 * sum(
            rank["numel"]
        )  # ring of two ranks: N values sent


def test_clipping_scheduler_and_precision_act_inside_the_replica(habits: Any) -> None:
    for rank in habits[0]:
        assert len(rank["norms"]) == 40
        assert max(rank["norms"]) <= 0.5 * (1 + 1e-3)
        assert max(rank["norms"]) > 0.4  # it did clip
        assert rank["lr"] == pytest.approx(1e-2 / 41)
        assert rank["dtypes"] == {torch.float32}
    norms = [rank["norms"][:5] for rank in habits[0]]
    assert norms[0] != norms[1], "the replicas see different data"


def test_validation_uses_the_outer_weights(habits: Any) -> None:
    """Validation after batches 10, 20, 30, 40 of each epoch; the sanity check comes first."""
    first, second = habits[0]
    assert len(first["validated_with"]) == 1 + 8
    for mine, theirs in zip(first["validated_with"], second["validated_with"], strict=True):
        assert torch.equal(mine, theirs)
    # batch 30 of the first epoch: step 15. Before it lies no landing of the head's fragment but
    # that of step 9 + 2
    fragment = next(i for i, names in enumerate(first["fragments"]) if "head.weight" in names)
    windows = first["outer"][29][fragment].unfold(0, 6, 1)
    assert (windows == first["validated_with"][3].flatten()).all(dim=1).any()
    assert not torch.equal(first["head"][29], first["validated_with"][3]), (
        "local weights differ from them"
    )


def test_step_metrics_are_local_and_epoch_metrics_are_means_over_ranks(habits: Any) -> None:
    for rank, outcome in enumerate(habits[0]):
        assert outcome["metrics"]["rank_mean_step"] == float(rank)
        assert outcome["metrics"]["rank_mean_epoch"] == 0.5


def test_communication_is_logged_through_the_trainers_loggers(habits: Any) -> None:
    ranks, folder = habits
    rows = (folder / "lightning_logs/version_0/metrics.csv").read_text().splitlines()
    header = rows[0].split(",")
    logged = [dict(zip(header, row.split(","), strict=True)) for row in rows[1:]]
    steps = [row for row in logged if row["comm/bytes_per_step"]]
    assert [int(row["step"]) for row in steps] == [4, 9, 14, 19, 24, 29, 34, 39]
    assert all(row["rank_mean_step"] for row in steps), "in the same row as the module's metrics"
    # means over a cycle of 6 steps: as foretold, once every fragment has left; the last exchange
    # and what was sent before the first step are no steps
    traffic, last = ranks[0]["traffic"], steps[-1]
    assert float(steps[0]["comm/bytes_per_step"]) == 0
    for row in steps[2:]:
        assert float(row["comm/bytes_per_step"]) == pytest.approx(traffic.bytes_per_step, rel=1e-6)
    compression = traffic.ddp_bytes_per_step / traffic.bytes_per_step
    assert float(last["comm/compression"]) == pytest.approx(compression, rel=1e-6)
    assert float(last["comm/exposed_ms"]) >= 0.0
    assert not any(name.startswith("outer/") and steps[0].get(name) for name in header)
    for p in range(len(ranks[0]["numel"])):
        assert -1.0 <= float(last[f"outer/cosine_{p}"]) <= 1.0
        assert float(last[f"outer/gradient_norm_{p}"]) > 0.0
        assert float(last[f"outer/lr_{p}"]) > 0.0
        assert float(last[f"outer/flight_ms_{p}"]) >= float(last[f"outer/waited_ms_{p}"]) >= 0.0
        assert float(last[f"outer/bytes_{p}"]) == -(-(72 + 2 * ranks[0]["numel"][p]) // 8) * 8


def look_early(rank: int, size: int, folder: Path) -> list[list[str]]:
    """Return what a fit says of outer weights that validations and checkpoints take."""
    texts = []
    for every in (3, 16):
        strategy = StreamingDiLoCoStrategy(
            sync_every=8, num_fragments=2, overlap_steps=3, evaluate="outer"
        )
        trainer = quiet_trainer(
            strategy=strategy,
            devices=size,
            max_steps=20,
            val_check_interval=every,
            enable_checkpointing=True,
            callbacks=[ModelCheckpoint(folder, every_n_train_steps=every, save_top_k=-1)],
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(Tiny(), loader(40), loader(8))
        said = [str(one.message) for one in caught]
        texts.append([text for text in said if " uses the outer weights" in text])
    return texts


def test_outer_weights_that_have_not_moved_yet_bring_one_warning(tmp_path: Path) -> None:
    """Fragment 1 lands for the first time after step 12 + 3; the sanity check says nothing."""
    ((early, late),) = run_ranks(look_early, 1, tmp_path, tmp_path)
    (text,) = early
    assert re.match(
        r"This (validation|checkpoint) uses the outer weights, but after 3 inner steps 2 of 2"
        r" fragments .* landed once after step 15\.",
        text,
    )
    assert late == []


class Normed(Tiny):
    """BatchNorm in a block, a frozen tensor, a tied weight, and parameters in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.tied = nn.Linear(6, 1, bias=False)
        self.tied.weight = self.head.weight
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.tied(self.norm(self.embed(x * self.frozen)))


def fit_normed(rank: int, size: int, folder: Path) -> Any:
    strategy = StreamingDiLoCoStrategy(
        sync_every=4, num_fragments=3, fragment_pattern="balanced", wire_dtype="int8"
    )
    trainer = quiet_trainer(strategy=strategy, devices=size, max_epochs=1, callbacks=[Recorder()])
    module = Normed()
    trainer.fit(module, loader(16 * 4 * size, 4), loader(8))
    trainer.save_checkpoint(folder / "after.ckpt")
    return {k: v.clone() for k, v in module.state_dict().items()}, strategy.fragments


def test_batchnorm_tied_and_frozen(tmp_path: Path) -> None:
    (first, fragments), (second, _) = run_ranks(fit_normed, 2, tmp_path, tmp_path)
    assert first["norm.running_mean"].abs().sum() > 0
    assert_same(second, first)
    names = [name for fragment in fragments for name in fragment]
    assert sorted(names) == sorted({n for n, p in Normed().named_parameters() if p.requires_grad})
    assert "frozen" not in names
    assert names.count("head.weight") == 1
    assert "tied.weight" not in names


def fit_bf16(rank: int, size: int) -> Any:
    strategy = StreamingDiLoCoStrategy(sync_every=4, wire_dtype="fp4")
    recorder = Recorder()
    trainer = quiet_trainer(
        strategy=strategy, devices=size, max_epochs=1, precision="bf16-true", callbacks=[recorder]
    )
    trainer.fit(Tiny(), loader(16 * 2 * size))
    return recorder.outer[-1], recorder.local[-1]


def test_the_default_wire_and_bf16_parameters(tmp_path: Path) -> None:
    (outer, local), (other_outer, other_local) = run_ranks(fit_bf16, 2, tmp_path)
    for mine, theirs in zip(outer, other_outer, strict=True):
        assert mine.dtype == torch.float32
        assert torch.equal(mine, theirs)
    assert {value.dtype for value in local.values()} == {torch.bfloat16}
    assert_same(other_local, local)
