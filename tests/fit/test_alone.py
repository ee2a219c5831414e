"""A rank that starts a loop, or a fit, alone says whom it waits for, and then times out."""

from __future__ import annotations

import multiprocessing
import os
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from lightning_commfree import StreamingDiLoCoStrategy
from lightning_commfree.comm import job
from tests.fit.models import Tiny, loader, quiet_trainer
from tests.world import free_port, run_ranks

TIMEOUT_S = 3
PORT = free_port()


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


def fit_on_one_of_two_machines(address: str, folder: Path) -> None:
    os.environ.pop("MASTER_ADDR", None)
    os.environ.update({"MASTER_ADDR": address} if address else {})
    os.environ["MASTER_PORT"] = str(PORT)
    job.WARN_AFTER_S = TIMEOUT_S / 6
    strategy = StreamingDiLoCoStrategy(timeout=timedelta(seconds=TIMEOUT_S))
    trainer = quiet_trainer(strategy=strategy, devices=1, num_nodes=2, max_steps=5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(RuntimeError, match=r"imed out|timeout"):
            trainer.fit(Tiny(), loader(20))
    said = [str(one.message) for one in caught if "waiting until" in str(one.message)]
    (folder / "said").write_text("\n".join(said))
    os._exit(0)


@pytest.mark.parametrize("address", ["", "127.0.0.2"])
def test_a_machine_that_waits_for_the_others_says_so(address: str, tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    one = fork.Process(target=fit_on_one_of_two_machines, args=(address, tmp_path))
    one.start()
    one.join(60)
    said = (tmp_path / "said").read_text()
    where = address or "127.0.0.1"
    assert said.startswith(f"Rank 0 is waiting until all 2 ranks have connected to {where}:{PORT}.")
    assert ("used if MASTER_ADDR is not set: set MASTER_ADDR on all machines" in said) == (
        not address
    )
    others = f"run the same command on each machine with MASTER_ADDR={address} MASTER_PORT={PORT}"
    assert (others in said) == bool(address)
