"""The benchmark of Distributed Lion's step: its operations are correct; a toy run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.lion_step import __main__ as lion
from benchmarks.lion_step import operations as ops
from lightning_commfree.lion.vote import PackedDelta

CPU = torch.device("cpu")


@pytest.mark.parametrize("workers", [2, 3])
def test_the_compared_count_finds_the_same_signs(workers: int) -> None:
    ballots, valid = ops.ballots_of_a_share(1000, workers, CPU)
    assert ballots.shape == (workers, -(-1000 // (64 * workers)))
    shard = ops.vote(ballots, valid)
    planes = shard.planes if shard.ties is None else torch.cat([shard.planes, shard.ties[None]])
    weights = shard.weights if shard.ties is None else (*shard.weights, 1)
    deltas = torch.empty(64 * ballots.shape[1])
    PackedDelta(planes.view(torch.uint8), weights, 1).read(0, deltas)
    flags = torch.empty(deltas.shape, dtype=torch.uint8)
    sums = torch.empty(deltas.shape, dtype=torch.int16)
    assert torch.equal(ops.unpack_and_add(ballots, flags, sums), deltas.short())
    assert (shard.ties is None) == (workers % 2 == 1), "a thousand random ballots tie"


def test_the_page_has_every_operation(tmp_path: Path) -> None:
    page = tmp_path / "lion.md"
    words = ["--numel", "5000", "--rounds", "1", "--models", "toy", "--page", str(page)]
    lion.main(words)
    text = page.read_text()
    assert "- command: `python -m benchmarks.lion_step --numel 5000 --rounds 1" in text
    for name in (ops.COPY, ops.PACKBITS, ops.PACK, ops.UNPACK, ops.ADAMW, ops.LION, ops.WORKER):
        assert f"| {name} | " in text
    for n in lion.WORKERS:
        assert f"| {n} | " in text
    assert "takes at most AdamW's time: " in text


@pytest.mark.gpu
def test_on_a_gpu_every_operation_has_a_floor() -> None:
    text = "\n".join(lion.gpu_lines(1, 5000, "toy"))
    for name in (*lion.FLOOR_BYTES, ops.vote_name(32)):
        assert f"| {name} | " in text
