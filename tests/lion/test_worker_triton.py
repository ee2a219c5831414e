"""The Triton kernels, interpreted on a CPU, against torch operations, bit for bit.

Triton has to be told to interpret before it is imported. So one test starts this file again, in a
process of its own: `TRITON_INTERPRET=1 python -m tests.bare tests/lion/test_worker_triton.py`.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_commfree.lion import worker
from lightning_commfree.lion.vote import Average, Majority, Rule
from tests.lion import test_worker_numba
from tests.lion.test_worker_numba import outcome, wide
from tests.lion.training import assert_same

MODULE = "lightning_commfree.lion.worker_triton"
ROOT = Path(__file__).resolve().parents[2]


IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(scope="module")
def kernels() -> Any:
    if find_spec("triton") is None or not IS_INTERPRETED:
        pytest.skip("needs Triton, and TRITON_INTERPRET=1")
    return import_module(MODULE)


@pytest.mark.skipif(IS_INTERPRETED, reason="this is that process")
def test_this_file_passes_in_the_interpreter() -> None:
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed: nothing was interpreted")
    command = [sys.executable, "-m", "tests.bare", __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "1 skipped" in done.stdout, "all but this test"


@pytest.mark.parametrize(
    ("dtype", "rule", "workers"),
    # gradients have the dtype, and the kernel that reads the result sees fp32 alone
    [
        (torch.float32, Majority(), 3),
        (torch.float32, Average(), 3),
        (torch.float32, Average(), 64),
        (torch.bfloat16, Majority(), 3),
        (torch.float16, Average(), 64),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Majority | Average) else str(value),
)
def test_kernels_and_torch_operations_agree_to_the_bit(
    kernels: Any, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, rule: Rule, workers: int
) -> None:
    """With groups that share no setting, and a parameter without a gradient here."""
    shapes = [shape if math.prod(shape) < 2500 else (2500,) for shape in test_worker_numba.SHAPES]
    monkeypatch.setattr(test_worker_numba, "SHAPES", shapes)  # an interpreter takes its time
    if dtype == torch.bfloat16:
        monkeypatch.setattr(test_worker_numba, "wide", without_subnormals)
    for zeros in (False, True):
        monkeypatch.setattr(worker, "_loops", lambda momentum: kernels)
        found = outcome(dtype, rule, workers, zeros)
        monkeypatch.setattr(worker, "_loops", lambda momentum: None)
        assert_same(found, outcome(dtype, rule, workers, zeros))


def without_subnormals(shape: tuple[int, ...], seed: int) -> Tensor:
    """The interpreter gets subnormal numbers in bf16 wrong; `cvt.f32.bf16` of a GPU is exact."""
    values = wide(shape, seed)
    return torch.where(values.abs() < torch.finfo(torch.bfloat16).tiny, values.sign(), values)


def test_trying_out_leaves_the_random_numbers_of_a_fit_alone(kernels: Any) -> None:
    before = torch.get_rng_state()
    kernels.try_out("cpu")
    assert torch.equal(torch.get_rng_state(), before)


def test_kernels_are_tried_out(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.try_out("cpu")
    monkeypatch.setattr(kernels, "update_momentum", lambda *_: None)
    with pytest.raises(RuntimeError, match="its results differ"):
        kernels.try_out("cpu")
