"""A fit with `DominoTPStrategy`: the same model on all ranks, collectives, half precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from lightning_commfree import DominoTPStrategy
from tests.fit.causal_lm import CausalLM, words
from tests.fit.models import quiet_trainer
from tests.world import run_ranks

BATCH = 4


class Recording(CausalLM):
    """Keeps the losses, and this rank's gradients of the first step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.losses: list[float] = []

    def training_step(self, batch: Any, i: int) -> Tensor:
        loss = super().training_step(batch, i)
        self.losses.append(float(loss.detach()))
        return loss


class Checkpointed(Recording):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.wrapped["lm"].gradient_checkpointing_enable()


def fit(rank: int, size: int, module: Any, **kwargs: Any) -> dict[str, Any]:
    settings = {"split": "batch", **kwargs.pop("settings", {})}
    apart = kwargs.pop("apart", False)  # every rank its own data
    strategy = DominoTPStrategy(**settings)
    trainer = quiet_trainer(
        strategy=strategy,
        devices=size,
        max_steps=6,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        **kwargs,
    )
    sampler = DistributedSampler(words(6 * BATCH * size), size, rank if apart else 0, shuffle=False)
    trainer.fit(module, DataLoader(sampler.dataset, batch_size=BATCH, sampler=sampler))
    return {
        "losses": module.losses,
        "weights": torch.cat([p.detach().float().flatten() for p in module.parameters()]),
        "sums": dict(strategy.ledger.collectives_by_tag),
        "generated": module.wrapped["lm"].generate(words(1).tensors[0], max_new_tokens=4).tolist(),
    }


def many(rank: int, size: int) -> dict[str, Any]:
    outcomes: dict[str, Any] = {
        "plain": fit(rank, size, Recording()),
        "checkpointed": fit(rank, size, Checkpointed()),
        "bf16-mixed": fit(rank, size, Recording(), precision="bf16-mixed"),
        "bf16-true": fit(rank, size, Recording(), precision="bf16-true"),
        "dropout": fit(rank, size, Recording(dropout=0.2)),
        "dropout, checkpointed": fit(rank, size, Checkpointed(dropout=0.2)),
    }
    try:
        fit(rank, size, Recording(), apart=True)
    except ValueError as error:
        outcomes["apart"] = str(error)
    return outcomes


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(many, 2, tmp_path_factory.mktemp("many"))


@pytest.mark.parametrize("case", ["plain", "checkpointed", "bf16-mixed", "bf16-true", "dropout"])
def test_ranks_end_with_the_same_model(ranks: list[Any], case: str) -> None:
    first, second = (outcomes[case] for outcomes in ranks)
    assert torch.equal(first["weights"], second["weights"])
    assert first["losses"] == second["losses"]
    assert first["generated"] == second["generated"], "transformers' own model again"


def test_checkpointing_repeats_no_collective(ranks: list[Any]) -> None:
    """Two layers, six steps, two micro-batches: 2 sums a layer each way, and one of the embedding
    there and of the head back. The loss sends once each way, forward."""
    for outcomes in ranks:
        plain, checkpointed = outcomes["plain"], outcomes["checkpointed"]
        assert plain["sums"] == checkpointed["sums"]
        assert plain["sums"]["tensor_forward"] == 6 * (2 * 2 * 2 + 1)
        assert plain["sums"]["tensor_backward"] == 6 * (2 * 2 * 2 + 1)
        assert plain["losses"] == checkpointed["losses"]
        dropped, again = outcomes["dropout"], outcomes["dropout, checkpointed"]
        torch.testing.assert_close(dropped["weights"], again["weights"], rtol=0, atol=1e-6)
        assert abs(dropped["losses"][0] - plain["losses"][0]) > 1e-3, "dropout does something"


def test_half_precision_stays_near(ranks: list[Any]) -> None:
    plain = ranks[0]["plain"]["losses"]
    for case in ("bf16-mixed", "bf16-true"):
        assert ranks[0][case]["losses"] == pytest.approx(plain, rel=0.02)
        assert ranks[0][case]["losses"] != plain


def test_ranks_of_a_group_with_other_batches_are_told(ranks: list[Any]) -> None:
    for outcomes in ranks:
        assert "ranks of a replica must train on the same batch" in outcomes["apart"]
