"""Fits in which something joins: a frozen teacher that moves, a backbone that thaws."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, ModelCheckpoint
from torch import Tensor, nn

from lightning_commfree import StreamingDiLoCoStrategy
from tests.diloco.serial import SerialDiLoCo
from tests.fit.models import Recorder, Tiny, assert_same, dataset, quiet_trainer, rank_loader
from tests.world import run_ranks

EPOCHS, EPOCH_STEPS = 3, 5
OUTER = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
SIZE = 2
RESUMED = 4  # steps, with a fragment in flight


def fit(
    module: Tiny,
    rank: int,
    folder: Path,
    callbacks: Any = (),
    resume: str | None = None,
    size: int = SIZE,
    every: int = 1,
    **changes: Any,
) -> Any:
    settings: dict[str, Any] = {"sync_every": 4, "num_fragments": 1, "wire_dtype": "fp32"}
    strategy = StreamingDiLoCoStrategy(outer_optimizer=OUTER, **{**settings, **changes})
    keep = ModelCheckpoint(
        folder, "{step}", save_top_k=-1, save_last=True, every_n_train_steps=every
    )
    recorder = Recorder()
    trainer = quiet_trainer(
        strategy=strategy,
        devices=size,
        max_epochs=EPOCHS,
        callbacks=[*callbacks, recorder, *([keep] if resume is None else [])],
        enable_checkpointing=resume is None,
    )
    data = rank_loader(EPOCH_STEPS * 2 * size, 2, rank, size)
    trainer.fit(module, data, ckpt_path=None if resume is None else folder / resume)
    last = torch.load(folder / "last.ckpt", weights_only=False)["state_dict"]
    final = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    return {
        "local": recorder.local,
        "outer": recorder.outer,
        "final": final,
        "last": last,
        "fragments": strategy.fragments,
        "bytes": dict(strategy.ledger.bytes_by_tag),
    }


# A teacher


class Byol(Tiny):
    """A frozen teacher follows the blocks, and they learn from it."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.blocks).requires_grad_(False)

    def training_step(self, batch: Any, i: int) -> Tensor:
        x = self.embed(batch[0])
        taught = nn.functional.mse_loss(self.blocks[0](x), self.teacher[0](x))
        return super().training_step(batch, i) + taught

    def configure_optimizers(self) -> Any:
        trained = (parameter for parameter in self.parameters() if parameter.requires_grad)
        return torch.optim.AdamW(trained, lr=self.lr)


class Following(pl.Callback):
    """Comes before the checkpoints of a step, which a hook of the module would not."""

    @torch.no_grad()
    def on_train_batch_end(self, _: pl.Trainer, pl_module: Any, *__: Any) -> None:
        students = pl_module.blocks.parameters()
        for mine, theirs in zip(pl_module.teacher.parameters(), students, strict=True):
            mine.mul_(0.8).add_(theirs, alpha=0.2)


class Adapted(Tiny):
    """Most of it is frozen, as under adapters, or it is not there at all."""

    def __init__(self, with_base: bool) -> None:
        super().__init__()
        if with_base:
            self.base = nn.Linear(100, 100).requires_grad_(False)


def on_four_ranks(rank: int, size: int, folder: Path) -> Any:
    every = EPOCHS * EPOCH_STEPS  # the end alone
    return fit(Byol(), rank, folder, [Following()], size=size, every=every, replica_size=2)


def test_a_teacher_in_replicas_of_two_ranks(tmp_path: Path) -> None:
    """Each rank averages the teacher that it holds with its peers in the other replicas."""
    ranks = run_ranks(on_four_ranks, 4, tmp_path, tmp_path)
    teacher = "teacher.0.weight"
    assert torch.equal(ranks[0]["local"][3][teacher], ranks[1]["local"][3][teacher])
    assert not torch.equal(ranks[0]["local"][3][teacher], ranks[2]["local"][3][teacher])
    for got in ranks:
        assert torch.equal(got["final"][teacher], ranks[0]["final"][teacher])
        assert torch.equal(got["last"][teacher], ranks[0]["final"][teacher])


# A backbone


class Tuned(Tiny):
    """A backbone, which is frozen in the first epoch, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.ModuleList([self.embed, self.blocks])
        del self.embed, self.blocks

    def forward(self, x: Tensor) -> Tensor:
        x = self.backbone[0](x)
        for block in self.backbone[1]:
            x = x + torch.tanh(block(x))
        return self.head(x)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.head.parameters(), lr=0.02)


def tuning() -> BackboneFinetuning:
    return BackboneFinetuning(1, lambda _: 1.0, backbone_initial_lr=0.01, should_align=False)


def play() -> tuple[list[list[dict[str, Tensor]]], list[str]]:
    """Return what each replica holds after every step, by the serial twin, and the names."""
    modules = [Tuned() for _ in range(SIZE)]
    thawed = [name for name, _ in modules[0].named_parameters() if name.startswith("backbone")]
    optimizers = [module.configure_optimizers() for module in modules]
    x, y = dataset(EPOCH_STEPS * 2 * SIZE).tensors
    for module in modules:
        module.backbone.requires_grad_(False)

    def inner_step(m: int, step: int) -> None:
        first = (step - 1) % EPOCH_STEPS * 2 * SIZE
        rows = slice(first + m, first + 2 * SIZE, SIZE)
        optimizers[m].zero_grad()
        modules[m].loss((x[rows], y[rows])).backward()
        optimizers[m].step()

    twin = SerialDiLoCo(modules, inner_step, [["head.weight"]], 4, 1, 0.5, OUTER)
    local: list[list[dict[str, Tensor]]] = [[] for _ in modules]
    for step in range(1, EPOCHS * EPOCH_STEPS + 1):
        if step == EPOCH_STEPS + 1:
            for module, optimizer in zip(modules, optimizers, strict=True):
                module.backbone.requires_grad_(True)
                optimizer.add_param_group({"params": module.backbone.parameters(), "lr": 0.01})
            twin.thaw(thawed)
        twin.run_step()
        if step == EPOCHS * EPOCH_STEPS:
            twin.finish()
        for states, module in zip(local, modules, strict=True):
            states.append({name: p.detach().clone() for name, p in module.named_parameters()})
    return local, thawed


class Whole(Tuned):
    """DDP is told in the beginning what it averages in a replica."""

    def on_train_epoch_start(self) -> None:
        self.backbone.requires_grad_(self.current_epoch > 0)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def on_two_ranks(rank: int, size: int, folder: Path) -> dict[str, Any]:
    assert size == SIZE
    outcomes = {
        "taught": fit(Byol(), rank, folder / "taught", [Following()]),
        "tuned": fit(Tuned(), rank, folder / "tuned", [tuning()]),
        "adapted": fit(Adapted(True), rank, folder / "a"),
        "without base": fit(Adapted(False), rank, folder / "b"),
    }
    resumed = fit(Byol(), rank, folder / "taught", [Following()], f"step={RESUMED}.ckpt")
    outcomes["taught again"] = resumed
    for step in (5, 9, 12):  # before the thaw, before it first leaves, and in its flight
        resumed = fit(Tuned(), rank, folder / "tuned", [tuning()], f"step={step}.ckpt")
        outcomes[f"tuned from {step}"] = resumed
    module = Whole()
    module.backbone.requires_grad_(False)
    try:
        fit(module, rank, folder / "c", replica_size=2)
    except RuntimeError as error:
        outcomes["replica of two"] = str(error)
    return outcomes


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("joining")
    return run_ranks(on_two_ranks, SIZE, folder, folder)


def test_a_teacher_ends_equal_on_all_ranks(two_ranks: list[dict[str, Any]]) -> None:
    first, second = (outcomes["taught"] for outcomes in two_ranks)
    teacher = "teacher.0.weight"
    assert not torch.equal(first["local"][2][teacher], second["local"][2][teacher])
    assert_same(second["final"], first["final"])
    assert_same(first["last"], first["final"])
    assert len(first["fragments"]) == 1, "nothing of it is trained"


def test_a_teacher_is_resumed_exactly(two_ranks: list[dict[str, Any]]) -> None:
    for outcomes in two_ranks:
        straight, resumed = outcomes["taught"], outcomes["taught again"]
        assert_same(resumed["local"], straight["local"][RESUMED:])


def test_frozen_weights_that_do_not_change_cost_a_hash(
    two_ranks: list[dict[str, Any]],
) -> None:
    for outcomes in two_ranks:
        sent, without = outcomes["adapted"]["bytes"], outcomes["without base"]["bytes"]
        assert sent["outer_gradient"] == without["outer_gradient"] > 0
        assert sent.keys() - without.keys() == {"moved", "save"}
        assert sent["moved"] == 2 * 8, "of two tensors"
        saves = 2 * EPOCHS * EPOCH_STEPS  # the last one beside that of each step
        assert sent["save"] == saves * 2 * 8


def test_a_thawed_backbone_equals_the_twin(two_ranks: list[dict[str, Any]]) -> None:
    expected, thawed = play()
    for rank, outcomes in enumerate(two_ranks):
        got = outcomes["tuned"]
        assert got["fragments"] == [["head.weight"], thawed]
        assert_same(got["local"], expected[rank])
        moved = [int(len(copies)) for copies in got["outer"]]
        assert moved == [1] * EPOCH_STEPS + [2] * 2 * EPOCH_STEPS
    assert_same(two_ranks[1]["tuned"]["final"], two_ranks[0]["tuned"]["final"])
    left = expected[0][EPOCH_STEPS - 1]["backbone.0.weight"]
    assert not torch.equal(expected[0][EPOCH_STEPS]["backbone.0.weight"], left), "it is trained"


@pytest.mark.parametrize("step", [5, 9, 12])
def test_after_the_thaw_a_checkpoint_resumes_exactly(
    two_ranks: list[dict[str, Any]], step: int
) -> None:
    for outcomes in two_ranks:
        straight, resumed = outcomes["tuned"], outcomes[f"tuned from {step}"]
        assert_same(resumed["local"], straight["local"][step:])


def test_thawing_within_a_replica_of_several_ranks_is_refused(
    two_ranks: list[dict[str, Any]],
) -> None:
    for outcomes in two_ranks:
        assert (
            "became trainable during the fit, and with `replica_size=2` their"
            in (outcomes["replica of two"])
        )
