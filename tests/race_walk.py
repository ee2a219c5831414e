"""Data races on a CUDA device, found without one.

`RaceWalk` is a `CudaWalk` whose streams and events feed torch's own CUDA sanitizer, the one behind
`TORCH_CUDA_SANITIZER=1`. It knows which operation reads and writes which memory on which stream,
and what orders streams. So it finds three mistakes:

- two streams use the same memory, one of them writes, and nothing orders them;
- the host uses pinned memory before it has waited for the copy: the host is one more stream;
- memory is given back to its stream's allocator while another stream may still use it.

One walk also finds the races that there would be without a mechanism (`Mechanism`): it changes
neither operations nor their order, so each absence takes a sanitizer of its own and no walk.

The walk runs in one thread, and `tests.cuda_seams.tasks_at_once` lets the tasks of the background
thread run where their result is waited for. So what that thread has waited for, the training thread
has waited for too. Memory is compared by storage: two halves of a tensor count as the same memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum
from traceback import walk_stack
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.cuda import _sanitizer
from torch.cuda._sanitizer import Access, EventHandler, UnsynchronizedAccessError

from lightning_commfree.comm.channel import Pending
from tests.cuda_walk import COPIES, SHAPES, VALUES, CudaWalk, InstantChannel, innermost
from tests.kernels import accesses, tensors_in

TRAINING, HOST = 1, 2  # streams; the sanitizer calls torch's default stream 0


class Mechanism(Enum):
    """What orders streams, the host and the allocator; a walk can do without one of them."""

    WAIT_STREAM = "one stream waits for another"
    WAIT_EVENT = "a stream waits for an event"
    RECORD_STREAM = "a tensor is lent to a stream"
    HOST_WAITS = "the host waits for an event"
    NCCL_WAITS = "a stream waits for NCCL's (`StreamChannel`)"


class Races(EventHandler):
    """Collects the races that a walk would have without one mechanism, or with all of them."""

    def __init__(self, without: Mechanism | None) -> None:
        super().__init__()
        self.without, self.found = without, list[str]()
        self._used: dict[int, dict[int, int]] = {}  # storage -> stream -> its last kernel there
        self._lent: dict[int, set[int]] = {}  # storage -> streams

    def lend(self, storage: int, stream: int) -> None:
        """Note that the allocator waits for `stream` before it reuses a storage."""
        self._lent.setdefault(storage, set()).add(stream)

    def launch(self, func: Any, stream: int, reads: set[int], writes: set[int]) -> None:
        """Note the storages that an operation reads and writes."""
        names: dict[int, list[str]] = {storage: [] for storage in reads | writes}
        found = self._handle_kernel_launch(
            stream, reads - writes, writes, set(), func.name(), names
        )
        for storage in names:
            self._used.setdefault(storage, {})[stream] = self.seq_num
        for error in found:
            assert isinstance(error, UnsynchronizedAccessError)
            both = _described(error.current_access), _described(error.previous_access)
            self.found.append(" is not ordered after ".join(both))

    def give_back(self, storage: int, owner: int) -> None:
        """Note that the pool of the stream `owner` has a storage again."""
        lent, used = self._lent.pop(storage, set()), self._used.pop(storage, {})
        self.tensors_accessed.accesses.pop(storage, None)  # another one may come there
        if owner == HOST:  # pinned memory waits for an event of its own
            return
        for stream, kernel in used.items():
            is_ordered = self.syncs.is_ordered_after(owner, kernel, stream)
            if stream not in (owner, HOST) and stream not in lent and not is_ordered:
                self.found.append(f"{_name(owner)} reuses memory that {_name(stream)} still uses")


class RaceWalk(CudaWalk):
    """A walk that finds races.

    Args:
        without: mechanisms; for each of them the walk also finds the races that its absence makes.
        answers: as in `CudaWalk`.

    Attributes:
        races: by the mechanism that does nothing; `None` has those of the code as it is.
    """

    def __init__(
        self, without: Sequence[Mechanism] = (), answers: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(answers)
        self.races = {mechanism: Races(mechanism) for mechanism in (None, *without)}
        self._stream, self._last = TRAINING, HOST
        self._owner: dict[int, int] = {}  # storage -> the stream in whose pool it is
        self._is_over = False
        for races in self.races.values():
            for stream in (TRAINING, HOST):
                races._handle_stream_creation(stream)

    def __exit__(self, *error: Any) -> None:
        self._is_over = True
        super().__exit__(*error)

    def _with(self, mechanism: Mechanism | None) -> list[Races]:
        """Return the races in whose walk a mechanism does what it is for."""
        return [
            races
            for races in self.races.values()
            if mechanism is None or races.without != mechanism
        ]

    # -- streams and events

    def new_stream(self) -> int:
        """Return a stream on which nothing has run."""
        self._last += 1
        for races in self.races.values():
            races._handle_stream_creation(self._last)
        return self._last

    def record(self, stream: int | None = None) -> int:
        """Return an event at the end of a stream, by default the current one."""
        self._last += 1
        for races in self.races.values():
            races._handle_event_creation(self._last)
            races._handle_event_record(self._last, stream or self._stream)
        return self._last

    def order(self, event: int, stream: int | None = None, by: Mechanism | None = None) -> None:
        """Let a stream, by default the current one, continue after an event."""
        for races in self._with(by):
            races._handle_event_wait(event, stream or self._stream)

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        """In the body operations run on `stream`."""
        before, self._stream = self._stream, stream
        try:
            yield
        finally:
            self._stream = before

    def _host_waits(self, event: int, by: Mechanism | None = Mechanism.HOST_WAITS) -> None:
        for races in self._with(by):
            races._handle_event_synchronization(event)

    def _lend(self, tensor: Tensor, stream: int) -> None:
        for races in self._with(Mechanism.RECORD_STREAM):
            races.lend(_storage(tensor), stream)

    @contextmanager
    def _installed(self) -> Iterator[None]:
        with super()._installed(), ExitStack() as stack:
            for name, value in _streams_of(self).items():
                stack.enter_context(patch.object(torch.cuda, name, value))
            lend = lambda tensor, stream: self._lend(tensor, stream.number)  # noqa: E731
            for kind in (FakeTensor, Tensor):
                stack.enter_context(patch.object(kind, "record_stream", lend, create=True))
            stack.enter_context(patch.object(_sanitizer, "traceback", _TRACEBACK))
            yield

    # -- operations

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func.namespace == "prim":  # autograd's questions, every second call
            return result
        found = accesses(func, args, kwargs or {}, result)
        stream = self._stream if found.on_device else HOST
        for tensor in tensors_in(result):
            self._keep(tensor, self._stream if tensor.device.type == "cuda" else HOST)
        if found.reads or found.writes:
            self._check(func, stream, *({_storage(t) for t in tensors} for tensors in found))
        if found.on_device and _blocks(func, args, kwargs or {}, found.reads, found.writes):
            self._host_waits(self.record(), by=None)
        return result

    def _keep(self, tensor: Tensor, stream: int) -> None:
        """Note who owns a tensor's memory, and be told when it is given back."""
        storage = _storage(tensor)
        if storage not in self._owner:
            self._owner[storage] = stream
            weakref.finalize(tensor.untyped_storage(), self._given_back, storage)

    def _check(self, func: Any, stream: int, reads: set[int], writes: set[int]) -> None:
        if stream != HOST:  # the host launches it after whatever it did before
            self.order(self.record(HOST), stream)
        for races in self.races.values():
            races.launch(func, stream, reads, writes)

    def _given_back(self, storage: int) -> None:
        owner = self._owner.pop(storage)
        for races in self.races.values() if not self._is_over else ():
            races.give_back(storage, owner)


def _streams_of(walk: RaceWalk) -> dict[str, Any]:
    """Return stand-ins for names of `torch.cuda`."""

    class Stream:
        def __init__(self, *_: Any, number: int | None = None) -> None:
            self.number = walk.new_stream() if number is None else number

        def wait_stream(self, other: Stream) -> None:
            walk.order(walk.record(other.number), self.number, by=Mechanism.WAIT_STREAM)

        def wait_event(self, event: Event) -> None:
            walk.order(event.number, self.number, by=Mechanism.WAIT_EVENT)

        def synchronize(self) -> None:
            walk.ask("wait")
            walk._host_waits(walk.record(self.number))

    class Event:
        def __init__(self, **_: Any) -> None:
            self.number = 0

        def record(self, stream: Stream | None = None) -> None:
            self.number = walk.record(None if stream is None else stream.number)

        def query(self) -> bool:
            walk._host_waits(self.number)
            return True

        def synchronize(self) -> None:
            walk.ask("wait")
            self.query()

    return {
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda *_: Stream(number=walk._stream),
        "stream": lambda stream: walk.on(stream.number),
    }


class StreamChannel(InstantChannel):
    """The other ranks, as NCCL reaches them: on a stream of its own; `wait` orders streams."""

    def __init__(self, walk: RaceWalk, size: int = 2, rank: int = 0) -> None:
        super().__init__(size, rank)
        self._walk, self._stream = walk, walk.new_stream()

    def _launch(
        self, work: Callable[[], object], sent: Tensor, received: Tensor
    ) -> Pending[Tensor]:
        self._walk.order(self._walk.record(), self._stream)
        with self._walk.on(self._stream):
            super()._launch(work, sent, received)
        done = self._walk.record(self._stream)

        def resolve(held: tuple[Tensor, ...] = (sent, received)) -> Tensor:
            self._walk.order(done, by=Mechanism.NCCL_WAITS)
            return held[1]

        return Pending(resolve)


def _storage(tensor: Tensor) -> int:
    place: int = tensor.untyped_storage()._cdata
    return place


def _blocks(
    func: Any, args: Any, kwargs: dict[str, Any], reads: list[Tensor], writes: list[Tensor]
) -> bool:
    """Return whether the host waits for an operation on the device."""
    if func not in COPIES:
        return func in VALUES or func in SHAPES
    both = any(t.device.type == "cpu" and t.dim() for t in (*reads, *writes))
    return both and not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))


def _name(stream: int) -> str:
    return {TRAINING: "the training stream", HOST: "the host"}.get(stream, f"stream {stream}")


# What the sanitizer needs of `traceback`; torch's own looks for the source of every frame of every
# operation, which took half of its time.
_TRACEBACK = SimpleNamespace(
    walk_stack=walk_stack,
    StackSummary=SimpleNamespace(
        extract=lambda frames, lookup_lines: [frame.f_code for frame, _ in frames]
    ),
)


def _described(access: Access) -> str:
    codes: Any = reversed(access.stack_trace)
    frames = ((code.co_filename, code.co_name) for code in codes)
    return f"{access.operator} on {_name(access.stream)} in {innermost(frames)}"
