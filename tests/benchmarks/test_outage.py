"""A link that fails for two seconds during a fit: the claim in docs/troubleshooting.md.

By hand, with the constants changed: an outage of 7 s ends a fit with a timeout of 9 s, and does not
end one with 20 s. TCP resends after 0.2, 0.4, 0.8, ... s, so traffic may resume late.
"""

from __future__ import annotations

import time
from datetime import timedelta
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from benchmarks.common.fits import Module, Tokens, gpt2, loader, quiet_trainer
from benchmarks.lab import why_unavailable
from lightning_commfree import DistributedLion, DistributedLionStrategy
from tests.forks import ForkedLab

STEPS, CUT_AT = 40, 10
STEP_S, OUTAGE_S, TIMEOUT_S = 0.05, 2.0, 30.0
VOCABULARY, LENGTH = 64, 16


class Trains(pl.Callback):
    """Slows every step down; writes a file when the fit reaches `CUT_AT`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        time.sleep(STEP_S)
        if trainer.global_step == CUT_AT:
            (self._folder / f"trains_{trainer.global_rank}").touch()


def fit(folder: Path) -> None:
    """Run one rank; print the time and the number of steps at the end."""
    module = Module(gpt2(VOCABULARY, LENGTH, layers=2, width=64), DistributedLion)
    strategy = DistributedLionStrategy(timeout=timedelta(seconds=TIMEOUT_S))
    trainer = quiet_trainer(strategy, 2, STEPS, [Trains(folder)])
    trainer.fit(module, loader(Tokens(VOCABULARY, LENGTH), 2))
    print(time.monotonic(), trainer.global_step)


@pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
def test_a_fit_survives_an_outage_well_below_its_timeout(tmp_path: Path) -> None:
    with ForkedLab(2, rate=None) as lab, ThreadPool(1) as beside:
        job = beside.apply_async(lab.run, ([[fit, tmp_path]] * 2, 150))
        while len(list(tmp_path.iterdir())) < 2 and not job.ready():
            time.sleep(0.02)
        lab.connect(False)
        time.sleep(OUTAGE_S)
        lab.connect(True)
        restored_s = time.monotonic()
        results = job.get()
    for result in results:
        assert result.returncode == 0, result.output
        ended_s, steps = result.output.split()[-2:]
        assert int(steps) == STEPS
        assert float(ended_s) > restored_s, "the fit was over before the link failed"
