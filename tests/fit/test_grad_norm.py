"""`strategy.grad_norm` counts every element of the full gradient once, in every layout."""

from __future__ import annotations

import math
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import nn

from lightning_commfree import DistributedLionStrategy, DominoTPStrategy, StreamingDiLoCoStrategy
from tests.fit import causal_lm
from tests.fit.models import Tiny, Voter, dataset, quiet_trainer, rank_loader
from tests.world import run_ranks

SIZE = 2
TYPES = (2.0, 1.0, 3.0, math.inf)


class Reads(pl.Callback):
    """Keeps the norms before the first step, by the strategy and of this rank's own tensors."""

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step == 0:
            self.norms = [float(trainer.strategy.grad_norm(p)) for p in TYPES]
            self.own = float(nn.utils.get_total_norm([local(p) for p in module.parameters()]))


class ClipsByHand(pl.Callback):
    def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        nn.utils.clip_grad_norm_(module.parameters(), 0.01)


class LogsNorms(pl.Callback):
    def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        module.log_dict(grad_norm(module, 2))


def local(p: nn.Parameter) -> torch.Tensor:
    grad: Any = p.grad
    return grad.to_local() if hasattr(grad, "to_local") else grad


def domino(**settings: Any) -> DominoTPStrategy:
    return DominoTPStrategy(2, "batch", **settings)


def diloco(inside: str, size: int) -> StreamingDiLoCoStrategy:
    return StreamingDiLoCoStrategy(2, 2, replica_size=size, inside=inside)


def lion(inside: str, size: int) -> DistributedLionStrategy:
    return DistributedLionStrategy(node_size=size, inside=inside)


class VotingLM(causal_lm.CausalLM):
    def configure_optimizers(self) -> Any:
        return Voter.configure_optimizers(self)  # type: ignore[arg-type]


CASES: dict[str, tuple[Any, Any]] = {
    "diloco": (lambda: diloco("ddp", 1), Tiny),
    "diloco ddp": (lambda: diloco("ddp", 2), Tiny),
    "diloco fsdp": (lambda: diloco("fsdp", 2), Tiny),
    "diloco domino": (lambda: diloco("domino", 2), causal_lm.CausalLM),
    "lion": (lambda: lion("ddp", 1), Voter),
    "lion ddp": (lambda: lion("ddp", 2), Voter),
    "lion fsdp": (lambda: lion("fsdp", 2), Voter),
    "lion domino": (lambda: lion("domino", 2), VotingLM),
    "domino": (domino, causal_lm.CausalLM),
}


def fit(strategy: Any, module: Any, rank: int, *callbacks: pl.Callback) -> str:
    is_lm = isinstance(module, causal_lm.CausalLM)  # all ranks get the same batches
    trainer = quiet_trainer(
        strategy=strategy,
        devices=SIZE,
        max_steps=4,
        callbacks=[*callbacks],
        use_distributed_sampler=not is_lm,
    )
    data: Any = causal_lm.loader(16, 2) if is_lm else rank_loader(16, 2, rank, SIZE)
    try:
        trainer.fit(module, data)
    except RuntimeError as error:
        return str(error)
    return ""


def play(rank: int, size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (make, module) in CASES.items():
        reads = Reads()
        assert not fit(make(), module(), rank, reads)
        found[name] = reads.norms, reads.own
    found["clipped"] = fit(domino(check_drift_every=2), causal_lm.CausalLM(), rank, ClipsByHand())
    found["clipped fsdp"] = fit(diloco("fsdp", 2), Tiny(), rank, ClipsByHand())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found["logged fsdp"] = fit(diloco("fsdp", 2), Tiny(), rank, LogsNorms())
    found["advice"] = " ".join(str(one.message) for one in said)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_ranks(play, SIZE, tmp_path_factory.mktemp("norms"))


def serial(name: str, rank: int) -> list[float]:
    """The norms of a plain module's gradient, on what the replica of a rank trains first."""
    torch.manual_seed(0)
    module: Any = CASES[name][1]()
    module.log = lambda *_, **__: None
    if isinstance(module, causal_lm.CausalLM):
        batch: Any = next(iter(causal_lm.loader(16, 2)))
    else:
        rows = dataset(16)[[0, 2]] if rank == 0 else dataset(16)[[1, 3]]
        batch = rows if name in ("diloco", "lion") else dataset(16)[[0, 2, 1, 3]]
    module.training_step(batch, 0).backward()
    flat = torch.cat([p.grad.flatten() for p in module.parameters()])
    return [float(torch.linalg.vector_norm(flat, p)) for p in TYPES]


@pytest.mark.parametrize("name", CASES)
def test_the_norm_is_that_of_the_full_gradient(ranks: list[Any], name: str) -> None:
    for rank, found in enumerate(ranks):
        norms, own = found[name]
        assert norms == pytest.approx(serial(name, rank), rel=1e-4)
        shards = name == "domino" or name.endswith(("fsdp", "domino"))
        assert (own == pytest.approx(norms[0], rel=1e-3)) != shards
    replica = [found[name][0] for found in ranks]
    assert (replica[0] == replica[1]) == (" " in name or name == "domino")


def test_clipping_by_a_norm_of_shards_is_found(ranks: list[Any]) -> None:
    for found in ranks:
        assert "differ before step 3" in found["clipped"]
        assert "`strategy.grad_norm()`" in found["clipped"]


def test_norms_by_hand_under_fsdp(ranks: list[Any]) -> None:
    """torch's functions know `DTensor`; Lightning's does not."""
    for found in ranks:
        assert not found["clipped fsdp"]
        assert "data is not allocated yet" in found["logged fsdp"]
    assert "use `trainer.strategy.grad_norm()`" in ranks[0]["advice"]


def test_a_norm_needs_a_positive_type() -> None:
    with pytest.raises(ValueError, match="`norm_type=0` must be above 0"):
        StreamingDiLoCoStrategy().grad_norm(0)
