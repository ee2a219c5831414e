"""The example of a codec with a residual: without the residual it does not converge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from examples.sign_codec import SignCodec
from lightning_commfree import StreamingDiLoCoStrategy
from lightning_commfree.diloco import Codec, StreamingDiLoCo, split_into_fragments
from lightning_commfree.diloco.codec import decode_all
from lightning_commfree.diloco.exchange import FragmentExchange
from lightning_commfree.diloco.settings import DiLoCoSettings
from lightning_commfree.diloco.transport import FixedTransport
from tests.diloco.training import AVERAGING, DEFAULTS
from tests.fit.models import Recorder, Tiny, quiet_trainer, rank_loader
from tests.lion.threads import ThreadChannel, in_threads
from tests.world import run_ranks

ROOT = Path(__file__).parents[2]
REPLICAS, STEPS = 3, 300
FEW = STEPS // 2  # enough where no sign is sent, and to see a mistake


class Forgetful(SignCodec):
    """The likely mistake: what the signs lose is lost."""

    error_feedback = 0.0


def test_it_is_as_short_as_the_page_says() -> None:
    assert isinstance(SignCodec(), Codec)
    assert len((ROOT / "examples" / "sign_codec.py").read_text().splitlines()) < 60


@pytest.mark.parametrize("numel", [0, 1, 7, 8, 9, 1000])
def test_payload_and_residual_are_the_values(numel: int) -> None:
    values = torch.randn(numel)
    payload = torch.zeros(SignCodec().num_bytes(numel), dtype=torch.uint8)
    residual, decoded = torch.full((numel,), torch.nan), torch.empty(numel)
    SignCodec().encode(values, payload, residual)
    decode_all(SignCodec(), payload, decoded)
    assert torch.equal(decoded.sign(), values.sign())
    torch.testing.assert_close(decoded + residual, values)


class Point(nn.Module):
    def __init__(self, numel: int) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(numel))


def targets(numel: int) -> Tensor:
    """Of unequal magnitudes, so that at the mean the signs of the gradients do not cancel."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(REPLICAS, numel, generator=generator) ** 3


def distance(codec: Any, numel: int, steps: int = STEPS) -> tuple[float, bool]:
    """Let every replica go a tenth of the way to its own target, and average after each step.

    Return how far the replicas are from the mean of the targets, the mean over the last steps, and
    whether they took two phases.
    """

    def replica(channel: ThreadChannel) -> tuple[Tensor, bool]:
        module, target = Point(numel), targets(numel)[channel.rank]
        changes = {"sync_every": 1, "overlap_steps": 0, "mix": 0.0, "outer_optimizer": AVERAGING}
        settings = DiLoCoSettings(**{**DEFAULTS, **changes, "wire_dtype": codec})
        fragments = split_into_fragments(module, 1, "strided")
        diloco = StreamingDiLoCo(module, fragments, settings, FixedTransport(channel))
        seen = []
        for _ in range(steps):
            with torch.no_grad():
                module.x += 0.1 * (target - module.x)
            diloco.after_step()
            seen.append(module.x.detach().clone())
        two_phase = diloco.transport.exchange(0).route.two_phase
        diloco.close()
        return torch.stack(seen[steps // 2 :]).mean(dim=0), two_phase

    (found, two_phase), *others = in_threads(REPLICAS, replica)
    assert all(torch.equal(found, other) for other, _ in others), "bit-identical on all replicas"
    return float((found - targets(numel).mean(dim=0)).abs().mean()), two_phase


@pytest.mark.parametrize(("numel", "two_phase"), [(40, False), (4000, True)])
def test_the_residual_is_what_makes_it_converge(numel: int, two_phase: bool) -> None:
    exact, took = distance("fp32", numel, FEW)
    with_residual, same = distance(SignCodec(), numel)
    without, _ = distance(Forgetful(), numel, FEW)
    assert took == same == two_phase
    assert exact < 1e-3
    assert with_residual < 0.1
    assert without > 0.5, "the likely mistake is out of tolerance"


def test_the_owner_of_a_shard_makes_up_for_the_second_rounding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FragmentExchange, "_add_errors", lambda self, arrived, *_: arrived)
    without, _ = distance(SignCodec(), 4000, FEW)
    assert without > 0.3, "with it, below 0.1 in the test above"


def fit(rank: int, size: int, folder: Path) -> Any:
    def trained(resume: Path | None) -> list[dict[str, Tensor]]:
        strategy = StreamingDiLoCoStrategy(sync_every=4, num_fragments=1, wire_dtype=SignCodec())
        recorder = Recorder()
        saver = [ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=1)]
        trainer = quiet_trainer(
            strategy=strategy,
            devices=size,
            max_steps=15,
            callbacks=[recorder, *(saver if resume is None else [])],
            enable_checkpointing=resume is None,
        )
        trainer.fit(Tiny(), rank_loader(80, 2, rank, size), ckpt_path=resume)
        return recorder.local

    straight = trained(None)
    return straight, [trained(folder / f"step={step}.ckpt") for step in (8, 9, 10)]


def test_a_fit_with_it_is_resumed_exactly(tmp_path: Path) -> None:
    """Before, in and after the flight of the second exchange: residuals are in the checkpoint."""
    for straight, resumed in run_ranks(fit, 2, tmp_path, tmp_path / "saved"):
        for states, step in zip(resumed, (8, 9, 10), strict=True):
            for got, wanted in zip(states, straight[step:], strict=True):
                assert all(torch.equal(got[name], wanted[name]) for name in wanted), step
