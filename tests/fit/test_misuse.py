"""Bad input gets a sentence: what came, what is legal, what to do."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_commfree import StreamingDiLoCoStrategy
from tests.fit.models import Tiny, loader, quiet_trainer
from tests.world import run_ranks


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (
            {"wire_dtype": "fp8"},
            ValueError,
            "`wire_dtype='fp8'` is not valid. Choose one of 'fp32', 'bf16', 'int8', 'fp4',",
        ),
        (
            {"find_unused_parameters": True},
            TypeError,
            "does not accept the argument `find_unused_parameters`. Supported arguments: `sync_",
        ),
        ({"timeuot": None}, TypeError, "Did you mean `timeout`?"),
        (
            {"replica_size": 2, "overlap_step": 2},
            TypeError,
            "Strategy` does not accept the argument `overlap_step`. Did you mean `overlap_steps`?",
        ),
        ({"replica_size": 2, "bucket_cap_mbb": 2}, TypeError, "Did you mean `bucket_cap_mb`?"),
    ],
)
def test_settings(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        StreamingDiLoCoStrategy(**arguments)


class SteppingInHook(Tiny):
    """Steps its optimizer where no exchange follows."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def on_train_batch_end(self, *_: Any) -> None:
        self.optimizers().step()


class TwoOptimizers(Tiny):
    def configure_optimizers(self) -> Any:
        return [super().configure_optimizers(), torch.optim.SGD(self.parameters(), lr=0.1)]


class Frozen(Tiny):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        self.requires_grad_(False)
        return optimizer


class Synced(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.SyncBatchNorm(6)


class Normed(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)


class Complex(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64))


class OnMeta(Tiny):
    def __init__(self) -> None:
        with torch.device("meta"):
            super().__init__()


class Sharing(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.twin = nn.Parameter(self.head.weight.data)


MODULES: list[tuple[type[Tiny], dict[str, Any], str, str]] = [
    (SteppingInHook, {}, "RuntimeError", "`AdamW` was stepped outside of `training_step`"),
    (TwoOptimizers, {}, "RuntimeError", "multiple optimizers is only supported with manual"),
    (Frozen, {}, "ValueError", "The module has no trainable parameters, so there is nothing to"),
    (Synced, {}, "ValueError", "`StreamingDiLoCoStrategy` does not support SyncBatchNorm"),
    (Complex, {}, "ValueError", "The parameter 'phase' has dtype torch.complex64"),
    (OnMeta, {}, "ValueError", "`inside='ddp'` does not initialize it. Build the model on the CPU"),
    (Sharing, {}, "ValueError", "The parameters 'twin' and 'head.weight' share memory"),
    (
        Tiny,
        {"num_fragments": 7},
        "ValueError",
        "`num_fragments=7` is too large for this model with",
    ),
    (Tiny, {"outer_optimizer": list}, "TypeError", "`outer_optimizer` returned a list"),
]


def fit_misused(rank: int, size: int) -> list[tuple[str, str]]:
    return [attempt(module(), size, **arguments) for module, arguments, *_ in MODULES]


def attempt(
    module: Tiny, size: int, trainer: dict[str, Any] | None = None, **arguments: Any
) -> tuple[str, str]:
    strategy = StreamingDiLoCoStrategy(**{"sync_every": 4, **arguments})
    made = quiet_trainer(strategy=strategy, devices=size, max_epochs=1, **(trainer or {}))
    try:
        made.fit(module, loader(8 * 2 * size))
    except Exception as error:  # noqa: BLE001 - whatever it is, its text is compared
        return type(error).__name__, str(error)
    return "", "no error"


def test_modules(tmp_path: Path) -> None:
    for outcomes in run_ranks(fit_misused, 1, tmp_path):
        for (module, _, error, text), (got_error, got_text) in zip(MODULES, outcomes, strict=True):
            assert text in got_text, module
            assert not error or error == got_error, module


def fit_disagreeing(rank: int, size: int) -> list[tuple[str, str]]:
    wider = Tiny()
    wider.head = nn.Linear(6, 1, bias=True)
    return [
        attempt(Tiny(), size, mix=0.5 if rank else 0.25, overlap_steps=2 if rank == 2 else 1),
        attempt(wider if rank == 1 else Tiny(), size),
        attempt(Tiny(), size, outer_optimizer=partial(torch.optim.SGD, lr=0.4 + 0.1 * rank)),
        attempt(Tiny(), size, {"val_check_interval": "00:00:01:00"}),
        attempt(Normed(), size, {"sync_batchnorm": True}),
        attempt(Tiny(), size),
    ]


def test_disagreement_is_found_by_a_handshake(tmp_path: Path) -> None:
    """Every rank gets the same error, none hangs, and the next fit on the same ranks is not
    disturbed."""
    for settings, shapes, outer, timed, synced, good in run_ranks(fit_disagreeing, 3, tmp_path):
        assert settings[0] == "ValueError"
        assert (
            "mix is 0.5 on rank 1, 0.25 on rank 0; mix is 0.5 on rank 2, 0.25 on rank 0;"
            in settings[1]
        )
        assert "overlap_steps is 2 on rank 2, 1 on rank 0" in settings[1]
        assert "head.bias is float32 [1], trainable on rank 1, absent on rank 0" in shapes[1]
        assert "outer_optimizer is SGD {'lr': 0.5," in outer[1]
        assert timed[0] == "ValueError"
        assert "does not support a time interval as `val_check_interval` (here 60 s)" in timed[1]
        assert synced[0] == "ValueError"
        assert "does not support SyncBatchNorm, which exchanges statistics" in synced[1]
        assert good == ("", "no error")
