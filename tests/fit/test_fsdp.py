"""Ranks of a replica that hold parts of the model: FSDP2 inside, DiLoCo or votes between."""

from __future__ import annotations

import os
import re
import signal
import time
import warnings
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_commfree import DistributedLion, DistributedLionStrategy, StreamingDiLoCoStrategy
from lightning_commfree.layouts import fsdp
from lightning_commfree.layouts.fsdp import why_unavailable
from lightning_commfree.model.shards import full_tensor, local_tensor
from tests.fit.models import (
    SavesAfterBatches,
    Tiny,
    assert_same,
    loader,
    quiet_trainer,
    rank_loader,
)
from tests.mortal import run_mortals
from tests.world import run_ranks

WHY_NOT = why_unavailable()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

STEPS = 9
BATCH = 2
SETTINGS: dict[str, Any] = {
    "sync_every": 4,
    "num_fragments": 2,
    "overlap_steps": 1,
    "replica_size": 2,
    "outer_optimizer": partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True),
}


class Uneven(Tiny):
    """Parameters of 7 and 1 rows, a tied weight, and a frozen one."""

    def __init__(self) -> None:
        super().__init__(width=7)
        self.tied = nn.Linear(7, 7, bias=False)
        self.again = nn.Linear(7, 7, bias=False)
        self.again.weight = self.tied.weight
        self.frozen = nn.Linear(7, 7)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(self.frozen(self.again(self.tied(x))) + x)


class Watch(pl.Callback):
    """Keeps the shards that a rank has after every step; gathers would cost as much as training."""

    def __init__(self) -> None:
        self.local: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        self.local.append({n: local_tensor(p).clone() for n, p in module.named_parameters()})


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: full_tensor(p).clone() for name, p in module.named_parameters()}


class Voter(Uneven):
    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return DistributedLion(trained, lr=0.01, weight_decay=0.3)


class BadBatch(Voter):
    """The third batch of rank 3 is NaN, which FSDP averages into both shards of its replica."""

    def training_step(self, batch: Any, i: int) -> Tensor:
        bad = self.global_step == 2 and self.global_rank == 3
        return super().training_step(batch, i) * (torch.nan if bad else 1.0)


class Faulty(Voter):
    """In step 3 one rank's part of a gradient holds NaN."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_step == 2 and self.global_rank == 3:
            local_tensor(self.blocks[1].weight.grad)[0, 0] = torch.nan


def fit(
    rank: int, size: int, folder: Path | None = None, kind: type[Uneven] = Uneven, **changes: Any
) -> Any:
    """Train; changes are the strategy's, the Trainer's (`trainer`) or of `fit` (`ckpt_path`)."""
    lion = issubclass(kind, Voter)
    settings = {**({} if lion else SETTINGS), **changes}
    options, resumed = settings.pop("trainer", {}), settings.pop("ckpt_path", None)
    strategy: Any = (
        DistributedLionStrategy(node_size=2, **settings)
        if lion
        else StreamingDiLoCoStrategy(**settings)
    )
    watch = Watch()
    callbacks: list[pl.Callback] = [watch]
    if folder is not None:
        callbacks.append(ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=3))
    trainer = quiet_trainer(
        strategy=strategy,
        devices=size,
        max_epochs=1,
        enable_checkpointing=folder is not None,
        callbacks=callbacks,
        num_sanity_val_steps=0,
        val_check_interval=6,
        **options,
    )
    module, data = kind(), rank_loader(STEPS * BATCH * size, BATCH, rank, size)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.fit(module, data, loader(4 * size), ckpt_path=resumed)
    state = trainer.optimizers[0].state.values()
    return {
        "local": watch.local,
        "final": weights(module),
        "val_loss": float(trainer.callback_metrics["val_loss"]),
        "test_loss": trainer.validate(module, loader(4 * size), verbose=False),
        "bytes": strategy.ledger.bytes_by_tag["outer_gradient"],
        "held": sum(local_tensor(p).numel() for p in module.parameters()),
        "momenta": sum(each["momentum"].numel() for each in state) if lion else 0,
        "said": " ".join(str(one.message) for one in said),
    }


CLIPPED = {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}
VARIANTS: dict[str, dict[str, Any]] = {
    "fp32": {"wire_dtype": "fp32"},
    "fp4": {"wire_dtype": "fp4"},
    "mixed": {"trainer": {"precision": "bf16-mixed"}},
    "int2": {"wire_dtype": "int2"},
    "clipped": {
        "wire_dtype": "fp32",
        "evaluate": "mean",
        "outer_device": "cpu",
        "trainer": CLIPPED,
    },
    "majority": {"kind": Voter},
    "average, bf16": {
        "kind": Voter,
        "vote": "average",
        "trainer": {"precision": "bf16-true"},
    },
}
SAVED = ("fp32", "fp4", "mixed", "int2", "majority")
MIDDLE = 6  # a fragment has just left


def compare(rank: int, size: int, folder: Path) -> Any:
    played: dict[Any, Any] = {}
    for name, changes in VARIANTS.items():
        for inside in ("fsdp",) if name in ("mixed", "int2") else ("ddp", "fsdp"):
            place = folder / inside / name if name in SAVED else None
            played[inside, name] = fit(rank, size, place, inside=inside, **changes)
    for name, saved_by, inside in (
        ("fp4", "fsdp", "fsdp"),
        ("mixed", "fsdp", "fsdp"),
        ("int2", "fsdp", "fsdp"),
        ("majority", "fsdp", "fsdp"),
        ("majority", "ddp", "fsdp"),
        ("majority", "fsdp", "ddp"),
    ):
        path = folder / saved_by / name / f"step={MIDDLE}.ckpt"
        again = fit(rank, size, inside=inside, ckpt_path=path, **VARIANTS[name])
        played["resumed", name, saved_by, inside] = again
    for kind in (Faulty, BadBatch):
        try:
            fit(rank, size, kind=kind, inside="fsdp")
        except RuntimeError as error:
            played[kind.__name__] = str(error)
    return played


def join_rows(first: Any, second: Any) -> None:
    """Replace the shards of two ranks, of every step, by the rows of both."""
    for one, other in zip(first["local"], second["local"], strict=True):
        for name in one:
            one[name] = other[name] = torch.cat([one[name], other[name]])


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The fits of each rank, with the full tensors of every step; and the folder of the files."""
    folder = tmp_path_factory.mktemp("saved")
    ranks = run_ranks(compare, 4, tmp_path_factory.mktemp("four"), folder)
    for key in ranks[0]:
        if "fsdp" in (key[0], key[-1]):
            join_rows(ranks[0][key], ranks[1][key])
            join_rows(ranks[2][key], ranks[3][key])
    return ranks, folder


@pytest.mark.parametrize("name", ["fp32", "majority", "average, bf16"])
def test_parts_train_as_whole_copies_do(played: Any, name: str) -> None:
    """To the bit: gradients are halved and added in the same order, and fp32 rounds nothing; a vote
    is on single elements."""
    for rank in played[0]:
        ours, ddp = rank["fsdp", name], rank["ddp", name]
        assert len(ours["local"]) == STEPS
        for key in ("local", "final", "val_loss", "test_loss"):
            assert_same(ours[key], ddp[key], key)


@pytest.mark.parametrize(("name", "tolerance"), [("fp4", 8e-3), ("clipped", 1e-5)])
def test_lossy_wires_and_clipping_stay_close_to_ddp(
    played: Any, name: str, tolerance: float
) -> None:
    """fp4: blocks of 256 values begin at other ones, and each has a scale of its own. Clipped: the
    norm adds squares in another order. Without the other replica the weights would be far off."""
    for rank in played[0]:
        ours, ddp = rank["fsdp", name]["final"], rank["ddp", name]["final"]
        torch.testing.assert_close(ours, ddp, rtol=0, atol=tolerance)
    one, other = (played[0][r]["fsdp", name]["local"][-2] for r in (0, 2))
    assert max((one[p] - other[p]).abs().max() for p in one) > 2 * tolerance


def test_all_ranks_end_with_the_same_weights(played: Any) -> None:
    first = played[0][0]
    for rank in played[0]:
        for name in ("fp4", "int2", "clipped", "majority"):
            assert_same(rank["fsdp", name]["final"], first["fsdp", name]["final"], name)
        assert_same(rank["fsdp", "majority"]["local"], first["fsdp", "majority"]["local"])


def test_a_rank_holds_its_part(played: Any) -> None:
    numel = {p: p.numel() for p in Uneven().parameters()}
    trained = sum(n for p, n in numel.items() if p.requires_grad)
    for name, key, total in (
        ("fp32", "held", sum(numel.values())),
        ("majority", "momenta", trained),
    ):
        held = [rank["fsdp", name][key] for rank in played[0]]
        assert held[0] + held[1] == held[2] + held[3] == total
        assert all(rank["ddp", name][key] == total for rank in played[0])


def test_replicas_send_as_much_as_with_ddp_inside(played: Any) -> None:
    """In fp32, whose messages are as long as their values; a replica's ranks together."""
    per_rank = [(r["fsdp", "fp32"]["bytes"], r["ddp", "fp32"]["bytes"]) for r in played[0]]
    ours, ddp = (sum(one) for one in zip(*per_rank, strict=True))
    assert abs(ours - ddp) <= 8 * len(played[0]) * 2 * (STEPS // 4 + 1), "padding to 8 bytes"


@pytest.mark.parametrize("name", ["fp32", "majority"])
def test_checkpoints_are_those_of_ddp(played: Any, name: str) -> None:
    for step in (3, MIDDLE, STEPS):
        ours, ddp = (
            torch.load(played[1] / inside / name / f"step={step}.ckpt", weights_only=True)
            for inside in ("fsdp", "ddp")
        )
        assert_same(ours["state_dict"], ddp["state_dict"])
        assert_same(ours["optimizer_states"], ddp["optimizer_states"])


@pytest.mark.parametrize("name", ["fp4", "mixed", "int2", "majority"])
def test_a_resume_is_exact(played: Any, name: str) -> None:
    for rank in played[0]:
        straight, resumed = rank["fsdp", name], rank["resumed", name, "fsdp", "fsdp"]
        assert len(resumed["local"]) == STEPS - MIDDLE
        assert_same(resumed["local"], straight["local"][MIDDLE:])


def test_another_layout_resumes_from_the_weights_and_says_so(played: Any) -> None:
    """Parts take up the momentum that the worker had as a whole one; not the other way round."""
    parts_of_whole = played[0][0]["resumed", "majority", "ddp", "fsdp"]
    assert "inside was 'ddp' and is 'fsdp'" in parts_of_whole["said"]
    assert "every worker continues with its own momentum" in parts_of_whole["said"]
    whole_of_parts = played[0][0]["resumed", "majority", "fsdp", "ddp"]
    assert "inside was 'fsdp' and is 'ddp'" in whole_of_parts["said"]
    assert len(whole_of_parts["local"]) == STEPS - MIDDLE


def test_nan_in_one_part_stops_all_ranks(played: Any) -> None:
    faults = [rank["Faulty"] for rank in played[0]]
    assert all("'blocks.1.weight'" in faults[i] for i in (1, 3))
    assert all("rejected step 3" in faults[i] for i in (0, 2))


def test_nan_in_a_batch_names_all_ranks_that_it_may_come_from(played: Any) -> None:
    """Not the rank that holds the shard: it may have had a good batch."""
    for rank in played[0]:
        assert "on ranks 2 to 3 contains NaN or Inf" in rank["BadBatch"]


class Early(Uneven):
    """Makes its optimizer before the fit."""

    def __init__(self) -> None:
        super().__init__()
        self.made = torch.optim.AdamW(self.parameters())

    def configure_optimizers(self) -> Any:
        return self.made


class Wrapped(Uneven):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.DataParallel(self.head)
        self.head.compile()


class Empty(Uneven):
    def __init__(self) -> None:
        super().__init__()
        self.embed.none = nn.Parameter(torch.zeros(4, 0))


class Sparse(Uneven):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 6, sparse=True)


class SparseCall(Uneven):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 1)

    def forward(self, x: Tensor) -> Tensor:
        words = torch.arange(len(x))
        return super().forward(x) + nn.functional.embedding(words, self.words.weight, sparse=True)


class Mixed(Uneven):
    """Frozen parameters and other units may have other dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen.bfloat16()
        self.blocks.double()
        self.embed.double()


def refused(rank: int, size: int) -> list[str]:
    texts = []
    for module, precision in (
        (Early(), "32-true"),
        (Wrapped(), "32-true"),
        (Uneven(), "16-true"),
        (Empty(), "32-true"),
        (Sparse(), "32-true"),
        (Mixed(), "32-true"),
    ):
        strategy = StreamingDiLoCoStrategy(**{**SETTINGS, "inside": "fsdp"})
        trainer = quiet_trainer(strategy=strategy, devices=size, max_steps=1, precision=precision)
        try:
            trainer.fit(module, loader(8))
        except (ValueError, TypeError) as error:
            texts.append(str(error))
    return texts


def train_sparsely(rank: int, size: int) -> str:
    strategy = StreamingDiLoCoStrategy(**{**SETTINGS, "inside": "fsdp"})
    trainer = quiet_trainer(strategy=strategy, devices=size, max_steps=1)
    with warnings.catch_warnings(record=True) as said, suppress(RuntimeError):
        warnings.simplefilter("always")
        trainer.fit(SparseCall(), loader(8))
    return " ".join(str(one.message) for one in said)


def test_sparse_gradients_that_torch_cannot_scatter_are_explained(tmp_path: Path) -> None:
    said, _ = run_ranks(train_sparsely, 2, tmp_path)
    assert "cannot train a parameter with sparse gradients. Use `sparse=False` where" in said


def test_unsupported_modules_are_refused(tmp_path: Path) -> None:
    for early, wrapped, fp16, empty, sparse, mixed in run_ranks(refused, 2, tmp_path):
        assert "was probably created before `fit`" in early
        assert "'head' is already compiled" in wrapped
        assert "does not support precision='16-true'" in fp16
        assert "cannot train 'embed.none', which is empty" in empty
        assert "cannot train 'words.weight', which has sparse gradients" in sparse
        assert "'embed.weight' (torch.float64) and 'head.weight' (torch.float32)" in mixed


class Stop(pl.Callback):
    """Rank 1 hangs in the middle of a validation."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_validation_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 2:
            (self.folder / "died").write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGSTOP)


def hang(rank: int, size: int, folder: Path) -> None:
    strategy = StreamingDiLoCoStrategy(
        **{**SETTINGS, "inside": "fsdp"}, timeout=timedelta(seconds=HANG_S)
    )
    trainer = quiet_trainer(
        strategy=strategy,
        devices=size,
        max_steps=STEPS,
        val_check_interval=2,
        callbacks=[Stop(folder)],
    )
    trainer.fit(Uneven(), loader(100), loader(16))


HANG_S = 8.0  # longer than the silence after which a hung rank is found


def test_a_rank_that_hangs_is_named_at_the_timeout(tmp_path: Path) -> None:
    neighbor, stopped = run_mortals(hang, 2, tmp_path, tmp_path, limit_s=4 * HANG_S)
    assert stopped.exit_code == -signal.SIGKILL, "by the test, in the end"
    assert "rank 1 is gone (no heartbeat" in neighbor.error
    died_s = float((tmp_path / "died").read_text())
    assert neighbor.failed_s - died_s < 2 * HANG_S


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"inside": "fsdp"}, "with `replica_size=1` a replica has only one"),
        ({"inside": "zero", "replica_size": 2}, "`inside='zero'` is not valid"),
    ],
)
def test_wrong_values_of_inside_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        StreamingDiLoCoStrategy(**settings)


def test_a_forked_fit_hands_whole_weights_back(tmp_path: Path) -> None:
    settings = {**SETTINGS, "inside": "fsdp", "start_method": "fork"}
    save = ModelCheckpoint(tmp_path, "last")
    trainer = quiet_trainer(
        strategy=StreamingDiLoCoStrategy(**settings),
        devices=4,
        max_steps=6,
        enable_checkpointing=True,
        callbacks=[save],
    )
    module = Uneven()
    trainer.fit(module, loader(64))
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    begun = Uneven()
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, saved[name]), name
        assert parameter.requires_grad != torch.equal(parameter, begun.get_parameter(name)), name


class Drifting(Uneven):
    """One value of the outer weights that rank 3 holds changes."""

    def on_train_batch_start(self, batch: Any, i: int) -> None:
        if i == 4 and self.global_rank == 3:
            with torch.no_grad():
                self.trainer.strategy.algorithm.fragments[1].global_copy[0] += 1e-3


class Broken(Uneven):
    """One rank's part of its replica's weights holds NaN after the second step."""

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step == 2 and self.global_rank == 1:
            local_tensor(self.blocks[2].weight)[-1, 0] = torch.nan


def faults(rank: int, size: int, folder: Path) -> dict[str, str]:
    data, texts = rank_loader(STEPS * BATCH * size, BATCH, rank, size), {}
    for kind in (Drifting, Broken):
        strategy = StreamingDiLoCoStrategy(**SETTINGS, inside="fsdp")
        trainer = quiet_trainer(strategy=strategy, devices=size, max_epochs=1)
        try:
            trainer.fit(kind(), data)
        except RuntimeError as error:
            texts[kind.__name__] = str(error)

    save = ModelCheckpoint(folder, "{epoch}-{batch}", save_top_k=-1)
    options: dict[str, Any] = {"enable_checkpointing": True, "accumulate_grad_batches": 2}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for path in (None, folder / "5.ckpt"):
            strategy = StreamingDiLoCoStrategy(**SETTINGS, inside="fsdp")
            trainer = quiet_trainer(
                strategy=strategy,
                devices=size,
                max_steps=4,
                callbacks=[save, SavesAfterBatches(folder, 5)],
                **options,
            )
            trainer.fit(Uneven(), data, ckpt_path=path)
    texts["half"] = " ".join(str(one.message) for one in said)
    return texts


def test_faults_are_named_on_all_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    ranks = run_ranks(faults, 4, tmp_path, folder)
    for found in ranks:
        assert "global copies of fragment 1 differ" in found["Drifting"]
        assert "fragment 0 from replica 0 (ranks 0 to 1) is not finite" in found["Broken"]
    assert "partially accumulated optimizer step are lost" in ranks[0]["half"]


def test_a_torch_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def older(module: nn.Module, *, reshard_after_forward: bool = True) -> None:
        """Cannot be told that the outermost unit shall be divided again."""

    monkeypatch.setattr(fsdp, "fully_shard", older)
    with pytest.raises(ValueError, match=f"torch {re.escape(torch.__version__)} is too old"):
        StreamingDiLoCoStrategy(replica_size=2, inside="fsdp")
