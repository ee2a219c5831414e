"""What a walk without a device puts in the place of threads and compiled loops.

A walk is of one thread: its modes do not reach another one. So `tasks_at_once` runs what the thread
beside the training would run where the training thread waits for it, as the step "thread": what is
asked there holds up nobody but that thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from lightning_commfree.comm.background import Background
from lightning_commfree.comm.channel import Pending
from lightning_commfree.diloco import codec, quantize
from lightning_commfree.lion import worker
from tests.cuda_walk import CudaWalk


def tasks_at_once(patch: pytest.MonkeyPatch, walk: CudaWalk) -> None:
    """Let no thread start: a task runs where its result is waited for, as the step "thread"."""

    def submit(
        _: Background,
        task: Callable[[], Any],
        tag: str,
        staged: Callable[[], object] | None = None,
        device: torch.device | None = None,
    ) -> Pending[Any]:
        def resolve() -> Any:
            if staged is not None:
                staged()
            with walk.during("thread"):
                return task()

        return Pending(resolve)

    patch.setattr(Background, "submit", submit)


def no_compiled_loops(patch: pytest.MonkeyPatch) -> None:
    """Let codes on the CPU be made by torch operations; what they keep is forgotten afterwards."""
    patch.setattr(codec, "_loops", lambda device: None)
    patch.setattr(quantize, "_of_thread", threading.local())


def memory(patch: pytest.MonkeyPatch) -> None:
    """Let tensors without memory have an address, alike in one storage, and be lent to a stream."""

    def data_ptr(tensor: FakeTensor) -> int:
        start: int = tensor.untyped_storage()._cdata
        return start + tensor.storage_offset() * tensor.element_size()

    patch.setattr(worker, "load_kernels", lambda module, users: None)  # Triton's need addresses
    patch.setattr(FakeTensor, "data_ptr", data_ptr, raising=False)
    patch.setattr(FakeTensor, "record_stream", lambda tensor, stream: None, raising=False)
