"""The Triton kernels, interpreted on a CPU, against torch operations, bit for bit.

They need Triton, which comes with torch for CUDA (`pip install triton` beside torch for the CPU),
and to be asked for: `TRITON_INTERPRET=1 pytest tests/lion/test_worker_triton.py`.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from lightning_commfree.comm.compiled import load_kernels
from lightning_commfree.lion import worker
from lightning_commfree.lion.vote import Average, Majority, Rule
from tests.lion import test_worker_numba
from tests.lion.test_worker_numba import outcome
from tests.lion.training import assert_same

MODULE = "lightning_commfree.lion.worker_triton"


@pytest.fixture(scope="module")
def kernels() -> Any:
    # read when Triton is imported, which another test may have done
    if find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs Triton, and TRITON_INTERPRET=1")
    return import_module(MODULE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("rule", "workers"),
    [(Majority(), 3), (Average(), 3), (Average(), 64)],
    ids=["majority-3", "average-3", "average-64"],
)
def test_kernels_and_torch_operations_agree_to_the_bit(
    kernels: Any, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, rule: Rule, workers: int
) -> None:
    """With groups that share no setting, and a parameter without a gradient here."""
    shapes = [shape if math.prod(shape) < 2500 else (2500,) for shape in test_worker_numba.SHAPES]
    monkeypatch.setattr(test_worker_numba, "SHAPES", shapes)  # an interpreter takes its time
    for zeros in (False, True):
        monkeypatch.setattr(worker, "_loops", lambda momentum: kernels)
        found = outcome(dtype, rule, workers, zeros)
        monkeypatch.setattr(worker, "_loops", lambda momentum: None)
        assert_same(found, outcome(dtype, rule, workers, zeros))


def test_kernels_are_tried_out(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.try_out("cpu")
    monkeypatch.setattr(kernels, "update_momentum", lambda *_: None)
    with pytest.raises(RuntimeError, match="its results differ"):
        kernels.try_out("cpu")


@pytest.mark.parametrize("installed", [False, True])
def test_without_kernels_that_work_there_are_none(
    installed: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    if installed:
        monkeypatch.setitem(sys.modules, MODULE, type(sys)(MODULE))
        monkeypatch.setattr(sys.modules[MODULE], "try_out", broken, raising=False)
    load_kernels.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert load_kernels(MODULE, "Lion's steps") is None
    load_kernels.cache_clear()
    expected = "Triton cannot be used (RuntimeError: no compiler): Lion's steps use torch"
    assert (expected in caplog.text) == installed
    assert bool(caplog.records) == installed
