"""Hooks that replace optimizers or schedulers during a fit, and weights that drift apart."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader

from lightning_commfree import (
    DistributedLion,
    DistributedLionStrategy,
    DominoTPStrategy,
    StreamingDiLoCoStrategy,
)
from lightning_commfree.model.shards import local_tensor
from tests.fit import causal_lm
from tests.fit.models import Tiny, Voter, assert_same, dataset, quiet_trainer
from tests.fit.saved import resume_warnings
from tests.world import run_ranks

SIZE, STEPS, AT = 2, 8, 3
REPLICAS, LOCKSTEP = ("diloco", "diloco fsdp"), ("lion", "lion fsdp", "domino")
NAMES = (*REPLICAS, *LOCKSTEP)


def strategy(name: str) -> Any:
    kind, _, inside = name.partition(" ")
    if kind == "domino":
        return DominoTPStrategy(2, "batch", check_drift_every=2)
    layout = {"inside": inside} if inside else {}
    if kind == "lion":
        return DistributedLionStrategy(
            node_size=2 if inside else 1, check_drift_every=2, overlap=not inside, **layout
        )
    return StreamingDiLoCoStrategy(2, 2, replica_size=2 if inside else 1, **layout)


def another(name: str, module: pl.LightningModule) -> Optimizer:
    if name.startswith("lion"):
        return DistributedLion(module.parameters(), lr=0.01)
    return SGD(module.parameters(), lr=0.05, momentum=0.9)


class Trace(pl.Callback):
    """Keeps this rank's parameters, or shards of them, after every step, in one tensor."""

    def __init__(self) -> None:
        self.after: list[Tensor] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        self.after.append(torch.cat([local_tensor(p).flatten() for p in module.parameters()]))


class Replaces(pl.Callback):
    """Calls `replace` before step `AT` (counted from 0), on all ranks."""

    def __init__(self, replace: Callable[[pl.Trainer, pl.LightningModule], None]) -> None:
        self.replace = replace

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step == AT:
            self.replace(trainer, module)


def put(name: str, trainer: pl.Trainer, module: Any) -> None:
    trainer.optimizers = [another(name, module)]


def put_in_strategy(name: str, trainer: pl.Trainer, module: Any) -> None:
    trainer.strategy.optimizers = [another(name, module)]


def put_scheduler(name: str, trainer: pl.Trainer, module: Any) -> None:
    config = pl.utilities.types.LRSchedulerConfig(
        torch.optim.lr_scheduler.StepLR(trainer.optimizers[0], 1, 0.25), interval="step"
    )
    trainer.strategy.lr_scheduler_configs = [config]


def put_foreign(name: str, trainer: pl.Trainer, module: Any) -> None:
    trainer.optimizers = [SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1)]


def put_into_list(name: str, trainer: pl.Trainer, module: Any) -> None:
    trainer.optimizers[0] = another(name, module)


def fit(name: str, *callbacks: pl.Callback, module: Any = None, **kwargs: Any) -> Any:
    domino = name == "domino"
    module = module or (causal_lm.CausalLM() if domino else Voter() if "lion" in name else Tiny())
    trace = Trace()
    trainer = quiet_trainer(
        strategy=strategy(name),
        devices=SIZE,
        max_steps=STEPS,
        callbacks=[trace, *callbacks],  # a callback that saves comes last
    )
    data = causal_lm.words(40) if domino else dataset(40)
    error, said = "", []
    try:
        with resume_warnings() as said:
            trainer.fit(module, DataLoader(data, batch_size=2, shuffle=True), **kwargs)
    except Exception as raised:  # noqa: BLE001 - the test looks at it
        error = f"{type(raised).__name__}: {raised}"
    lr = trainer.optimizers[0].param_groups[0]["lr"]
    return trace.after, error, lr, said


def put_on_rank_1(trainer: pl.Trainer, module: Any) -> None:
    if trainer.global_rank == 1:
        put("lion", trainer, module)


class Saves(pl.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == AT + 2:
            trainer.save_checkpoint(self.path)


class Another(Tiny):
    """Begins with what the callback of the saved fit put in."""

    def configure_optimizers(self) -> Any:
        return another("diloco", self)


class StepsRaw(Voter):
    """Steps the replaced optimizer where Lightning does not see it."""

    def optimizer_step(self, epoch: int, i: int, optimizer: Any, closure: Any) -> None:
        closure()
        self.trainer.optimizers[0].step()


class Drifts(pl.Callback):
    """Rank 1 changes a parameter that all ranks hold, by what a shard's norm would do to it."""

    def __init__(self, suffix: str) -> None:
        self.suffix = suffix

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step == AT and trainer.global_rank == 1:
            (p,) = [p for name, p in module.named_parameters() if name.endswith(self.suffix)]
            p.data.view(-1)[0] += 1e-6


class OwnStep(Voter):
    """Steps an optimizer that the strategy never sees, so no votes are sent."""

    def optimizer_step(self, epoch: int, i: int, optimizer: Any, closure: Any) -> None:
        if self.trainer.global_step < 2:
            optimizer.step(closure=closure)
            return
        closure()
        self.own = vars(self).get("own") or SGD(self.parameters(), lr=0.01)
        self.own.step()
        self.own.zero_grad()


def play(rank: int, size: int, folder: Path) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for name in NAMES:
        found[name, None] = fit(name)
        for change in (put, put_in_strategy, put_scheduler, put_into_list):
            found[name, change] = fit(name, Replaces(partial(change, name)))
    for name in REPLICAS:
        found[name, put_foreign] = fit(name, Replaces(partial(put_foreign, name)))
    path = folder / "replaced.ckpt"
    found["saved"] = fit("diloco", Replaces(partial(put, "diloco")), Saves(path))
    found["resumed"] = fit("diloco", module=Another(), ckpt_path=path)
    found["lion", "raw"] = fit("lion", Replaces(partial(put, "lion")), module=StepsRaw())
    found["domino", "drift"] = fit("domino", Drifts("ln_f.bias"))
    found["diloco domino", "drift"] = drifting_inside()
    found["lion", "bypassed"] = fit("lion", module=OwnStep())
    start = time.monotonic()
    found["one rank"] = fit("lion", Replaces(put_on_rank_1)), time.monotonic() - start
    return found


def drifting_inside() -> Any:
    """A tensor group as a replica of Streaming DiLoCo."""
    trainer = quiet_trainer(
        strategy=StreamingDiLoCoStrategy(2, 2, replica_size=2, inside="domino"),
        devices=SIZE,
        max_steps=STEPS,
        callbacks=[Drifts("ln_f.bias")],
    )
    with pytest.raises(RuntimeError) as raised:
        trainer.fit(causal_lm.CausalLM(), DataLoader(causal_lm.words(40), batch_size=2))
    return [], f"{type(raised.value).__name__}: {raised.value}", 0, []


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("replaced")
    return run_ranks(play, SIZE, folder, folder)


@pytest.mark.parametrize("name", REPLICAS)
def test_a_replaced_optimizer_trains(ranks: list[Any], name: str) -> None:
    for found in ranks:
        plain, _, _, _ = found[name, None]
        replaced, error, _, _ = found[name, put]
        assert not error
        assert len(replaced) == STEPS
        assert_same(replaced[:AT], plain[:AT])
        assert not torch.equal(replaced[-1], plain[-1])
        assert not torch.equal(replaced[-1], replaced[AT])
        assert_same(replaced, found[name, put_in_strategy][0])


@pytest.mark.parametrize("name", LOCKSTEP)
@pytest.mark.parametrize("change", [put, put_in_strategy, put_into_list])
def test_a_replaced_optimizer_is_refused_before_its_first_step(
    ranks: list[Any], name: str, change: Any
) -> None:
    by = "Domino" if name == "domino" else "Distributed Lion"
    kind = type(another(name, Tiny())).__name__
    for found in ranks:
        trained, error, _, _ = found[name, change]
        assert error.startswith(
            "RuntimeError: A hook replaced `trainer.optimizers` during the fit (with"
            f" `{kind}`), which {by} does not support. Create the optimizer in"
            " `configure_optimizers`"
        )
        assert "or use `StreamingDiLoCoStrategy`, under which hooks may replace" in error
        assert_same(trained, found[name, None][0][:AT])


def test_a_replaced_optimizer_that_lightning_does_not_step_is_refused_too(ranks: list[Any]) -> None:
    for found in ranks:
        trained, error, _, _ = found["lion", "raw"]
        assert "`DistributedLion` steps parameters of the module, but `configure_opt" in error
        assert len(trained) == AT


@pytest.mark.parametrize("name", NAMES)
def test_a_replaced_scheduler_steps(ranks: list[Any], name: str) -> None:
    for found in ranks:
        _, error, lr, _ = found[name, put_scheduler]
        assert not error
        assert lr == pytest.approx(found[name, None][2] * 0.25 ** (STEPS - AT))


def test_an_optimizer_of_other_parameters_is_refused_where_ranks_share_a_model(
    ranks: list[Any],
) -> None:
    for found in ranks:
        assert found["diloco", put_foreign][1] == "", "as under DDP"
        error = found["diloco fsdp", put_foreign][1]
        assert "The optimizer holds 1 parameters that were created before" in error


@pytest.mark.parametrize("name", REPLICAS)
def test_a_list_changed_in_place_is_refused(ranks: list[Any], name: str) -> None:
    """Lightning keeps stepping the optimizer that was in it."""
    for found in ranks:
        assert "is not in `trainer.optimizers`" in found[name, put_into_list][1]


def test_a_replacement_on_one_rank_only_ends_all_within_seconds(ranks: list[Any]) -> None:
    (_, other, _, _), (_, error, _, _) = (found["one rank"][0] for found in ranks)
    assert error.startswith("RuntimeError: A hook replaced `trainer.optimizers` during the fit")
    assert "rank 1" in other
    for found in ranks:
        assert found["one rank"][1] < 15, "the timeout is 30 minutes"


def test_a_replaced_optimizer_resumes_bit_for_bit(ranks: list[Any]) -> None:
    for found in ranks:
        resumed, error, _, said = found["resumed"]
        assert not error
        assert not said
        assert_same(resumed, found["saved"][0][AT + 2 :])


def test_drift_of_what_a_tensor_group_holds_is_named(ranks: list[Any]) -> None:
    for found in ranks:
        for name in ("domino", "diloco domino"):
            error = found[name, "drift"][1]
            assert error.startswith("AgreedError: Weights that must be equal on ranks 0, 1 differ")
            assert "before step 5: " in error
            assert "transformer.ln_f.bias' (on rank 1, compared with rank 0)" in error


def test_a_step_without_a_vote_is_refused(ranks: list[Any]) -> None:
    for found in ranks:
        error = found["lion", "bypassed"][1]
        assert error.startswith("RuntimeError: `SGD` steps parameters of the module, but `con")
