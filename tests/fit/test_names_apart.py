"""Checkpoints whose names or order follow a metric that is another one on every rank."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_commfree import StreamingDiLoCoStrategy
from tests.fit.models import Tiny, loader, quiet_trainer
from tests.world import run_ranks

SCORES = ((5.0, 1.0, 3.0, 2.0, 9.0), (1.0, 4.0, 2.0, 3.0, 9.0))  # by rank and epoch


class Scored(Tiny):
    """Logs without `sync_dist`, as many modules do: with DDP only rank 0 writes."""

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.log("score", SCORES[self.global_rank][self.trainer.current_epoch])


def fit(size: int, folder: Path, name: str, **kwargs: Any) -> list[str]:
    save = ModelCheckpoint(folder, name, monitor="score", save_top_k=2)
    trainer = quiet_trainer(
        strategy=StreamingDiLoCoStrategy(sync_every=3),
        devices=size,
        enable_checkpointing=True,
        callbacks=[save],
        max_epochs=kwargs.pop("max_epochs", 4),
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Scored(), loader(4 * 2 * size), loader(2 * size), **kwargs)
    return [str(w.message) for w in caught if "Cannot resume exactly" in str(w.message)]


def play(rank: int, size: int, folder: Path) -> dict[str, Any]:
    said = {}
    for name in ("{epoch}", "{epoch}-{score:.1f}"):
        place = folder / name
        fit(size, place, name)
        kept = sorted(place.glob("*.ckpt"))
        again = folder / f"again {name}"
        said[name] = fit(size, again, name, ckpt_path=kept[-1], max_epochs=5)
    return said


def test_every_checkpoint_that_is_kept_has_the_files_of_all_ranks(tmp_path: Path) -> None:
    by_rank = run_ranks(play, 2, tmp_path, tmp_path)
    for said in by_rank:
        assert all(texts == [] for texts in said.values()), said
    for place in (tmp_path / "{epoch}", tmp_path / "{epoch}-{score:.1f}"):
        kept = {path.name for path in place.glob("*.ckpt")}
        assert len(kept) == 2
        assert all(re.search("epoch=[12]", name) for name in kept), "rank 0 has these"
        assert {path.name for path in (place / ".commfree").iterdir()} == kept
        for name in kept:
            entry = torch.load(place / name, weights_only=True)["lightning_commfree"]
            files = sorted(path.name for path in (place / entry["folder"]).iterdir())
            assert files == ["rank_1.pt"]
