"""`sync_every="auto"` under a Trainer: messages, metrics, and a resume around a change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from lightning_commfree import ElasticDiLoCoStrategy, StreamingDiLoCoStrategy
from lightning_commfree.host import pl
from tests.diloco.training import follow
from tests.fit.models import (
    Noisy,
    Recorder,
    SavesAfterBatches,
    assert_same,
    dataset,
    info_messages,
    quiet_trainer,
)
from tests.fit.saved import resume_warnings
from tests.world import run_ranks

STEPS, PACES = 70, {20: (20, 6), 60: (10, 3)}
SAVED = (11, 22, 45, 62)  # before a change is due, in flight across it, and after both


class Follows(pl.Callback):
    """Changes the pace at given steps, instead of by what is measured."""

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        follow(trainer.strategy._diloco, PACES)


def fit(rank: int, size: int, folder: Path, saved: int | None = None) -> dict[str, Any]:
    recorder = Recorder()
    strategy = StreamingDiLoCoStrategy(sync_every="auto", num_fragments=2, overlap_steps=2)
    saves = [] if saved else [SavesAfterBatches(folder, *SAVED)]
    trainer = quiet_trainer(
        strategy=strategy, devices=size, max_steps=STEPS, callbacks=[Follows(), recorder, *saves]
    )
    path = folder / f"{saved}.ckpt" if saved else None
    with info_messages() as messages, resume_warnings() as warned:
        data = DataLoader(dataset(200 * size), batch_size=2, shuffle=True)
        trainer.fit(Noisy(), data, ckpt_path=path)
    return {
        "local": recorder.local,
        "outer": recorder.outer,
        "messages": messages,
        "warned": warned,
    }


def play(rank: int, size: int, folder: Path) -> list[dict[str, Any]]:
    return [fit(rank, size, folder), *(fit(rank, size, folder, saved) for saved in SAVED)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("auto")
    return run_ranks(play, 2, folder, folder)


def test_changes_are_said(ranks: Any) -> None:
    (straight, *_), _ = ranks
    said = [text for text in straight["messages"] if "each fragment" in text]
    assert "`sync_every='auto'` exchanges each fragment every 10 steps at first" in said[0]
    assert said[1].startswith(
        "After step 20, each fragment is exchanged every 20 steps and lands after 6 (before: 10 and"
        " 5), because the exchanges of all fragments take "
    )
    assert said[2].startswith("After step 60, each fragment is exchanged every 10 steps")
    assert len(said) == 3


def test_a_resume_around_a_change_is_exact(ranks: Any) -> None:
    for straight, *resumed in ranks:
        assert len(straight["local"]) == STEPS
        for saved, one in zip(SAVED, resumed, strict=True):
            assert not one["warned"]
            assert_same(one["local"], straight["local"][saved:], f"step {saved}")
            assert_same(one["outer"], straight["outer"][saved:], f"step {saved}")


def test_replicas_choose_alike_by_what_they_measure(tmp_path: Path) -> None:
    one, other = run_ranks(measured, 2, tmp_path)
    assert one == other
    assert one[0] == (0, 10, 5)


def measured(rank: int, size: int) -> list[tuple[int, ...]]:
    strategy, found = StreamingDiLoCoStrategy(sync_every="auto", num_fragments=2), []

    class Looks(pl.Callback):
        def on_train_end(self, trainer: Any, *_: Any) -> None:
            found.extend(trainer.strategy._diloco.schedule.paces)

    trainer = quiet_trainer(strategy=strategy, devices=size, max_steps=120, callbacks=[Looks()])
    trainer.fit(Noisy(), DataLoader(dataset(200 * size), batch_size=2, shuffle=True))
    return [tuple(pace) for pace in found]


def test_what_auto_cannot_do_is_refused() -> None:
    with pytest.raises(ValueError, match="`overlap_steps=9` must be at most 8 with"):
        StreamingDiLoCoStrategy(sync_every="auto", overlap_steps=9)
    with pytest.raises(ValueError, match="`overlap_steps=9` must be at most 8 with"):
        ElasticDiLoCoStrategy("file:///tmp", overlap_steps=9)
