"""The wire-format benchmark: a toy run, and the arithmetic of its figures and verdict."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.wire import __main__ as wire
from benchmarks.wire.errors import SCALES, Error, e3m0, grid_errors, wire_errors
from lightning_commfree.diloco import CODECS
from lightning_commfree.diloco.codec import BLOCK, decode_all

TOY = [
    "--sync-every=2",
    "--cycles=2",
    "--batch-size=2",
    "--numel=3000",
    "--rounds=2",
    "data=synthetic",
    "data.corpus.train_characters=20000",
    "data.corpus.validation_characters=4000",
    "tokenizer=bytes",
    "optimizer.warmup_steps=2",
]


def fp4(values: Tensor) -> Tensor:
    payload = torch.empty(CODECS["fp4"].num_bytes(values.numel()), dtype=torch.uint8)
    CODECS["fp4"].encode(values, out=payload)
    return decode_all(CODECS["fp4"], payload, torch.empty_like(values))


def test_the_page_has_every_format_block_and_operation(tmp_path: Path) -> None:
    page = tmp_path / "wire.md"
    wire.main([*TOY, f"cache_dir={tmp_path}/cache", "--page", str(page)])
    text = page.read_text()
    assert "- command: `python -m benchmarks.wire --sync-every=2" in text
    assert "2 outer gradients of 2 fragments" in text
    for name in CODECS:
        assert f"\n| {name} | " in text
    for name in wire.TIMED:
        assert f"\n| {name} decode | " in text
    for block in (32, 1024):
        assert text.count(f"\n| blocks of {block} | ") == 2
    assert "\n| copy | " in text
    assert f"Chosen: blocks of {BLOCK}, one byte of scale" in text


def test_the_chosen_variant_equals_the_format_bit_for_bit() -> None:
    values = torch.randn(10 * BLOCK + 7) * 10.0 ** torch.randint(-3, 3, (10 * BLOCK + 7,))
    values[::5] = 0.0
    _, nearest = SCALES[wire.NEAREST]
    simulated = e3m0(values, BLOCK, nearest)
    assert torch.equal(simulated.view(torch.int32), fp4(values).view(torch.int32))
    errors = grid_errors([values])[BLOCK, wire.NEAREST]
    assert errors.relative_rms == wire_errors([values])["fp4"].relative_rms


@pytest.mark.parametrize(
    ("other", "words"),
    [(0.19, "the choice stands"), (0.1, "the figures do not support the choice")],
)
def test_the_verdict_follows_from_the_figures(other: float, words: str) -> None:
    grid = {
        (BLOCK, wire.NEAREST): Error(4.0, 0.2, 1.0, 0.0),
        (64, "fp16 largest"): Error(4.2, other, 1.0, 0.0),
        (64, "fp32, least error of 24"): Error(4.4, 0.05, 1.0, 0.0),
        (32, "fp32 largest"): Error(5.0, 0.01, 1.0, 0.0),  # too many bits
    }
    sentence = wire.verdict(grid)
    assert words in sentence
    saved = f"{100 * (1 - other / 0.2):.1f}"
    assert f"without a search is {other:.4f} ({saved} % less for 5.0 % more bytes" in sentence
    assert "the least of all is 0.0500 (75.0 % less for 10.0 % more bytes; blocks of 64" in sentence
