"""Ranks tell each other where they are: words arrive, and ranks at different places are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.in_step import TAG, InStep, Place, Where, Word
from lightning_commfree.comm.ledger import Ledger, all_gather_bytes
from tests.world import run_ranks

SIZE = 3
SAID = [Word(), Word(nonfinite=True, stop=True), Word(steps=True, why=3)]


def tell(rank: int, size: int) -> Any:
    ledger = Ledger()
    channel = Channel.open([list(range(size))], rank, ledger)
    in_step = InStep(channel)
    words = in_step.tell(Place(Where.BACKWARD, 0, 4), SAID[rank])
    sent = ledger.bytes_by_tag[TAG]
    apart = Place(Where.EPOCH, 0, -1) if rank == 1 else Place(Where.BACKWARD, 0, 0)
    try:
        in_step.tell(apart, Word())
    except RuntimeError as error:
        text = str(error)
    channel.close()
    return words, sent, text


def test_words_and_places(tmp_path: Path) -> None:
    for words, sent, text in run_ranks(tell, SIZE, tmp_path):
        assert words == SAID
        assert sent == all_gather_bytes(32, SIZE)
        assert text == (
            "The ranks of this fit have gone different ways: rank 1 is at the end of epoch 0,"
            " without a batch; ranks 0, 2 are in batch 0 of epoch 0. Give all ranks equally many"
            " batches, and let all of them skip or stop at the same batch."
        )


def test_one_rank_has_only_itself() -> None:
    ledger = Ledger()
    channel = Channel.open([[0]], 0, ledger)
    assert InStep(channel).tell(Place(Where.EPOCH, 2, 7), SAID[1]) == [SAID[1]]
    assert not ledger.bytes_sent
    assert str(Place(Where.EPOCH, 2, 7)) == "at the end of epoch 2, behind its batch 7"
