"""A checkpoint of another algorithm: its rank state is not used, and the message says so."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lightning_commfree.resume.contents import KEY
from lightning_commfree.resume.exact import Save


class Two:
    """Two ranks, of which this one is the first, and the other has nothing."""

    rank, size, channels = 0, 2, SimpleNamespace(one_model=False)

    def all_flags(self, mine: bool) -> list[bool]:
        return [mine, False]


def test_another_algorithms_state_is_not_used(tmp_path: Path) -> None:
    entry = {
        "ranks": 2,
        "token": "1-a",
        "folder": ".commfree/a.ckpt/1-a",
        "algorithm": "yours",
        "fingerprint": {},
        "shared": {},
        "own": {"x": 1},
    }
    ranks: Any = Two()
    save = Save(tmp_path / "a.ckpt", {KEY: entry}, ranks)
    mine: Any = SimpleNamespace(name="mine", free_at_resume=frozenset(), fingerprint=dict)
    assert save.why_not_exact(mine, True) == "it was saved by yours, but this is mine"
    own, said = save.adopt(mine)
    assert own == {}
    assert "The epoch's data, random numbers and the strategy's own state start over" in said
