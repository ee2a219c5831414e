"""Work beside the training, whose result is wanted in host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class Staging:
    """Computes on a CUDA stream of its own and brings results down, without anybody waiting.

    Elsewhere there is no such stream: work is done at once. The stream is made with the first work,
    in the process that trains.
    """

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def stage(self, work: Callable[[], Tensor], inputs: Sequence[Tensor]) -> Callable[[], Tensor]:
        """Start `work`, behind all that the caller's stream has been given so far.

        1. The training stream computes `inputs`; the side stream waits for it, the host does not.
        2. The side stream computes `work` and copies the result into pinned memory.
        3. The training stream goes on meanwhile; whoever wants the result waits for the copy.

        Args:
            work: reads `inputs` and returns one tensor on their device.
            inputs: all of it that lives on the device; may be given back right after this call.

        Returns:
            What waits for the result and returns it, in host memory. Any thread may call it.
        """
        device = inputs[0].device
        if device.type != "cuda":
            result = work().cpu()
            return lambda: result
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            on_device = work()
            host = torch.empty(on_device.shape, dtype=on_device.dtype, pin_memory=True)
            host.copy_(on_device, non_blocking=True)
            # blocking: the thread that waits sleeps
            arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            arrived.record()
        for tensor in inputs:  # their memory is not used again before the side stream has read it
            tensor.record_stream(self._stream)

        def wait() -> Tensor:
            with torch.cuda.device(device):  # a new thread would start a context on device 0
                arrived.synchronize()
            return host

        return wait
