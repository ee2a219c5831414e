"""What a fit makes of a save that is not its own in every way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_commfree.resume.rank_files import Owner, RankFiles, SavedParts
from lightning_commfree.resume.rank_state import Adopted, Saved


class Alone:
    """One rank, which agrees with itself, and with a second one that has nothing."""

    def all_flags(self, mine: bool) -> list[bool]:
        return [mine, False]


class Algorithm:
    name, replicas, free_at_resume = "mine", False, frozenset({"free"})

    def __init__(self, **settings: str) -> None:
        self.settings = settings

    def fingerprint(self) -> dict[str, str]:
        return self.settings

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def adopt(self, saved: Saved) -> Adopted | None:
        return Adopted({"random": saved.entry["token"]}, "and more")


def saved_by(algorithm: str, folder: Path) -> Saved:
    owner = Owner(0, 2, "1-a")
    checkpoint: dict[str, Any] = {}
    settings = {"free": "1", "bound": "2"}
    RankFiles(folder / "a.ckpt").enter(checkpoint, owner, algorithm, settings, {"x": 1})
    return Saved(SavedParts(folder / "a.ckpt", checkpoint, None), Alone())


@pytest.mark.parametrize(
    ("settings", "ranks", "said"),
    [
        ({"free": "3", "bound": "2"}, 2, "the files of rank 1 below '.commfree/a.ckpt/1-a' are"),
        ({"free": "1", "bound": "4"}, 2, "bound was 2 and is 4"),
        ({"free": "1"}, 3, "it was saved by 2 ranks, these are 3; bound was 2 and is absent"),
    ],
)
def test_what_differs_is_said(settings: Any, ranks: int, said: str, tmp_path: Path) -> None:
    saved = saved_by("mine", tmp_path)
    text = saved.why_not_exact(Algorithm(**settings), True, ranks)
    assert text.startswith(said)
    assert saved.adopted_by(Algorithm()) == Adopted({"random": "1-a"}, "and more")
    assert saved.load([0, 1]) == [{"x": 1}, None]
    assert saved.load_all([0]) == [], "the other rank has not found what it wants"


def test_another_algorithms_parts_are_of_no_use(tmp_path: Path) -> None:
    saved = saved_by("yours", tmp_path)
    text = saved.why_not_exact(Algorithm(free="1", bound="2"), True, 2)
    assert text == "it was saved by yours, and this is mine"
    part, said = saved.adopted_by(Algorithm())
    assert part == {}
    assert "begins anew: the epoch's data, random numbers" in said
