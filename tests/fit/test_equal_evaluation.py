"""Ranks that share a model must have the same number of batches to evaluate."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_commfree import (
    DistributedLionStrategy,
    DominoTPStrategy,
    StreamingDiLoCoStrategy,
)
from tests.fit import causal_lm
from tests.fit.models import Tiny, Voter, dataset, quiet_trainer
from tests.world import run_ranks

SHORT, LONG, SANITY = 3, 5, 2
TIMEOUT = timedelta(seconds=15)
SHARDED: dict[str, Any] = {"inside": "fsdp", "timeout": TIMEOUT}


class Stream(IterableDataset[Any]):
    """Rows without a length."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


class Counts:
    """Counts batches by loop and loader."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.counts: dict[str, int] = {}

    def count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1

    def validation_step(self, batch: Any, i: int, dataloader_idx: int = 0) -> None:
        self.count(f"validate {dataloader_idx}")
        super().validation_step(batch, i)  # type: ignore[misc]

    def test_step(self, batch: Any, i: int) -> None:
        self.count("test")
        super().validation_step(batch, i)  # type: ignore[misc]

    def predict_step(self, batch: Any, i: int) -> Tensor:
        self.count("predict")
        return self(batch[0])  # type: ignore[operator]


class Counted(Counts, Tiny): ...


class CountedVoter(Counts, Voter): ...


class CountedText(Counts, causal_lm.CausalLM): ...


def some(rows: Dataset[Any], batches: int, stream: bool = False) -> DataLoader[Any]:
    taken: Any = [rows[i] for i in range(2 * batches)]
    return DataLoader(Stream(taken) if stream else taken, batch_size=2)


class Fit:
    """A short fit with validations, and what follows it."""

    def __init__(self, strategy: Any, module: Any, size: int, rows: Any) -> None:
        self.module, self.rows = module, rows
        self.trainer = quiet_trainer(
            strategy=strategy,
            devices=size,
            max_steps=2,
            val_check_interval=2,
            use_distributed_sampler=False,
        )

    def run(self, function: str, *args: Any, **kwargs: Any) -> dict[str, int]:
        self.module.counts = {}
        getattr(self.trainer, function)(self.module, *args, **kwargs)
        return self.module.counts

    def fails(self, function: str, *args: Any) -> str:
        with pytest.raises(ValueError, match="The ranks of a replica share a model") as error:
            self.run(function, *args)
        assert self.module.counts == {}, "refused before the first batch"
        return str(error.value)

    def training(self) -> DataLoader[Any]:
        return some(self.rows, LONG)


def four(rank: int, size: int) -> dict[str, Any]:
    """Replica 1 has fewer batches than replica 0; then rank 1 fewer than rank 0."""
    rows, found = dataset(40), {}
    batches = LONG if rank < 2 else SHORT
    fit = Fit(StreamingDiLoCoStrategy(replica_size=2, **SHARDED), Counted(), size, rows)
    found["fit"] = fit.run("fit", fit.training(), [some(rows, batches), some(rows, LONG)])
    found["predict"] = fit.run("predict", some(rows, batches), return_predictions=False)
    uneven = SHORT if rank == 1 else LONG
    for function in ("validate", "test", "predict"):
        found[f"{function}, uneven"] = fit.fails(function, [some(rows, LONG), some(rows, uneven)])
    # otherwise Lightning itself refuses an empty loader, on that rank
    fit.module.allow_zero_length_dataloader_with_multiple_devices = True
    found["empty"] = fit.fails("validate", some(rows, 0 if rank == 1 else LONG))
    stream = some(rows, LONG, stream=True)
    found["stream"] = fit.fails("validate", stream)
    fit.trainer.limit_val_batches = SHORT
    found["limited"] = fit.run("validate", stream), fit.run("validate", some(rows, uneven))
    return found


def in_fits(rank: int, size: int) -> dict[str, Any]:
    text, rows, found = causal_lm.words(40), dataset(40), {}
    batches = LONG if rank == 1 else SHORT
    fit = Fit(DominoTPStrategy(2, "batch", timeout=TIMEOUT), CountedText("gpt2"), size, text)
    found["fit"] = fit.run("fit", fit.training(), some(text, LONG))
    # the model is whole again, and every rank evaluates alone
    found["alone"] = fit.run("validate", some(text, batches))
    fit = Fit(DominoTPStrategy(2, "batch", timeout=TIMEOUT), CountedText("gpt2"), size, text)
    found["domino"] = fit.fails("fit", fit.training(), some(text, batches))
    lion = DistributedLionStrategy(node_size=2, **SHARDED)
    fit = Fit(lion, CountedVoter(), size, rows)
    found["lion"] = fit.fails("fit", fit.training(), some(rows, batches))
    return found


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(four, 4, tmp_path_factory.mktemp("four"))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(in_fits, 2, tmp_path_factory.mktemp("two"))


def test_replicas_may_have_different_numbers(replicas: Any) -> None:
    for rank, found in enumerate(replicas):
        batches = LONG if rank < 2 else SHORT
        assert found["fit"] == {"validate 0": SANITY + batches, "validate 1": SANITY + LONG}
        assert found["predict"] == {"predict": batches}


@pytest.mark.parametrize(
    ("function", "name", "advice"),
    [
        ("validate", "val", f"or set `limit_val_batches={SHORT}`."),
        ("test", "test", f"or set `limit_test_batches={SHORT}`."),
        ("predict", "predict", "or predict on a single device, from a checkpoint."),
    ],
)
def test_an_error_on_all_ranks_names_the_loader_and_the_lengths(
    replicas: Any, function: str, name: str, advice: str
) -> None:
    for found in replicas:
        text = found[f"{function}, uneven"]
        assert f"`{name}_dataloaders[1]` has {SHORT} on rank 1 and {LONG} on rank 0." in text
        assert text.endswith(advice)


def test_a_rank_without_any_batch_is_named(replicas: Any) -> None:
    for found in replicas:
        assert f"`val_dataloaders[0]` has 0 on rank 1 and {LONG} on rank 0." in found["empty"]


def test_a_stream_needs_a_limit(replicas: Any) -> None:
    for found in replicas:
        assert "`val_dataloaders[0]` has no length on rank 0. Set `limit_val_b" in found["stream"]
        assert found["limited"] == ({"validate 0": SHORT}, {"validate 0": SHORT})


@pytest.mark.parametrize("name", ["domino", "lion"])
def test_a_fit_is_refused_before_its_sanity_check(pair: Any, name: str) -> None:
    for found in pair:
        assert f"has {SHORT} on rank 0 and {LONG} on rank 1." in found[name]


def test_ranks_that_hold_the_model_again_evaluate_all_they_have(pair: Any) -> None:
    assert [found["fit"] for found in pair] == [{"validate 0": SANITY + LONG}] * 2
    assert [found["alone"]["validate 0"] for found in pair] == [SHORT, LONG]
