"""What ranks tell each other of themselves runs no code where it arrives."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_commfree.comm.channel import Channel, Pending
from lightning_commfree.comm.ledger import Ledger
from lightning_commfree.resume.epoch_start import EpochStart
from lightning_commfree.resume.position import loadable
from lightning_commfree.strategies._rank_states import KEY, Layout, add_entry, rank_state


class Touching:
    """Makes a file where somebody unpickles it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


class Lying(Channel):
    """Rank 1 sends what it likes."""

    def __init__(self, sent: bytes) -> None:
        super().__init__([0], 0, Ledger())
        self.sent = torch.frombuffer(bytearray(sent), dtype=torch.uint8)

    def all_gather(self, tensor: Tensor, *_: Any, **__: Any) -> Pending[Tensor]:
        if tensor.dtype == torch.int64:  # the lengths
            return Pending.here(torch.tensor([[int(tensor)], [len(self.sent)]]))
        rows = torch.zeros(2, len(tensor), dtype=torch.uint8)
        rows[0], rows[1, : len(self.sent)] = tensor, self.sent
        return Pending.here(rows)


def gathered(sent: Any, to: Layout) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(sent, buffer)
    checkpoint: dict[str, Any] = {}
    add_entry(checkpoint, Lying(buffer.getvalue()), to, {}, {"mine": torch.arange(3)})
    return checkpoint[KEY]


def test_plain_values_arrive_and_code_does_not_run(tmp_path: Path) -> None:
    layout = Layout(2, 1, 0)
    arrived = gathered({"random": (1, [2, 3]), "own": torch.ones(4)}, layout)
    assert arrived["states"][1]["random"] == (1, [2, 3])
    assert torch.equal(arrived["states"][1]["own"], torch.ones(4))
    trap = tmp_path / "ran"
    with pytest.raises(pickle.UnpicklingError):
        gathered({"loaders": Touching(trap)}, layout)
    assert not trap.exists()


def test_what_only_pickle_loads_of_a_loader_is_left_out_and_said(tmp_path: Path) -> None:
    state = {"combined_loader": [{"place": Touching(tmp_path / "ran")}]}
    checkpoint = {"loops": {"fit_loop": {"state_dict": state}}}
    with pytest.warns(UserWarning, match="state of a training data loader holds more than tensors"):
        kept = rank_state([], checkpoint, torch.device("cpu"), EpochStart())
    assert kept["loaders"] is None
    state["combined_loader"] = [{"place": 3}]
    assert rank_state([], checkpoint, torch.device("cpu"), EpochStart())["loaders"] == [
        {"place": 3}
    ]
    assert not (tmp_path / "ran").exists()


def test_plain_values_are_kept_without_a_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save calls `torch.save` once: somebody may count."""
    monkeypatch.setattr(torch, "save", None)
    plain = {"a": [1, 2.0, ("x", None, True)], "b": torch.arange(3), 4: b"c"}
    assert loadable(plain) is plain
    monkeypatch.undo()
    assert loadable({"size": torch.Size([2])}) == {"size": torch.Size([2])}
    assert loadable({"where": Path()}) is None
