"""A save by other ranks, with other settings, or by another algorithm; and a replica that joins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_commfree.resume.exact import KEY, Save


class Two:
    """Two ranks, of which this one is the first, and the other has nothing."""

    rank, size = 0, 2

    def all_flags(self, mine: bool) -> list[bool]:
        return [mine, False]


class Three(Two):
    size = 3


class Algorithm:
    name, replicas, free_at_resume = "mine", False, frozenset({"free"})

    def __init__(self, **settings: str) -> None:
        self.settings = settings

    def fingerprint(self) -> dict[str, str]:
        return self.settings

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {}, {}

    def load_state_dict(self, shared: dict[str, Any], own: dict[str, Any] | None) -> None:
        pass

    def adopt(self, was: Any, ranks: int, load: Any) -> tuple[dict[str, Any], str]:
        return {"random": was["bound"], "found": load([0])}, "and more"


def saved_by(algorithm: str, folder: Path, ranks: Any) -> Save:
    entry = {
        "ranks": 2,
        "token": "1-a",
        "folder": ".commfree/a.ckpt/1-a",
        "algorithm": algorithm,
        "fingerprint": {"free": "1", "bound": "2"},
        "shared": {},
        "own": {"x": 1},
    }
    return Save(folder / "a.ckpt", {KEY: entry}, ranks)


@pytest.mark.parametrize(
    ("settings", "ranks", "said"),
    [
        (
            {"free": "3", "bound": "2"},
            Two(),
            "the rank files of rank 1 in '.commfree/a.ckpt/1-a'",
        ),
        ({"free": "1", "bound": "4"}, Two(), "bound was 2 and is 4"),
        ({"free": "1"}, Three(), "it was saved by 2 ranks, but this fit has 3; bound was 2 and is"),
    ],
)
def test_what_differs_is_said(settings: Any, ranks: Any, said: str, tmp_path: Path) -> None:
    save = saved_by("mine", tmp_path, ranks)
    assert save.why_not_exact(Algorithm(**settings), True).startswith(said)
    own, text = save.adopt(Algorithm())
    assert (own["random"], text) == ("2", "and more")
    assert own["found"] == [], "the other rank has not found the state that it wants"
    assert [save.own_state(rank) for rank in (0, 1)] == [{"x": 1}, None]


def test_another_algorithms_state_is_not_used(tmp_path: Path) -> None:
    save = saved_by("yours", tmp_path, Two())
    text = save.why_not_exact(Algorithm(free="1", bound="2"), True)
    assert text == "it was saved by yours, but this is mine"
    own, said = save.adopt(Algorithm())
    assert own == {}
    assert "The epoch's data, random numbers and the strategy's own state start afresh" in said
