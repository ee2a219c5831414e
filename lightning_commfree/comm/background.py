"""Run work outside the training thread: exchanges on a thread, encoding on a CUDA stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from lightning_commfree.comm.channel import Pending
from lightning_commfree.comm.ledger import Ledger

T = TypeVar("T")


class Background:
    """Background thread that runs exchanges in the order in which they are submitted.

    A two-phase exchange computes its second payload from the result of its first phase. Computing
    it on this thread keeps the training thread free. The ledger counts only the time that the
    training thread waits.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._executor: ThreadPoolExecutor | None = None
        self._error: Exception | None = None  # of the first task that failed

    def submit(
        self, task: Callable[[], T], tag: str, staged: Callable[[], object] | None = None
    ) -> Pending[T]:
        """Queue `task`; the ledger counts the time spent waiting for its result under `tag`.

        `staged` blocks until this rank's device has computed the payload. The result's `wait` calls
        it first, and the ledger does not count this time: the host may be far ahead of the device,
        so it is computation time.
        """
        if self._executor is None:  # created on first use: a fork would lose the thread
            # A single thread: the collectives of two fragments keep their order on all ranks.
            self._executor = ThreadPoolExecutor(
                1, "exchange", initializer=self._ledger.ignore_waits_of_this_thread
            )
        future = self._executor.submit(self._run, task, self._ledger.phase)

        def resolve() -> T:
            if staged is not None:
                staged()
            with self._ledger.count_wait(tag):
                return future.result()

        return Pending(resolve)

    def close(self) -> None:
        """Stop the thread after its current task, and discard queued tasks."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._executor = None

    def _run(self, task: Callable[[], T], phase: str) -> T:
        if self._error is not None:
            # This rank has missed collectives that its peers took part in. Its next one would be
            # paired with the wrong one of theirs.
            raise self._error
        try:
            with self._ledger.thread_phase(phase):
                return task()
        except Exception as error:
            self._error = error
            raise


class Staging:
    """Side CUDA stream for encoding and copies to the host; other devices run work immediately."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def stage(self, work: Callable[[], Tensor], inputs: Sequence[Tensor]) -> Callable[[], Tensor]:
        """Start `work` after everything queued on the caller's stream, without blocking the host.

        Args:
            work: reads `inputs` and returns one tensor on their device.
            inputs: all device tensors that `work` reads; the caller may free them after this call.

        Returns:
            A function that waits for the result and returns it in host memory. It may be called
            from any thread.
        """
        device = inputs[0].device
        if device.type != "cuda":
            result = work().cpu()
            return lambda: result

        if self._stream is None:  # created on first use: CUDA does not survive a fork
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            host, wait = to_host(work())

        # keep the allocator from reusing memory that the side stream still reads
        for tensor in inputs:
            tensor.record_stream(self._stream)

        def result_on_host() -> Tensor:
            wait()
            return host

        return result_on_host


def to_host(tensor: Tensor) -> tuple[Tensor, Callable[[], None]]:
    """Start a copy to host memory, after everything queued on the device's current stream.

    Returns:
        The copy (pinned if the tensor is on a CUDA device), and a function to call before reading
        it, from any thread.
    """
    if tensor.device.type != "cuda":
        return tensor.cpu(), lambda: None

    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    # on the stream of the tensor's device, which may not be this thread's current device;
    # `blocking` lets the waiting thread sleep instead of spin
    arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    arrived.record(torch.cuda.current_stream(tensor.device))

    def wait() -> None:
        with torch.cuda.device(tensor.device):  # else a new thread opens a context on device 0
            arrived.synchronize()

    return host, wait
