"""Averaged buffers that change their shape during a fit, on all ranks or on some: a memory bank
that grows, one that shrinks, changes its dtype, goes or comes. The fit goes on, and each rank keeps
its own."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.local_sgd import LocalSGDStrategy
from lightning_commfree import DistributedLion, DistributedLionStrategy, StreamingDiLoCoStrategy
from tests.fit.models import (
    Noisy,
    Recorder,
    SavesAfterBatches,
    assert_same,
    info_messages,
    loader,
    quiet_trainer,
)
from tests.fit.saved import resume_warnings
from tests.world import run_ranks

STEPS, SAVED = 8, 4
KINDS = ("diloco", "mean", "replicas", "lion", "local")
WAYS = ("grows", "grows apart", "shrinks", "dtype", "none", "gone", "comes", "in place")


class Bank(Noisy):
    def __init__(self, way: str, lion: bool) -> None:
        super().__init__()
        self.way, self.lion = way, lion
        self.register_buffer("bank", torch.ones(3, 2))
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("same", torch.zeros(2))

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        self.changes(state.pop(f"{prefix}bank", None), state.pop(f"{prefix}late", None))
        own = {f"{prefix}bank", f"{prefix}late"}
        super()._load_from_state_dict(state, prefix, *args)
        missing = args[2]
        missing[:] = [name for name in missing if name not in own]

    def changes(self, bank: Any, late: Any) -> None:
        """Leave it to the ranks' own states: the module starts with its first shapes again."""

    def training_step(self, batch: Any, index: int) -> Any:
        # DDP itself sends buffers from rank 0 of a replica to the others, and must find equal sizes
        replica = self.global_rank // self.trainer.strategy.inside.size
        here, step = replica == 1, self.global_step
        with torch.no_grad():
            self.mean += replica
            self.same = self.same + 1
            if self.way == "grows" or (self.way == "grows apart" and (here or step > 5)):
                row = torch.full((1 + replica * ("apart" in self.way), 2), float(step))
                self.bank = torch.cat([self.bank, row])
            elif step == 1 and here:
                if self.way == "shrinks":
                    self.bank = self.bank[:1] * 7
                elif self.way == "dtype":
                    self.bank = self.bank.double() * 7
                elif self.way == "none":
                    self.bank = None
                elif self.way == "gone":
                    del self.bank
                elif self.way == "comes":
                    self.register_buffer("late", torch.full((4,), 7.0))
                elif self.way == "in place":
                    self.bank.resize_(4, 2).fill_(7)
        return super().training_step(batch, index)

    def configure_optimizers(self) -> Any:
        optimizer: Any = DistributedLion if self.lion else torch.optim.AdamW
        return optimizer(self.parameters(), lr=0.02)


def run(kind: str, way: str, size: int, folder: Path, **ckpt: Any) -> Any:
    recorder = Recorder()
    if kind == "lion":
        strategy: Any = DistributedLionStrategy()
    elif kind == "local":
        strategy = LocalSGDStrategy(every=3)
    else:
        settings: dict[str, Any] = {"evaluate": "mean"} if kind == "mean" else {}
        replica_size = 2 if kind == "replicas" else 1
        strategy = StreamingDiLoCoStrategy(
            sync_every=2, num_fragments=2, replica_size=replica_size, **settings
        )
    trainer = quiet_trainer(
        strategy=strategy,
        devices=size,
        max_steps=STEPS,
        val_check_interval=3,
        callbacks=[recorder, SavesAfterBatches(folder, SAVED)],
    )
    module = Bank(way, kind == "lion")
    with (
        warnings.catch_warnings(record=True) as caught,
        resume_warnings() as said,
        info_messages() as info,
    ):
        warnings.simplefilter("always")
        trainer.fit(module, loader(80, 2), loader(4), **ckpt)
    texts = [str(one.message) for one in caught]
    exact = not said and any(text.startswith(("Resumed", "Restored")) for text in info)
    own = {name: buffer.clone() for name, buffer in module.named_buffers()}
    return recorder.local, own, [t for t in texts if t.startswith("These buffers changed")], exact


WAYS_OF = {kind: WAYS if kind in ("diloco", "lion") else ("grows apart",) for kind in KINDS}
RESUMED = ("grows", "grows apart", "shrinks", "dtype", "comes")  # under DiLoCo and Lion


def play(rank: int, size: int, folder: Path, kind: str) -> dict[str, tuple[Any, Any]]:
    """Return, by way, what a fit saw, and the same of a resume from its middle."""
    found = {}
    for way in WAYS_OF[kind]:
        straight, again = run(kind, way, size, folder / way), None
        if way in RESUMED and len(WAYS_OF[kind]) > 1:
            path = folder / way / f"{SAVED}.ckpt"
            again = run(kind, way, size, folder / f"{way} again", ckpt_path=path)
        found[way] = straight, again
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    found = {}
    for kind in KINDS:
        folder = tmp_path_factory.mktemp(kind)
        found[kind] = run_ranks(play, 4 if kind == "replicas" else 2, folder, folder, kind)
    return found


@pytest.mark.parametrize(("kind", "way"), [(kind, way) for kind in KINDS for way in WAYS_OF[kind]])
def test_each_rank_keeps_its_own(ranks: dict[str, Any], kind: str, way: str) -> None:
    outcomes = [found[way][0] for found in ranks[kind]]
    (first, own, said, _), *others = outcomes
    for local, theirs, _, _ in others:
        assert_same(local[-1], first[-1], "weights")
        assert_same(theirs["mean"], own["mean"])
        assert_same(theirs["same"], own["same"])
    if kind == "local":
        return  # the example exchanges no shapes, and so says nothing
    if way == "comes":
        assert said == []
    else:
        (text,) = said
        assert "'bank' (on rank" in text
        assert "'mean'" not in text
    bank = outcomes[-1][1].get("bank")
    rows = {"grows": 3 + STEPS, "grows apart": 3 + 2 * STEPS, "shrinks": 1, "in place": 4}
    assert (0 if bank is None else len(bank)) == rows.get(way, 0 if way in ("none", "gone") else 3)
    if way in ("shrinks", "dtype", "in place"):
        assert_same(bank, torch.full_like(bank, 7.0), "not averaged")


@pytest.mark.parametrize("kind", ["diloco", "lion"])
@pytest.mark.parametrize("way", RESUMED)
def test_a_resume_has_them_again(ranks: dict[str, Any], kind: str, way: str) -> None:
    for found in ranks[kind]:
        straight, resumed = found[way]
        assert_same(resumed[0], straight[0][SAVED:])
        assert_same(resumed[1], straight[1])
