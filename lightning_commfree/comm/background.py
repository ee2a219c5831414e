"""Run exchanges on a background thread, and encode and decode on a side CUDA stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_commfree.comm.channel import Pending, abort_nccl
from lightning_commfree.comm.ledger import Ledger
from lightning_commfree.comm.liveness import AgreedError, PeerLostError, PeerWatch

DEVICE_TAG = "work on the device"

_POLL_S = 0.0005  # how often a waiting thread polls a device

T = TypeVar("T")


class Background:
    """Background thread that runs exchanges in the order in which they are submitted.

    In a two-phase exchange, the second payload is computed from the result of the first phase.
    Waiting for that result on this thread does not block training. The ledger counts only the time
    that the training thread waits for a result. If a payload leaves from another device than the
    one that holds its values, it is encoded on `staging`, a side CUDA stream.
    """

    def __init__(self, ledger: Ledger, peers: PeerWatch | None = None) -> None:
        self._ledger = ledger
        self.staging = Staging(peers)
        self._executor: ThreadPoolExecutor | None = None
        self._error: Exception | None = None  # the error of the first task that failed

    def submit(
        self,
        task: Callable[[], T],
        tag: str,
        wait_for_payload: Callable[[], object] | None = None,
        device: torch.device | None = None,
    ) -> Pending[T]:
        """Queue `task` on the background thread; return its result, whose wait counts under `tag`.

        `wait` records in the ledger how long it blocks. It excludes time that training does not
        lose to communication: the time that `device`, if it is a CUDA device, needs for work queued
        before the `wait`, and the time spent in `wait_for_payload`, a function that blocks until
        the task's payload has been computed.
        """
        if self._executor is None:  # created on first use: a fork would lose the thread
            # a single thread launches the fragments' collectives in the same order on all ranks
            self._executor = ThreadPoolExecutor(
                1, "exchange", initializer=self._ledger.ignore_waits_of_this_thread
            )
        future = self._executor.submit(self._run, task, self._ledger.phase)

        def resolve() -> T:
            computing = DeviceWork(device) if device and device.type == "cuda" else None
            if wait_for_payload is not None:
                wait_for_payload()
            while computing and not future.done() and not computing.is_completed():
                wait_for([future], _POLL_S)
            with self._ledger.count_wait(tag):
                return future.result()

        return Pending(resolve)

    def close(self) -> None:
        """Let the thread end after its current task, without waiting; discard queued tasks."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._executor = None

    def _run(self, task: Callable[[], T], phase: str) -> T:
        """Run a task in a ledger phase; after one has failed, raise its error and run no other."""
        if self._error is not None:
            # This rank did not launch some of the collectives that its peers launched. Its next
            # collective would be paired with the wrong one on the other ranks.
            raise self._error
        try:
            with self._ledger.thread_phase(phase):
                return task()
        except Exception as error:
            self._error = error
            raise


class Staging:
    """Side CUDA stream, one per device, for encoding, decoding and copies.

    For tensors on other devices, work runs immediately in the calling thread.
    """

    def __init__(self, peers: PeerWatch | None = None) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._peers = peers

    @contextmanager
    def beside_training(self, inputs: Sequence[Tensor]) -> Iterator[None]:
        """Context manager that runs the CUDA work launched in its block on the side stream.

        The work starts after everything already queued on the caller's stream. `inputs` must
        contain every device tensor that was created before the block and is used in it; the caller
        may free these tensors after the block.
        """
        device = inputs[0].device
        if device.type != "cuda":
            yield
            return
        stream = self._side_stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            yield
        # keep the allocator from reusing memory that the side stream is still reading
        for tensor in inputs:
            tensor.record_stream(stream)

    def stage(self, work: Callable[[], Tensor], inputs: Sequence[Tensor]) -> Callable[[], Tensor]:
        """Run `work` on the side stream; return a function that waits for its result on the host.

        `work` runs after everything already queued on the caller's stream, and returns one tensor.
        This call does not block. `inputs` must contain every device tensor that `work` reads; the
        caller may free them after this call. Any thread may call the returned function, which
        returns the result in host memory.
        """
        with self.beside_training(inputs):
            host, wait = to_host(work(), self._peers)

        def result_on_host() -> Tensor:
            wait()
            return host

        return result_on_host

    def upload(
        self, host: Tensor, device: torch.device, work: Callable[[Tensor], tuple[Tensor, ...]]
    ) -> Callable[[], tuple[Tensor, ...]]:
        """Start `work` on a copy of `host` on a device; return a function that returns the results.

        Any thread may call this, and it does not block. The returned function makes its caller's
        current stream wait for the results of `work`, and returns them.
        """
        if device.type != "cuda" or host.device == device:
            results = work(host.to(device))
            return lambda: results

        stream = self._side_stream(device)
        # a new thread's current device is device 0, and it would create a CUDA context there
        with torch.cuda.device(device), torch.cuda.stream(stream):
            results = work(host.pin_memory().to(device, non_blocking=True))
            decoded = torch.cuda.Event()  # type: ignore[no-untyped-call]
            decoded.record(stream)

        def on_current_stream() -> tuple[Tensor, ...]:
            current = torch.cuda.current_stream(device)
            current.wait_event(decoded)
            for tensor in results:
                tensor.record_stream(current)  # the tensor is in the side stream's memory pool
            return results

        return on_current_stream

    def _side_stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:  # created on first use: CUDA does not survive a fork
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]


def to_host(tensor: Tensor, peers: PeerWatch | None = None) -> tuple[Tensor, Callable[[], None]]:
    """Start copying a tensor to the host; return the host tensor, and a function that waits for it.

    The copy comes after all work on the current stream of the tensor's device, and the host tensor
    is pinned if that is a CUDA device. Any thread may call the function, before it reads the
    tensor. It blocks until the copy is complete, or raises a `PeerLostError` if one of `peers` is
    lost: the device may be waiting for that rank in an NCCL collective.
    """
    if tensor.device.type != "cuda":
        return tensor.cpu(), lambda: None

    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    copied: Any = DeviceWork(tensor.device)  # behaves like a `dist.Work`

    def wait() -> None:
        try:
            (peers or PeerWatch()).wait([copied], DEVICE_TAG)
        except (PeerLostError, AgreedError):
            abort_nccl()
            raise

    return host, wait


def on_host(tensor: Tensor, peers: PeerWatch | None = None) -> Tensor:
    """Return a tensor's values in host memory; block until they have been copied.

    Raise a `PeerLostError` if one of `peers` is lost, or an `AgreedError` if another rank
    announced an error that all ranks must raise.
    """
    host, wait = to_host(tensor, peers)
    wait()
    return host


class DeviceWork:
    """Handle for all work queued so far on a CUDA device's current stream.

    It can be passed to `PeerWatch.wait`, like the handle of a collective.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # `blocking` lets a waiting thread sleep instead of spin
        self._end: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        # on the stream of this device, which may not be the thread's current device
        self._end.record(torch.cuda.current_stream(device))

    def is_completed(self) -> bool:
        """Return whether the device has completed the work."""
        with torch.cuda.device(self._device):  # else a new thread creates a context on device 0
            return bool(self._end.query())

    def wait(self, timeout: timedelta | None = None) -> None:
        """Block until the work is complete; raise a `RuntimeError` after `timeout`."""
        if timeout is None:
            with torch.cuda.device(self._device):
                self._end.synchronize()
            return
        end_s = time.monotonic() + timeout.total_seconds()
        while not self.is_completed():
            if time.monotonic() > end_s:
                raise RuntimeError(f"Timed out waiting for the computation on {self._device}.")
            time.sleep(_POLL_S)
