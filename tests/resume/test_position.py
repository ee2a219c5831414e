"""What ranks leave for a resume runs no code where it is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_commfree.resume.position import loadable


class Touching:
    """Makes a file where somebody unpickles it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_what_only_pickle_loads_of_a_loader_is_left_out_and_said(tmp_path: Path) -> None:
    state = [{"place": Touching(tmp_path / "ran")}]
    with pytest.warns(UserWarning, match="state of a training data loader holds more than tensors"):
        assert loadable(state, "a training data loader") is None
    assert loadable([{"place": 3}]) == [{"place": 3}]
    assert not (tmp_path / "ran").exists()


def test_plain_values_are_kept_without_a_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save calls `torch.save` once: somebody may count."""
    monkeypatch.setattr(torch, "save", None)
    plain = {"a": [1, 2.0, ("x", None, True)], "b": torch.arange(3), 4: b"c"}
    assert loadable(plain) is plain
    monkeypatch.undo()
    assert loadable({"size": torch.Size([2])}) == {"size": torch.Size([2])}
    assert loadable({"where": Path()}) is None
