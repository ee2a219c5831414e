"""Ranks that share a model evaluate as many batches as the one of their replica with the fewest."""

from __future__ import annotations

import warnings
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
        self.module, self.rows, self.said = module, rows, ""
        self.trainer = quiet_trainer(
            strategy=strategy,
            devices=size,
            max_steps=2,
            val_check_interval=2,
            use_distributed_sampler=False,
        )

    def run(self, function: str, *args: Any, **kwargs: Any) -> dict[str, int]:
        self.module.counts = {}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            getattr(self.trainer, function)(self.module, *args, **kwargs)
        self.said = " ".join(str(w.message) for w in caught if "replica" in str(w.message))
        return self.module.counts

    def fails(self, function: str, *args: Any) -> str:
        with pytest.raises(RuntimeError) as error:
            self.run(function, *args)
        return str(error.value)

    def training(self) -> DataLoader[Any]:
        return some(self.rows, LONG)


def four(rank: int, size: int) -> dict[str, Any]:
    """Only rank 1 has fewer batches, so replica 0 stops early, and replica 1 does not."""
    rows, found = dataset(40), {}
    batches = SHORT if rank == 1 else LONG
    fit = Fit(StreamingDiLoCoStrategy(replica_size=2, **SHARDED), Counted(), size, rows)
    found["fit"] = fit.run("fit", fit.training(), [some(rows, batches), some(rows, LONG)])
    found["said"] = fit.said
    found["validate"] = fit.run("validate", some(rows, batches))
    found["test"] = fit.run("test", some(rows, batches))
    found["stream"] = fit.run("validate", some(rows, batches, stream=True))
    found["stream, said"] = fit.said
    found["predict"] = fit.run("predict", some(rows, LONG), return_predictions=False)
    found["refused"] = fit.fails("predict", some(rows, batches))
    return found


def two(rank: int, size: int) -> dict[str, Any]:
    text, found = causal_lm.words(40), {}
    batches = LONG if rank == 1 else SHORT
    fit = Fit(DominoTPStrategy(2, "batch", timeout=TIMEOUT), CountedText("gpt2"), size, text)
    found["domino"] = fit.run("fit", fit.training(), some(text, batches))
    fit = Fit(DominoTPStrategy(2, "batch", timeout=TIMEOUT), CountedText("gpt2"), size, text)
    found["domino, stream"] = fit.run("fit", fit.training(), some(text, batches, stream=True))
    # the model is whole again, and every rank evaluates alone
    found["domino, alone"] = fit.run("validate", some(text, batches))

    rows, lion = dataset(40), DistributedLionStrategy(node_size=2, **SHARDED)
    fit = Fit(lion, CountedVoter(), size, rows)
    found["lion"] = fit.run("fit", fit.training(), some(rows, batches))
    empty = some(rows, LONG * rank, stream=True)
    found["empty"] = fit.run("validate", empty)
    found["empty, said"] = fit.said
    fit.trainer.limit_val_batches = LONG - 1
    found["empty, limited"] = fit.run("validate", empty)
    found["limited"] = fit.run("validate", some(rows, batches, stream=True))
    found["predicted stream"] = fit.fails("predict", some(rows, batches, stream=True))
    return found


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(four, 4, tmp_path_factory.mktemp("four"))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(two, 2, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("name", ["validate", "test", "stream"])
def test_each_replica_stops_with_its_shortest_loader(replicas: Any, name: str) -> None:
    assert [sum(rank[name].values()) for rank in replicas] == [SHORT, SHORT, LONG, LONG]


def test_a_validation_in_a_fit_is_shortened_loader_by_loader(replicas: Any) -> None:
    for rank, found in enumerate(replicas):
        shortest = SHORT if rank < 2 else LONG
        assert found["fit"] == {"validate 0": SANITY + shortest, "validate 1": SANITY + LONG}


def test_a_warning_names_ranks_and_numbers(replicas: Any) -> None:
    assert "rank 0 has 5, but another rank of its replica has 3" in replicas[0]["said"]
    assert "Metrics leave out the extra batches" in replicas[0]["said"]
    assert [rank["said"] for rank in replicas[1:]] == ["", "", ""]
    assert "the data of rank 1 ends first" in replicas[0]["stream, said"]
    assert [rank["stream, said"] for rank in replicas[1:]] == ["", "", ""]


def test_predict_leaves_out_no_rows(replicas: Any, pair: Any) -> None:
    for found in replicas:
        assert found["predict"] == {"predict": LONG}
        assert "`predict` would leave out rows" in found["refused"]
        assert "rank 0 has 5, but another rank of its replica has 3" in found["refused"]
    for found in pair:
        assert "`predict` would leave out rows" in found["predicted stream"]
        assert "the data of rank 0 ends first" in found["predicted stream"]


@pytest.mark.parametrize("name", ["domino", "domino, stream", "lion"])
def test_every_layout_that_shares_a_model_is_covered(pair: Any, name: str) -> None:
    assert [found[name] for found in pair] == [{"validate 0": SANITY + SHORT}] * 2


def test_ranks_that_hold_the_model_again_evaluate_all_they_have(pair: Any) -> None:
    counts = [found["domino, alone"]["validate 0"] for found in pair]
    assert counts == [SHORT, LONG]


def test_a_stream_without_any_batch_ends_at_once_on_all_ranks(pair: Any) -> None:
    for found in pair:
        assert found["empty"] == {}
        assert found["empty, limited"] == {}
    assert "the data of rank 0 ends first" in pair[0]["empty, said"]


def test_a_stream_that_is_shorter_than_a_limit_counts(pair: Any) -> None:
    assert [found["limited"] for found in pair] == [{"validate 0": SHORT}] * 2
