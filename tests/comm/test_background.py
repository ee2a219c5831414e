"""The thread beside the training: one job after the other, until one fails."""

from __future__ import annotations

import math
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_commfree.comm import background as module
from lightning_commfree.comm.background import Background, Staging, to_host
from lightning_commfree.comm.ledger import Ledger
from lightning_commfree.comm.liveness import PeerLostError
from tests.comm.watches import fall_silent, watches

CUDA = torch.device("cuda", 1)


def test_after_a_failure_nothing_is_exchanged_any_more() -> None:
    """Its peers took part in what failed here: the next exchange would meet another of theirs."""
    ran: list[str] = []
    background = Background(Ledger())

    def fail() -> None:
        raise ValueError("out of memory")

    failed = background.submit(fail, "t")
    later = background.submit(lambda: ran.append("later"), "t")
    for pending in (failed, later, background.submit(lambda: ran.append("new"), "t")):
        with pytest.raises(ValueError, match="out of memory"):
            pending.wait()
    background.close()
    assert not ran


def test_closing_waits_for_nothing_and_gives_up_what_is_queued() -> None:
    begun, let_go = threading.Event(), threading.Event()
    ran: list[str] = []
    background = Background(Ledger())

    def long() -> bool:
        begun.set()
        return let_go.wait(10.0)

    first = background.submit(long, "t")
    background.submit(lambda: ran.append("queued"), "t")
    assert begun.wait(10.0)
    background.close()
    let_go.set()
    assert first.wait()
    assert not ran


class Device:
    """A stand-in for a CUDA device, which computes until `idle` is set; installs itself."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.idle = idle = threading.Event()
        self.idle_at = 0.0

        class Event:
            def __init__(self, **_: Any) -> None: ...

            def record(self, stream: Any) -> None:
                assert stream == CUDA

            def query(self) -> bool:
                return idle.is_set()

            def synchronize(self) -> None:
                idle.wait()

        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "current_stream", lambda device: device)
        patch.setattr(torch.cuda, "device", lambda device: nullcontext())

    def computes_for(self, seconds: float) -> None:
        def end() -> None:
            self.idle_at = time.monotonic()
            self.idle.set()

        threading.Timer(seconds, end).start()


@pytest.mark.parametrize(("computes_s", "exposed_s"), [(0.9, 0.0), (0.0, 0.6), (0.2, 0.4)], ids=str)
def test_only_the_time_in_which_the_device_has_nothing_to_do_is_counted(
    monkeypatch: pytest.MonkeyPatch, computes_s: float, exposed_s: float
) -> None:
    """An exchange of 0.6 s beside a step: the host comes to its landing at once.

    The wait of the host was counted, of which 0.6 s were the device's own computation.
    """
    device, ledger = Device(monkeypatch), Ledger()
    background = Background(ledger)

    def exchange() -> float:
        time.sleep(0.6)
        return time.monotonic()

    pending = background.submit(exchange, "t", device=CUDA)
    start = time.monotonic()
    device.computes_for(computes_s)
    ended, returned = pending.wait(), time.monotonic()
    background.close()
    # by the clock, because a busy machine is late with timers, and with waking a thread that waits
    idle_from = max(start, device.idle_at) if device.idle.is_set() else math.inf
    assert max(ended - idle_from, 0.0) >= exposed_s / 2
    assert 0.9 * max(ended - idle_from, 0.0) - 0.02 <= ledger.seconds_waited
    assert ledger.seconds_waited <= max(returned - idle_from, 0.0) + 0.02


def test_a_lost_peer_is_named_while_the_device_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its collective on the device never ends, and the host would wait in C++ until the timeout."""
    Device(monkeypatch)
    aborted: list[bool] = []
    monkeypatch.setattr(module, "abort_nccl", lambda: aborted.append(True))
    tensor: Any = SimpleNamespace(device=CUDA, shape=(3,), dtype=torch.float32)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: SimpleNamespace(copy_=lambda *_, **__: 0))
    with watches(3) as ranks:
        _, wait = to_host(tensor, ranks[0])
        fall_silent(ranks[1])
        start = time.monotonic()
        with pytest.raises(PeerLostError, match="rank 1 is gone"):
            wait()
        assert time.monotonic() - start < 15.0
    assert aborted, "before the error leaves: this process could not end"


def test_all_communicators_of_nccl_are_aborted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def group(name: str) -> Any:
        backend = SimpleNamespace(
            _group_start=lambda: calls.append("start"), _group_end=lambda: calls.append("end")
        )
        abort = lambda: calls.append(name)  # noqa: E731
        return SimpleNamespace(abort=abort, _get_backend=lambda _: backend)

    groups = [("gloo", "world"), ("nccl", "near"), ("nccl", "fsdp")]
    opened = SimpleNamespace(pg_map={})
    monkeypatch.setattr(dist.distributed_c10d, "_world", opened)
    module.abort_nccl()
    assert calls == []
    opened.pg_map = Groups((group(name), (backend, None)) for backend, name in groups)
    module.abort_nccl()
    assert calls == ["start", "near", "fsdp", "end"]


class Groups(list[Any]):
    """A mapping whose keys need no hash."""

    def items(self) -> Any:
        return self


def test_every_device_has_its_own_side_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The results of a model on two devices would else arrive on the second without an order."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(device=device))
    staging = Staging()
    devices = [torch.device("cuda", index) for index in (0, 1, 0)]
    first, second, again = (staging._side_stream(device) for device in devices)
    assert [first.device, second.device] == devices[:2]
    assert again is first
