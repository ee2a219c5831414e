"""Messages at the start of a fit: how often each fragment will be exchanged."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_commfree import StreamingDiLoCoStrategy
from lightning_commfree.diloco import Schedule
from tests.fit.models import Tiny, dataset, loader, quiet_trainer
from tests.world import run_ranks


class Convolutions(Tiny):
    """No list of equal modules."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList()
        self.norm = nn.BatchNorm1d(6)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([dataset(80)[i] for i in range(80)])


def what_is_said(**changes: Any) -> tuple[list[str], list[str]]:
    said: tuple[list[str], list[str]] = [], []
    module = changes.pop("module", Tiny)()
    data = changes.pop("data", None)
    steps = changes.pop("max_steps", 20)
    trained = {"max_steps": steps, "max_epochs": changes.pop("max_epochs", None)}
    strategy = StreamingDiLoCoStrategy(**changes)
    trainer = quiet_trainer(strategy=strategy, devices=2, **trained)
    with pytest.MonkeyPatch.context() as patch:
        place = "lightning_commfree.diloco.strategy.rank_zero_"
        patch.setattr(place + "info", said[0].append)
        patch.setattr(place + "warn", said[1].append)
        trainer.fit(module, loader(160) if data is None else data)
    return said


CASES: dict[str, dict[str, Any]] = {
    "enough": {"sync_every": 2, "num_fragments": 1, "max_steps": 41},
    "few": {"sync_every": 2, "num_fragments": 2, "max_steps": 38, "evaluate": "outer"},
    "long cycles": {"sync_every": 100},
    "evaluate mean": {"sync_every": 12, "overlap_steps": 10, "evaluate": "mean"},
    "epochs": {"sync_every": 4, "max_epochs": 1, "max_steps": -1},
    "endless data": {"sync_every": 100, "max_epochs": 1, "max_steps": -1},
    "auto, short": {"sync_every": "auto"},
    "auto": {"sync_every": "auto", "max_steps": 250, "num_fragments": 1},
    "no blocks": {"sync_every": 4, "module": Convolutions},
    "one replica": {"sync_every": 4, "replica_size": 2},
    "balanced": {"sync_every": 4, "module": Convolutions, "fragment_pattern": "balanced"},
}


def play(rank: int, size: int) -> dict[str, Any]:
    more: dict[str, dict[str, Any]] = {
        "endless data": {"data": DataLoader(Stream(), batch_size=4)},
    }
    return {name: what_is_said(**changes, **more.get(name, {})) for name, changes in CASES.items()}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_ranks(play, 2, tmp_path_factory.mktemp("foretell"))[0]


def test_it_says_how_often_a_fragment_is_exchanged(said: Any) -> None:
    assert said["enough"] == (
        [
            "Within 41 steps the only fragment is exchanged 20 times (`sync_every=2`), and once"
            " more when the fit ends."
        ],
        [],
    )
    # 160 rows on 2 ranks in batches of 2; 4 blocks, and parameters outside them
    (text,) = said["epochs"][1]
    assert text.startswith("Within 40 steps each of the 3 fragments is exchanged 9 to 10")


def test_few_exchanges_bring_the_advice(said: Any) -> None:
    infos, (warning,) = said["few"]
    assert infos == []
    assert warning.startswith("Within 38 steps each of the 2 fragments is exchanged 18 to 19 times")
    assert warning.endswith(
        " Train for at least 42 steps. Until a fragment first lands, validations use its initial"
        " weights."
    )
    last = 1
    assert Schedule(2, 2, 1).launches_until(last, 42) >= 20, "the advice is good"
    assert Schedule(2, 2, 1).launches_until(last, 40) < 20, "and no more than needed"

    (warning,) = said["long cycles"][1]
    assert "is exchanged 0 times" in warning
    assert " Train for at least 2,100 steps, or set `sync_every=10`." in warning
    (warning,) = said["evaluate mean"][1]
    assert warning.endswith(" Train for at least 252 steps, or set `sync_every=11`.")


def test_one_replica_is_told_that_nothing_is_exchanged(said: Any) -> None:
    (text,), warnings = said["one replica"]
    assert text.startswith("There is only one replica, so nothing is exchanged: the outer")
    assert warnings == []


def test_auto_warns_of_a_fit_that_is_too_short_even_for_its_shortest_cycle(said: Any) -> None:
    infos, (warning,) = said["auto, short"]
    assert "exchanges each fragment every 10 steps at first" in infos[-1]
    assert "(`sync_every='auto'`), and" in warning
    assert warning.endswith("Train for at least 210 steps.")
    assert not said["auto"][1]


def test_no_forecast_for_data_of_unknown_length(said: Any) -> None:
    assert said["endless data"] == ([], [])


def test_a_model_without_blocks_is_told_of_balanced_fragments(said: Any) -> None:
    assert "`fragment_pattern='balanced'` splits it into several" in said["no blocks"][0][0]
    assert not any("No list of equal modules" in text for text in said["balanced"][0])
    assert not any("No list of equal modules" in text for text in said["enough"][0])
