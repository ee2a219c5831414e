"""NaN and Inf end a Domino fit on all ranks, before they are stepped with or saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_commfree import DominoTPStrategy
from tests.fit.causal_lm import CausalLM, words
from tests.fit.models import Recorder, quiet_trainer
from tests.world import run_ranks

SIZE = 4
GOOD = 2  # steps before the one that goes wrong
STEPS = 5


class Spoilt(CausalLM):
    """In one batch the ranks `guilty` multiply their loss, or an element of one gradient.

    Args:
        guilty: ranks.
        factor: of what they have.
        part: it is the gradient of the first MLP's weights, of which each rank has a part.
        batch: counted from 0 over the fit.
    """

    def __init__(self, guilty: tuple[int, ...], factor: float, part: bool, batch: int) -> None:
        super().__init__()
        self.guilty, self.factor, self.part, self.batch = guilty, factor, part, batch
        self.batches = 0

    def on_train_start(self) -> None:
        if self.part:
            weight = self.wrapped["lm"].transformer.h[0].mlp.c_fc.weight
            weight.register_hook(self._spoil)

    def _spoil(self, gradient: Tensor) -> Tensor:
        if not self._now():
            return gradient
        spoilt = gradient.clone()
        spoilt[0, 0] = self.factor
        return spoilt

    def _now(self) -> bool:
        return self.batches == self.batch + 1 and self.global_rank in self.guilty

    def training_step(self, batch: Any, i: int) -> Tensor:
        self.batches += 1
        loss = super().training_step(batch, i)
        return loss * self.factor if self._now() and not self.part else loss


class Late(CausalLM):
    """On rank 1 a hook spoils a gradient that backward has left finite."""

    def on_before_optimizer_step(self, _: Any) -> None:
        if self.global_rank == 1 and self.trainer.global_step == GOOD:
            self.wrapped["lm"].transformer.h[0].mlp.c_fc.weight.grad[0, 0] = INF


NAN, INF = float("nan"), float("inf")
CASES: dict[str, tuple[Any, dict[str, Any]]] = {  # how it is spoilt, and what else `fit` takes
    "a group's loss": (((2, 3), NAN, False, GOOD), {"group": 2}),
    "a rank's part": (((1,), INF, True, GOOD), {"group": 4}),
    # the first of the two batches of a step
    "accumulated": (((0, 1), NAN, False, 2 * GOOD), {"group": 2, "accumulate_grad_batches": 2}),
    "clipped": (((3,), NAN, True, GOOD), {"group": 2, "gradient_clip_val": 1.0}),
    "large": (((2, 3), 1e30, False, GOOD), {"group": 2}),  # its square is Inf in fp32
}


def fit(
    folder: Path, module: CausalLM, group: int, **kwargs: Any
) -> tuple[str, int, dict[str, Tensor]]:
    recorder = Recorder()
    trainer = quiet_trainer(
        strategy=DominoTPStrategy(group),
        devices=SIZE,
        max_steps=STEPS,
        enable_checkpointing=True,
        callbacks=[
            recorder,
            ModelCheckpoint(folder, "kept", every_n_train_steps=1, enable_version_counter=False),
        ],
        **kwargs,
    )
    try:
        trainer.fit(module, DataLoader(words(16 * SIZE), batch_size=2))
    except RuntimeError as error:
        return str(error), trainer.global_step, recorder.local[-1]
    return "", trainer.global_step, recorder.local[-1]


def play(rank: int, size: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {
        name: fit(folder / name, Spoilt(*spoilt), **kwargs)
        for name, (spoilt, kwargs) in CASES.items()
    }
    return {**found, "late": fit(folder / "late", Late(), 2)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nonfinite")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(play, SIZE, folder, folder)


def named(text: str) -> set[int]:
    return {rank for rank in range(SIZE) if f"rank {rank} (tensor group" in text}


@pytest.mark.parametrize("case", [case for case in CASES if case != "large"])
def test_all_ranks_stop_before_the_step_and_name_the_ranks_at_fault(
    ranks: list[Any], folder: Path, case: str
) -> None:
    (guilty, _, part, _), kwargs = CASES[case]
    texts = {found[case][0] for found in ranks}
    assert len(texts) == 1, "the same on all ranks"
    (text,) = texts
    assert text.startswith(f"Gradients are not finite before step {GOOD + 1}: rank {guilty[0]} (")
    assert named(text) == set(guilty)
    has = f"rank {guilty[0]} (tensor group {guilty[0] // kwargs['group']}) has"
    if part:
        kind = "Inf" if case == "a rank's part" else "NaN"
        weight = "wrapped.lm.transformer.h.0.mlp.c_fc.weight"
        assert f"{has} {kind} in the gradients of '{weight}'." in text
    else:
        loss = "" if case == "accumulated" else "a loss of nan and "
        assert f"{has} {loss}NaN in the gradients of 'wrapped.lm." in text
    assert "no parameter was changed" in text
    for found in ranks:
        _, steps, weights = found[case]
        assert steps == GOOD
        assert all(t.isfinite().all() for t in weights.values())
    saved = torch.load(folder / case / "kept.ckpt", weights_only=True)
    assert saved["global_step"] == GOOD
    assert all(tensor.isfinite().all() for tensor in saved["state_dict"].values())


def test_a_norm_that_overflows_does_not_stop_the_fit(ranks: list[Any]) -> None:
    for found in ranks:
        text, steps, weights = found["large"]
        assert (text, steps) == ("", STEPS)
        assert all(t.isfinite().all() for t in weights.values())


def test_weights_spoilt_after_backward_are_not_saved(ranks: list[Any], folder: Path) -> None:
    for found in ranks:
        text, steps, _ = found["late"]
        assert steps == GOOD + 1
        assert text.startswith(
            f"Weights are not finite after step {GOOD + 1}: rank 1 (tensor group 0) has NaN in"
            " 'wrapped.lm.transformer.h.0.mlp.c_fc.weight'. No checkpoint was written;"
        )
    saved = torch.load(folder / "late" / "kept.ckpt", weights_only=True)
    assert saved["global_step"] == GOOD
