"""Reading the saved state of loaders and schedulers runs no code."""

from __future__ import annotations

from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_commfree.resume.data_position import needing_pickle
from lightning_commfree.resume.rank_files import plain_or_none


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
    assert "state of a training data loader contains more than tensors and plain values" in loader
    assert "scheduler contains more than tensors and plain values, so every rank gets" in scheduler
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
