"""Work beside training: a thread for exchanges of several phases, a CUDA stream for encoding."""

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
    """Runs tasks in the order in which they were given, so that ranks stay in step.

    An exchange may need the result of its first phase to compute the payload of its second one. The
    training thread would have to do that in the middle of the flight; here one thread runs both
    phases. It runs one task at a time, so that the collectives of two fragments in flight have the
    same order on all ranks. The ledger counts the waits of the training thread only.

    After a task has failed, all later ones fail with the same error: the peers took part in
    exchanges that this rank left out, so its next exchange would meet a different one of theirs.

    Args:
        ledger: where the training thread's waits are counted.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._executor: ThreadPoolExecutor | None = None
        self._error: Exception | None = None  # of the first task that failed

    def submit(
        self, task: Callable[[], T], tag: str, staged: Callable[[], object] | None = None
    ) -> Pending[T]:
        """Queue `task`; the result's wait is counted under `tag`.

        The thread starts with the first task, in the process that trains: after every fork.

        Args:
            task: runs in the thread.
            tag: of the ledger.
            staged: returns when this rank's device has computed the payload. The result's `wait`
                waits for that first, uncounted: it is the rank's own work, and the host may be far
                ahead of the device.
        """
        if self._executor is None:
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
        """Let the thread end after its current task; queued tasks are dropped."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._executor = None

    def _run(self, task: Callable[[], T], phase: str) -> T:
        if self._error is not None:
            raise self._error
        try:
            with self._ledger.of_this_thread(phase):
                return task()
        except Exception as error:
            self._error = error
            raise


class Staging:
    """Compute on a side CUDA stream and copy results to the host, without blocking training.

    On other devices the work runs at once. The stream is made with the first work, in the process
    that trains.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def stage(self, work: Callable[[], Tensor], inputs: Sequence[Tensor]) -> Callable[[], Tensor]:
        """Start `work` after everything that is queued on the caller's stream.

        1. The training stream computes `inputs`; the side stream waits for it, the host does not.
        2. The side stream computes `work` and copies the result into pinned memory.
        3. The training stream continues meanwhile; the returned function waits for the copy.

        Args:
            work: reads `inputs` and returns one tensor on their device.
            inputs: everything on the device that `work` reads; may be freed right after this call.

        Returns:
            A function that waits for the result and returns it, in host memory. Any thread may
            call it.
        """
        device = inputs[0].device
        if device.type != "cuda":
            result = work().cpu()
            return lambda: result

        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            host, wait = to_host(work())

        for tensor in inputs:  # their memory is not used again before the side stream has read it
            tensor.record_stream(self._stream)

        def waited_for() -> Tensor:
            wait()
            return host

        return waited_for


def to_host(tensor: Tensor) -> tuple[Tensor, Callable[[], None]]:
    """Copy a tensor into host memory, after everything that is queued on its current stream.

    Returns:
        The copy, pinned if the tensor is on a CUDA device, and a function to call before reading
        it. Any thread may call that.
    """
    if tensor.device.type != "cuda":
        return tensor.cpu(), lambda: None

    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    # of the tensor's device, whichever the thread's is; blocking: the thread that waits sleeps
    arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    arrived.record(torch.cuda.current_stream(tensor.device))

    def wait() -> None:
        with torch.cuda.device(tensor.device):  # a new thread would start a context on device 0
            arrived.synchronize()

    return host, wait
