"""Muon as the inner optimizer: exact under Streaming DiLoCo, refused where matrices are sharded."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_commfree import (
    DistributedLion,
    DistributedLionStrategy,
    DominoTPStrategy,
    StreamingDiLoCoStrategy,
)
from lightning_commfree.layouts.fsdp import why_unavailable
from recipes.training.muon import MuonAdamW
from recipes.training.optimizer import hidden_matrices
from tests.fit.causal_lm import CausalLM, words
from tests.fit.models import (
    Recorder,
    SavesAfterBatches,
    Tiny,
    assert_same,
    loader,
    quiet_trainer,
    rank_loader,
)
from tests.fit.test_serial_twin import BATCH, STEPS, play
from tests.world import run_ranks

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch before 2.9")

SIZE = 2
MULOCO = partial(torch.optim.SGD, lr=0.7, momentum=0.6, nesterov=True)
SAVED = 9  # steps, in mid-cycle and with a fragment in flight
SETTINGS: dict[str, Any] = {"sync_every": 4, "overlap_steps": 3, "mix": 0.5}


def with_muon(module: Any) -> Any:
    matrices = hidden_matrices(module)
    taken = set(matrices)
    others = [p for p in module.parameters() if p not in taken]
    return MuonAdamW(matrices, others, lr=0.02)


class Muon(Tiny):
    configure_optimizers = with_muon


class SignMuon(Tiny):
    def configure_optimizers(self) -> Any:
        return DistributedLion(self.parameters(), lr=0.01, ns_steps=5)


class MuonLM(CausalLM):
    configure_optimizers = with_muon


def fits(rank: int, size: int, folder: Path) -> Any:
    """Train, resume from the middle, and try every strategy that refuses Muon."""
    strategy = partial(
        StreamingDiLoCoStrategy,
        num_fragments=2,
        wire_dtype="fp32",
        outer_optimizer=MULOCO,
        **SETTINGS,
    )
    runs = []
    for callbacks, path in (
        ([Recorder(), SavesAfterBatches(folder, SAVED)], None),
        ([Recorder()], folder / f"{SAVED}.ckpt"),
    ):
        trainer = quiet_trainer(
            strategy=(used := strategy()), devices=size, max_epochs=1, callbacks=callbacks
        )
        data = rank_loader(STEPS * BATCH * size, BATCH, rank, size)
        trainer.fit(module := Muon(), data, ckpt_path=path)
        final = {name: p.detach().clone() for name, p in module.named_parameters()}
        runs.append((callbacks[0].local, final, used.fragments))

    said = []
    sharded: list[Any] = [(DominoTPStrategy(), MuonLM)]
    if why_unavailable() is None:
        sharded.append((StreamingDiLoCoStrategy(inside="fsdp", replica_size=2), Muon))
        sharded.append((DistributedLionStrategy(inside="fsdp", node_size=2), SignMuon))
    for refuses, kind in (*sharded, (DistributedLionStrategy(), Muon)):
        data = loader(8) if issubclass(kind, Tiny) else torch.utils.data.DataLoader(words(8), 2)
        try:
            quiet_trainer(strategy=refuses, devices=size, max_steps=1).fit(kind(), data)
        except (TypeError, ValueError) as error:
            said.append(str(error))
    return runs, said, len(sharded)


def test_equals_the_serial_twin_resumes_exactly_and_is_refused_for_shards(tmp_path: Path) -> None:
    ranks = run_ranks(fits, SIZE, tmp_path, tmp_path)
    fragments = ranks[0][0][0][2]
    expected, _ = play(SIZE, fragments, **SETTINGS, kind=Muon, make_outer=MULOCO)
    for rank, (runs, said, sharded) in enumerate(ranks):
        (local, final, _), (resumed, resumed_final, _) = runs
        assert_same(local, expected[rank], f"rank {rank}")
        assert_same(resumed, local[SAVED:], f"rank {rank}, resumed")
        assert_same(resumed_final, final)
        for text in said[:sharded]:
            assert re.search(
                r"does not support `(MuonAdamW|DistributedLion)` for a sharded model: Muon", text
            )
        assert "requires `DistributedLion`, but" in said[sharded]
