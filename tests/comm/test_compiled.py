"""Compiled loops and kernels: what is said where they cannot be used; trying them draws nothing."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lightning_commfree.comm.compiled import load_kernels
from lightning_commfree.diloco import quantize_numba
from lightning_commfree.diloco.codec import CODECS, warm_up
from lightning_commfree.lion import worker_numba

MODULE = "lightning_commfree.lion.worker_triton"
COMPILER_ERROR = "at 2:14:\ndef _cast(\n    gradient: Any,\n              ^\nNameError('no Any')"


def broken() -> None:
    raise RuntimeError(COMPILER_ERROR)


@pytest.mark.parametrize(
    ("is_installed", "why"),
    [
        (False, "because Triton is not installed (pip install triton)."),
        (True, "because Triton cannot be used (RuntimeError: at 2:14: def _cast( gradient: Any,"),
    ],
)
def test_a_gpu_without_kernels_is_told_what_it_costs(
    is_installed: bool,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    if is_installed:
        monkeypatch.setitem(sys.modules, MODULE, type(sys)(MODULE))
        monkeypatch.setattr(sys.modules[MODULE], "try_out", broken, raising=False)
    load_kernels.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert load_kernels(MODULE, "Lion's steps") is None
    load_kernels.cache_clear()
    [record] = caplog.records
    text = record.getMessage()
    assert text.startswith("Lion's steps are slower on this GPU than they could be: they use torch")
    assert "several times as much memory (same results)" in text
    assert why in text
    assert "\n" not in text


def generators() -> tuple[Any, ...]:
    """States of all generators that a fit may use by default, without a device."""
    _, numbers, *places = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), numbers.tolist(), places


CPU = torch.device("cpu")
TRIALS: dict[str, Callable[[], object]] = {
    "loops of Lion": worker_numba.try_out,
    "loops of codecs": quantize_numba.try_out,
    **{
        f"warm-up of {name}": lambda codec=codec: warm_up(codec, CPU)
        for name, codec in CODECS.items()
    },
}


@pytest.mark.parametrize("name", TRIALS)
def test_trying_out_draws_no_random_numbers(name: str) -> None:
    """A resume restores the generators; what runs afterwards, once in a process, must not draw."""
    before = generators()
    TRIALS[name]()
    assert generators() == before
    torch.rand(1)
    assert generators() != before
