"""A fit with `DistributedLionStrategy`: plain Lion, precision, clipping, buffers, checkpoints."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_commfree import DistributedLion, DistributedLionStrategy
from lightning_commfree.host import MixedPrecision, ModelCheckpoint, pl
from lightning_commfree.lion import buckets
from tests.fit.models import (
    Recorder,
    Tiny,
    assert_same,
    loader,
    quiet_trainer,
    rank_loader,
)
from tests.world import run_ranks

STEPS = 12
SIZE = 3


class Voter(Tiny):
    def configure_optimizers(self) -> Any:
        return DistributedLion(self.parameters(), lr=0.02, weight_decay=0.3)


CONSTANTS = torch.tensor([0.1, 0.7, torch.finfo(torch.float32).min, -torch.inf])


class Normed(Voter):
    """Has running statistics, which differ from rank to rank while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        # equal everywhere: a third of three times 0.1 is not 0.1, and a sum of the least overflows
        self.register_buffer("table", CONSTANTS.clone())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class Written(Voter):
    """Loads weights when optimizer and master copies are there, and lists a parameter by hand."""

    def configure_optimizers(self) -> Any:
        some = [p for name, p in self.named_parameters() if name != "head.weight"]
        return DistributedLion(some, lr=0.5, weight_decay=0.0)

    def on_fit_start(self) -> None:
        with torch.no_grad():
            self.embed.weight.fill_(100.0)
            self.head.weight.fill_(200.0)
        self.optimizers().param_groups[0]["params"].append(self.head.weight)


class Metrics(pl.Callback):
    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.rows.append(trainer.strategy.figures())


class OwnStatistics(pl.Callback):
    """Keeps the buffers after the latest step, before a validation averages them."""

    def __init__(self) -> None:
        self.buffers: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        self.buffers = {name: b.clone() for name, b in module.named_buffers()}


def fit(rank: int, size: int, module: Tiny | None = None, **kwargs: Any) -> dict[str, Any]:
    """`shard`: whose data of `SIZE` ranks this rank sees; its own if it is not given."""
    settings = kwargs.pop("settings", {})
    validation = kwargs.pop("validation", None)
    data = rank_loader(STEPS * 2 * SIZE, 2, kwargs.pop("shard", rank), SIZE)
    recorder, metrics = Recorder(), Metrics()
    strategy = DistributedLionStrategy(**settings)
    trainer = quiet_trainer(
        strategy=strategy,
        devices=size,
        max_steps=STEPS,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        **{**kwargs, "callbacks": [recorder, metrics, *kwargs.get("callbacks", [])]},
    )
    module = module or Voter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, data, validation)
    said = [str(w.message) for w in caught]
    return {
        "local": recorder.local,
        "rows": metrics.rows,
        "said": [text for text in said if "vote" in text.lower()],
        "buffers": {name: b.clone() for name, b in module.named_buffers()},
        "bytes": dict(strategy.ledger.bytes_by_tag),
        "momenta": [s["momentum"] for s in trainer.optimizers[0].state.values()],
    }


def many(rank: int, size: int) -> dict[str, Any]:
    outcomes = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "_MIN_NUMEL", 40)
        outcomes["same data"] = fit(rank, size, shard=0)
        outcomes["average, same data"] = fit(rank, size, shard=0, settings={"vote": "average"})
        outcomes["random ties, same data"] = fit(rank, size, shard=0, settings={"ties": "random"})
        outcomes["plain"] = fit(rank, size)
        outcomes["norm clipped"] = fit(rank, size, gradient_clip_val=0.1)
        outcomes["bf16-mixed"] = fit(rank, size, precision="bf16-mixed")
        outcomes["bf16-true"] = fit(rank, size, precision="bf16-true")
        outcomes["written"] = fit(rank, size, Written(), precision="bf16-true")
        own = OwnStatistics()
        outcomes["batch norm"] = fit(rank, size, Normed(), validation=loader(6), callbacks=[own])
        outcomes["batch norm"]["own"] = own.buffers
    return outcomes


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(many, SIZE, tmp_path_factory.mktemp("many"))


@pytest.fixture(scope="module")
def alone() -> list[dict[str, Tensor]]:
    """Plain Lion: the same optimizer in a plain Trainer, on rank 0's data."""
    recorder = Recorder()
    trainer = quiet_trainer(devices=1, max_steps=STEPS, callbacks=[recorder])
    trainer.fit(Voter(), rank_loader(STEPS * 2 * SIZE, 2, 0, SIZE))
    return recorder.local


def assert_equal_steps(got: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> None:
    assert len(got) == len(expected) == STEPS
    assert_same(got, expected)


@pytest.mark.parametrize("vote", ["same data", "average, same data", "random ties, same data"])
def test_equal_data_on_all_ranks_is_plain_lion(
    ranks: list[Any], alone: list[dict[str, Tensor]], vote: str
) -> None:
    for outcomes in ranks:
        assert_equal_steps(outcomes[vote]["local"], alone)


@pytest.mark.parametrize("case", ["plain", "norm clipped", "bf16-mixed", "bf16-true", "batch norm"])
def test_all_ranks_hold_the_same_parameters(ranks: list[Any], case: str) -> None:
    for outcomes in ranks[1:]:
        assert_equal_steps(outcomes[case]["local"], ranks[0][case]["local"])
    momenta = [outcomes[case]["momenta"] for outcomes in ranks]
    assert not all(map(torch.equal, momenta[0], momenta[1])), "momenta are private"


def test_clipping_is_local_and_a_warning_says_so(ranks: list[Any]) -> None:
    for rank, outcomes in enumerate(ranks):
        clipped, plain = outcomes["norm clipped"], outcomes["plain"]
        difference = clipped["local"][-1]["head.weight"] - plain["local"][-1]["head.weight"]
        assert difference.abs().max() > 0.02, "clipping weighs gradient against momentum"
        if rank == 0:
            assert not plain["said"]
            assert any("clips each worker's gradient by its own norm" in t for t in clipped["said"])
            assert any("`gradient_clip_val` is set" in t for t in clipped["said"])


class Compiled(Voter):
    """Most parameters are in `net`, compiled as a whole or layer by layer."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 1))
        for part in [self.net] if whole else self.net:
            part.compile(backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def compiled(rank: int, size: int) -> list[list[str]]:
    return [fit(rank, size, Compiled(whole))["said"] for whole in (False, True)]


def test_a_model_compiled_as_a_whole_is_told_to_compile_its_blocks(tmp_path: Path) -> None:
    torch.compile(nn.Linear(1, 1))  # imports for seconds: here, and not in the fork
    ((by_block, whole),) = run_ranks(compiled, 1, tmp_path)
    assert by_block == []
    assert len(whole) == 1
    assert "because `net` is compiled as a whole" in whole[0]


def test_weights_written_at_the_start_are_trained(ranks: list[Any]) -> None:
    """Weights under a master copy, and a parameter put into a group: a step of 0.5 moves all."""
    for outcomes in ranks:
        first = outcomes["written"]["local"][0]
        assert (first["embed.weight"].float() - 100).abs().max() <= 1  # bf16 has steps of 0.5 here
        assert (first["head.weight"].float() - 200).abs().max() <= 1
        last = outcomes["written"]["local"][-1]
        assert not torch.equal(last["head.weight"], first["head.weight"])


def test_running_statistics_are_averaged_when_they_are_used(ranks: list[Any]) -> None:
    first = ranks[0]["batch norm"]["buffers"]
    for name in ("norm.running_mean", "norm.running_var"):
        own = torch.stack([outcomes["batch norm"]["own"][name] for outcomes in ranks])
        assert own.std(dim=0).min() > 1e-4, "the ranks saw different data"
        torch.testing.assert_close(first[name], own.mean(dim=0))
    for outcomes in ranks[1:]:
        assert_same(outcomes["batch norm"]["buffers"], first)
    assert torch.equal(first["table"], CONSTANTS)
    assert ranks[0]["batch norm"]["bytes"]["buffers"] > 0


def test_figures_are_logged(ranks: list[Any]) -> None:
    row = ranks[0]["plain"]["rows"][-1]
    numel = sum(p.numel() for p in Voter().parameters())
    sent = {tag: ranks[0]["plain"]["bytes"].get(tag, 0) for tag in ("vote_up", "vote_down")}
    assert row["lion/bits_up"] == pytest.approx(8 * sent["vote_up"] / numel / STEPS)
    assert row["lion/bits_down"] == pytest.approx(8 * sent["vote_down"] / numel / STEPS)
    assert 0.5 < row["lion/agreement"] < 1
    assert row["lion/ties"] == row["lion/zeros"] == 0  # three workers and no zero gradient
    assert row["lion/abstentions"] == 0
    assert row["comm/bytes_per_step"] > 0
    assert row["comm/compression"] > 0
    same = ranks[0]["same data"]["rows"][-1]
    assert same["lion/agreement"] == 1


def overflowing(rank: int, size: int) -> Any:
    """fp16 scaling on a CPU; rank 1 overflows in step 3."""

    class Overflowing(Voter):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.seen = [float(self.trainer.precision_plugin.scaler.get_scale())]

        def training_step(self, batch: Any, i: int) -> Tensor:
            loss = super().training_step(batch, i)
            return loss * (1e38 if i == 2 and self.global_rank == 1 else 1.0)

    module = Overflowing()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    outcome = fit(rank, size, module, plugins=[plugin])
    return outcome["local"], outcome["said"], module.seen


def test_all_ranks_skip_the_step_that_overflows_on_one(tmp_path: Path) -> None:
    ranks = run_ranks(overflowing, 2, tmp_path)
    for local, _, scales in ranks:
        assert_equal_steps(local, ranks[0][0])
        assert scales == [512.0]
        assert_same(local[2], local[1])  # the step is skipped
        assert not torch.equal(local[3]["head.weight"], local[2]["head.weight"])
    assert any("fp16 scaling is undone after backward" in text for text in ranks[0][1])


class Rising(Voter):
    """Gets a third parameter group in the middle of the fit, as fine-tuning callbacks do."""

    def __init__(self) -> None:
        super().__init__()
        self.head.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return DistributedLion(trained, lr=0.02)

    def on_train_batch_start(self, batch: Any, i: int) -> None:
        if i == 5:
            self.head.requires_grad_(True)
            self.optimizers().optimizer.add_param_group({"params": list(self.head.parameters())})


def others(rank: int, size: int, folder: Path) -> Any:
    outcomes: dict[str, Any] = {"rising": fit(rank, size, Rising())["local"]}
    save = ModelCheckpoint(folder, save_last=True)
    trained = Normed()
    fit(rank, size, trained, validation=loader(6), callbacks=[save], enable_checkpointing=True)
    outcomes["trained"] = {name: t.clone() for name, t in trained.state_dict().items()}
    return outcomes


def test_groups_that_come_later_vote_too_and_checkpoints_hold_the_buffers(tmp_path: Path) -> None:
    ranks = run_ranks(others, 2, tmp_path, tmp_path)
    for outcomes in ranks:
        local = outcomes["rising"]
        assert_equal_steps(local, ranks[0]["rising"])
        assert torch.equal(local[4]["head.weight"], local[0]["head.weight"])
        assert not torch.equal(local[5]["head.weight"], local[4]["head.weight"])
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert_same(checkpoint["state_dict"], ranks[0]["trained"])
    Normed.load_from_checkpoint(tmp_path / "last.ckpt")
