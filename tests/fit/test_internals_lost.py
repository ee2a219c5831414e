"""A Lightning that lacks the private names of one of our features: only that feature is lost.

The names of each feature in turn, or of a few together, are renamed throughout Lightning, in a
forked process that then imports the package again. There a fit saves at the end of its epoch and
another one resumes. Both must give the same weights as with all names, to the last bit, and one
warning names the lost feature. A resume in the middle of an epoch, where it is not exact, must
train on.
"""

from __future__ import annotations

import os
import traceback
import warnings
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_commfree import lightning_internals
from lightning_commfree.lightning_internals import Feature
from tests.fit import another_lightning
from tests.fit.models import assert_same
from tests.forks import Fork

INTACT = "nothing"
RANKS, BATCHES = 2, 4
OUR_WARNING = "Disabled for this fit: "


def private(*features: Feature) -> list[str]:
    """The private names in the paths of features."""
    names = [name for feature in features for name in feature.names]
    paths = [name.rpartition(":")[2].partition("=")[0] for name in names]
    parts = [part for path in paths for part in path.split(".")]
    return [part for part in dict.fromkeys(parts) if part.startswith("_")]


LOST = {
    name: feature
    for name, feature in vars(lightning_internals).items()
    if isinstance(feature, Feature) and private(feature)
}
# none of these changes the training, and no two are used in one place
TOGETHER = [("SIGTERM", "ROWS", "LOADERS"), ("LOADING", "RELOAD", "METRICS", "COMPILED", "TIMED")]
ALONE = [one for one in LOST if not any(one in names for names in TOGETHER)]
TOGETHER_LOST = [" ".join(one for one in names if one in LOST) for names in TOGETHER]
# the strategies share their use of these names; under Domino ranks share a model besides
CASES = [
    *(("diloco", name) for name in (INTACT, *ALONE, *TOGETHER_LOST)),
    *(("domino", name) for name in (INTACT, "MID_EPOCH", "COMPILED")),
]


class Ends(pl.Callback):
    """Saves in and at the end of the first epoch, and notes where a rank's fit has ended."""

    def __init__(self, folder: Path, end: Path) -> None:
        self.folder, self.end = folder, end

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.folder / "middle.ckpt")

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.folder / "end.ckpt")

    def on_fit_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        where = (trainer.current_epoch, trainer.global_step)
        torch.save((where, state), f"{self.end}_{trainer.global_rank}.pt")


def fit_and_resume(kind: str, name: str, folder: Path) -> None:
    """Write what the ranks warned of, and where their fits have ended; in a process of its own."""
    said = folder / "said"
    said.touch()

    def say(message: Warning | str, *_: Any, **__: Any) -> None:
        with said.open("a", encoding="utf-8") as file:
            file.write(f"{message}\n")

    warnings.showwarning, ends = say, []
    fits = [(1, None), (2, "end.ckpt"), (2, "middle.ckpt")]
    for epochs, saved in fits if name == "MID_EPOCH" else fits[:2]:
        warnings.simplefilter("always")
        end = folder / f"{epochs}-{saved}"
        trainer, module, data = make(kind, [Ends(folder, end)], epochs)
        trainer.fit(module, data, ckpt_path=saved and str(folder / saved))
        ends += [torch.load(f"{end}_{rank}.pt", weights_only=True) for rank in range(RANKS)]
    torch.save(ends, folder / "ends.pt")


def make(kind: str, callbacks: list[pl.Callback], epochs: int) -> tuple[pl.Trainer, Any, Any]:
    ours, models = import_module("lightning_commfree"), import_module("tests.fit.models")
    settings = {"start_method": "fork", "timeout": timedelta(seconds=60)}
    torch.manual_seed(0)
    if kind == "diloco":
        # fp32: no compiled loops, which each rank of each case would load again
        strategy = ours.StreamingDiLoCoStrategy(
            sync_every=3, num_fragments=2, wire_dtype="fp32", **settings
        )
        module, data = models.Noisy(), models.dataset(2 * BATCHES * RANKS)
    else:
        causal_lm = import_module("tests.fit.causal_lm")
        strategy = ours.DominoTPStrategy(RANKS, **settings)
        module, data = causal_lm.CausalLM(), causal_lm.words(2 * BATCHES)
    trainer = models.quiet_trainer(
        strategy=strategy, devices=RANKS, callbacks=callbacks, max_epochs=epochs
    )
    return trainer, module, DataLoader(data, batch_size=2, shuffle=True)


def features(name: str) -> list[Feature]:
    return [LOST[one] for one in name.split() if one in LOST]


def run_all(folder: Path) -> None:
    """Run every case in a process of its own, forked where Lightning is loaded and known."""
    inside = another_lightning.Inside()
    for kind, name in CASES:
        place = folder / f"{kind}-{name}"
        place.mkdir()
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            continue
        try:
            for missing in private(*features(name)):
                inside.rename(missing)
            another_lightning.forget_ours()
            fit_and_resume(kind, name, place)
        except BaseException:  # noqa: BLE001 - the test shows it
            (place / "failed").write_text(traceback.format_exc(), encoding="utf-8")
        finally:
            os._exit(0)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lost")
    assert Fork([run_all, folder]).end(500) == 0
    return folder


@pytest.mark.timeout(600)  # the first one waits for all
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_missing_private_names_disable_only_their_feature(
    outcomes: Path, kind: str, name: str
) -> None:
    place, intact = outcomes / f"{kind}-{name}", outcomes / f"{kind}-{INTACT}"
    failed = place / "failed"
    assert not failed.exists(), failed.read_text(encoding="utf-8")

    ends, wanted = torch.load(place / "ends.pt"), torch.load(intact / "ends.pt")
    assert [where for where, _ in ends[: 2 * RANKS]] == [
        *[(1, BATCHES)] * RANKS,
        *[(2, 2 * BATCHES)] * RANKS,
    ]
    assert_same(ends[: 2 * RANKS], wanted)
    if name == "MID_EPOCH":  # such a resume is tried as well
        first, other = (state for _, state in ends[2 * RANKS :])
        for key, tensor in first.items():
            assert torch.equal(tensor, other[key]), key
            assert not torch.equal(tensor, wanted[0][1][key]), "it has trained on"

    said = [line for line in (place / "said").read_text().splitlines() if OUR_WARNING in line]
    if name == INTACT:
        assert said == []
        return
    assert len(said) == len(ends) // RANKS, "one of each fit"
    for line in said:
        assert all(feature.lost in line for feature in features(name))
        assert all(missing in line for missing in private(*features(name)))
