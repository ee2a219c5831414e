"""Reading the saved state of loaders and schedulers runs no code; samplers that are not saved."""

from __future__ import annotations

from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler

from lightning_commfree.resume.data_position import needing_pickle
from lightning_commfree.resume.loader_parts import private_generators
from lightning_commfree.resume.rank_files import plain_or_none
from tests.fit.models import Seeded, dataset


class Touching:
    """Makes a file where somebody unpickles it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_objects_that_need_pickle_are_left_out_with_a_warning(tmp_path: Path) -> None:
    """Rank 0's is in the checkpoint; a batch that was read ahead is nowhere."""
    state = [{"place": Touching(tmp_path / "ran")}]
    loops = {"fit_loop": {"state_dict": {"combined_loader": state}}}
    part = {
        "loaders": plain_or_none(state),
        "schedulers": plain_or_none(state),
        "ahead": plain_or_none(state),
    }
    assert set(part.values()) == {None}
    loader, scheduler, batch = needing_pickle({"loops": loops, "lr_schedulers": state}, part, 2)
    pickled = "contains objects other than tensors and plain values, so every rank gets"
    assert f"state of a training data loader {pickled}" in loader
    assert f"scheduler {pickled}" in scheduler
    assert needing_pickle({"loops": loops, "lr_schedulers": state}, part, 1) == [batch]
    assert needing_pickle({"loops": {}}, {**part, "ahead": []}, 2) == []
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "state",
    [
        {"a": [1, 2.0, ("x", None, True)], "b": torch.arange(3), 4: b"c", "d": {1j}},
        {"milestones": Counter({3: 1}), "size": torch.Size([2]), "order": OrderedDict(a=1)},
    ],
)
def test_plain_values_are_kept(state: Any, tmp_path: Path) -> None:
    assert plain_or_none(state) is state
    torch.save(state, tmp_path / "state.pt")
    torch.load(tmp_path / "state.pt", weights_only=True)


class ByEpoch(RandomSampler):
    """Derives its order from the epoch, so that its own generator need not be saved."""

    def set_epoch(self, epoch: int) -> None:
        self.generator.manual_seed(epoch)


DATA, GIVEN = dataset(8), torch.Generator()


@pytest.mark.parametrize(
    ("loader", "names"),
    [
        (DataLoader(DATA, sampler=Seeded(8)), ["Seeded"]),
        (DataLoader(DATA, batch_sampler=BatchSampler(Seeded(8), 2, False)), ["Seeded"]),
        (DataLoader(DATA, sampler=DistributedSamplerWrapper(Seeded(8), 2, 0)), ["Seeded"]),
        (DataLoader(DATA, sampler=RandomSampler(DATA, generator=GIVEN)), []),
        (DataLoader(DATA, sampler=RandomSampler(DATA, generator=GIVEN), generator=GIVEN), []),
        (DataLoader(DATA, sampler=ByEpoch(DATA, generator=GIVEN)), []),
        (DataLoader(DATA, sampler=DistributedSampler(DATA, 2, 0)), []),
        (DataLoader(DATA, shuffle=True, generator=GIVEN), []),
        (DataLoader(DATA, shuffle=True), []),
        ([1, 2], []),
    ],
)
def test_generators_that_are_not_saved_are_found(loader: Any, names: list[str]) -> None:
    assert private_generators(loader) == names
