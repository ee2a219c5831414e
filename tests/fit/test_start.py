"""Before the first step only weights that differ between ranks are sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_commfree import StreamingDiLoCoStrategy
from lightning_commfree.comm.ledger import all_gather_bytes, broadcast_bytes
from tests.fit.models import Tiny, assert_same, loader, quiet_trainer
from tests.world import run_ranks

SIZE = 2


class Tuned(Tiny):
    """Frozen, but for its head, as a pretrained model is fine-tuned."""

    def __init__(self) -> None:
        super().__init__(width=100)
        self.requires_grad_(False)
        self.head.requires_grad_(True)


def start(rank: int, folder: Path, differing: tuple[str, ...], **fit: Any) -> tuple[int, Any]:
    """Return the bytes that the start sent, and the weights after it."""
    strategy = StreamingDiLoCoStrategy(sync_every=4)
    save = ModelCheckpoint(folder, save_last=True)
    trainer = quiet_trainer(
        strategy=strategy,
        devices=SIZE,
        max_steps=2 if fit else 1,
        enable_checkpointing=True,
        callbacks=[save],
    )
    module = Tuned()
    for name in differing:
        torch.nn.init.constant_(module.get_parameter(name), 0.1 * rank)
    trainer.fit(module, loader(8 * SIZE), **fit)
    weights = {name: p.detach().clone() for name, p in module.named_parameters()}
    return strategy.ledger.bytes_by_tag["start"], weights


def play(rank: int, size: int, folder: Path) -> list[tuple[int, Any]]:
    names = tuple(name for name, _ in Tuned().named_parameters())
    return [
        start(rank, folder / "equal", ()),
        start(rank, folder / "one", ("blocks.2.weight",)),
        start(rank, folder / "resumed", names, ckpt_path=folder / "equal" / "last.ckpt"),
    ]


def test_frozen_weights_travel_neither_at_a_start_nor_at_a_resume(tmp_path: Path) -> None:
    ranks = run_ranks(play, SIZE, tmp_path, tmp_path / "saved")
    parameters = dict(Tuned().named_parameters())
    hashes = all_gather_bytes(8 * len(parameters), SIZE)
    one = broadcast_bytes(parameters["blocks.2.weight"].nbytes, SIZE)
    for rank in ranks:
        assert [num_bytes for num_bytes, _ in rank] == [hashes, hashes + one, hashes]
        assert_same(rank, ranks[0])
    assert not ranks[1][1][1]["blocks.2.weight"].any(), "rank 0 had zeros"
