"""A rank that starts a loop alone names the ranks it waits for, and then times out."""

from __future__ import annotations

import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from lightning_commfree import StreamingDiLoCoStrategy
from lightning_commfree.comm import job
from tests.fit.models import Tiny, loader, quiet_trainer
from tests.world import run_ranks

TIMEOUT_S = 3


def validate_on_rank_0(rank: int, size: int) -> Any:
    strategy = StreamingDiLoCoStrategy(sync_every=4, timeout=timedelta(seconds=TIMEOUT_S))
    trainer, module = quiet_trainer(strategy=strategy, devices=size, max_steps=5), Tiny()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, loader(200))
        in_fit = [str(w.message) for w in caught]
        if rank > 0:
            return in_fit
        job.WARN_AFTER_S = TIMEOUT_S / 6
        with pytest.raises(RuntimeError) as error:
            trainer.validate(module, loader(8), verbose=False)
    said = [str(w.message) for w in caught if "waiting for the other ranks" in str(w.message)]
    return in_fit, said, str(error.value)


def test_a_validation_on_one_rank_names_the_missing_ranks(tmp_path: Path) -> None:
    (in_fit, said, error), in_other = run_ranks(validate_on_rank_0, 2, tmp_path)
    advice = (
        "`fit`, `validate`, `test` and `predict` must be called on all ranks, not under"
        " `if rank == 0:`. The `timeout` is 3 s."
    )
    assert said == [f"This rank is waiting for the other ranks to start. {advice}"]
    assert error == f"Timed out waiting for the other ranks to start: {advice}"
    assert not any("waiting for the other ranks" in text for text in in_fit + in_other)
