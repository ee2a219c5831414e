"""The example of a sparse codec: without the residual it does not converge."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from examples.topk_codec import CHUNK, KEPT, TopKCodec
from lightning_commfree.diloco import Codec
from lightning_commfree.diloco.codec import chunks, decode_all
from tests.examples.test_sign_codec import FEW, distance

ROOT = Path(__file__).parents[2]


class Forgetful(TopKCodec):
    """The likely mistake: what is not sent is lost."""

    error_feedback = 0.0


def test_it_is_as_short_as_the_page_says() -> None:
    assert isinstance(TopKCodec(), Codec)
    assert len((ROOT / "examples" / "topk_codec.py").read_text().splitlines()) < 70


@pytest.mark.parametrize("numel", [0, 1, KEPT + 1, CHUNK, CHUNK + 1, 3 * CHUNK - 5])
def test_the_largest_values_are_sent_and_the_rest_is_the_residual(
    numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec, values = TopKCodec(), torch.randn(numel).bfloat16().float()
    payload = torch.zeros(codec.num_bytes(numel), dtype=torch.uint8)
    residual = torch.full((numel,), torch.nan)
    codec.encode(values, payload, residual)
    decoded = decode_all(codec, payload, torch.full((numel,), torch.nan))
    assert torch.equal(decoded + residual, values)
    for start in range(0, numel, CHUNK):
        sent, rest = (part[start : start + CHUNK] for part in (decoded, residual))
        assert sent.count_nonzero() == min(KEPT, len(sent))
        assert sent[sent != 0].abs().min() >= rest.abs().max()
    # in pieces that begin and end within a chunk
    monkeypatch.setattr("lightning_commfree.diloco.codec._CPU_CHUNK", 1024)
    assert numel < 2048 or len(list(chunks(numel, values.device))) > 1
    assert torch.equal(decode_all(codec, payload, torch.empty(numel)), decoded)


@pytest.mark.parametrize(("numel", "two_phase"), [(4000, False), (40_000, True)])
def test_the_residual_is_what_makes_it_converge(numel: int, two_phase: bool) -> None:
    with_residual, took = distance(TopKCodec(), numel)
    without, _ = distance(Forgetful(), numel, FEW)
    assert took == two_phase
    assert with_residual < 0.5
    assert without > 0.8, "the likely mistake is out of tolerance"
