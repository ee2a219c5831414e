"""The bench of Distributed Lion's step: it times the real thing; its page at toy size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.lion_step import __main__ as lion
from benchmarks.lion_step import operations as ops
from lightning_commfree.lion.vote import PackedDelta

CPU = torch.device("cpu")


def test_pack_vote_and_unpack_give_the_sign_of_the_sum() -> None:
    """Larger than a chunk, so that chunks are put together."""
    numel, workers = 2**17, 3
    values = torch.randn(workers, numel)
    planes = torch.zeros(workers, numel // 8, dtype=torch.uint8)
    for row, plane in zip(values, planes, strict=True):
        ops.pack(row, plane)
    ballots = planes.view(torch.int64)
    shard = ops.vote(ballots, torch.full(ballots.shape[1:], -1))
    assert shard.rest is None
    out = torch.empty(numel)
    ops.unpack(PackedDelta(shard.planes.view(torch.uint8), shard.weights, 1), out)
    assert torch.equal(out, values.sign().sum(0).sign())


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_the_count_it_is_compared_with_finds_the_same_signs(workers: int) -> None:
    ballots, valid = ops.ballots_of_a_share(1000, workers, CPU)
    assert ballots.shape == (workers, -(-1000 // (64 * workers)))
    shard = ops.vote(ballots, valid)
    planes = shard.planes if shard.rest is None else torch.cat([shard.planes, shard.rest[None]])
    weights = shard.weights if shard.rest is None else (*shard.weights, 1)
    deltas = torch.empty(64 * ballots.shape[1])
    PackedDelta(planes.view(torch.uint8), weights, 1).read(0, deltas)
    flags = torch.empty(deltas.shape, dtype=torch.uint8)
    sums = torch.empty(deltas.shape, dtype=torch.int16)
    assert torch.equal(ops.unpack_and_add(ballots, flags, sums), deltas.short())
    assert (shard.rest is None) == (workers % 2 == 1), "a thousand random ballots tie"


def test_the_models_have_the_size_they_are_called_by() -> None:
    sizes = {
        name: sum(torch.Size(shape).numel() for shape in ops.gpt2_shapes(*model))
        for name, model in lion.MODELS.items()
    }
    assert sizes["5.8M"] == pytest.approx(5.8e6, rel=0.01)
    assert sizes["16.7M"] == pytest.approx(2**24, rel=0.01)


def test_every_step_moves_its_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    make = ops.parameters_with_gradients

    def kept(*arguments: object) -> list[torch.nn.Parameter]:
        made.append(make(*arguments))
        return made[-1]

    monkeypatch.setattr(ops, "parameters_with_gradients", kept)
    table = ops.step_operations(ops.gpt2_shapes(*lion.MODELS["toy"]), CPU)
    worker, adamw, fused, alone = made
    before = make(ops.gpt2_shapes(*lion.MODELS["toy"]), CPU)
    table[ops.CAST]()
    assert all(map(torch.equal, worker, before))
    for name in (ops.ADAMW, ops.ADAMW_FUSED, ops.LION, ops.TAKE):
        table[name]()
    for moved in made:
        assert not any(map(torch.equal, moved, before))
    # a first step of Lion alone: decay, then lr times the gradient's sign
    for parameter, old in zip(alone, before, strict=True):
        expected = old * (1 - 1e-5) - 1e-4 * old.grad.sign()
        torch.testing.assert_close(parameter, expected)
    assert torch.equal(adamw[0].grad, before[0].grad)
    assert len(fused) == len(before)


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
    assert "at most AdamW's time: " in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here and is measured")
def test_without_a_gpu_the_page_says_so() -> None:
    assert lion.gpu_lines(1, 100, "toy")[-1] == "Not measured: this machine has no CUDA device."


@pytest.mark.gpu
def test_on_a_gpu_every_operation_has_its_floor() -> None:
    text = "\n".join(lion.gpu_lines(1, 5000, "toy"))
    for name in (*lion.FLOOR_BYTES, ops.vote_name(32)):
        assert f"| {name} | " in text


def test_nothing_to_measure_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        lion.main(["--rounds", "0"])
    assert "numel=16777216 and rounds=0 must both be 1 or more" in capsys.readouterr().err
