"""Launch and landing on a CUDA device, walked without one: one device, and what the host waits for.

What the walk does not see, and what stands there (`tests.cuda_seams`):

- the thread beside the training: its tasks run where their result is waited for, as "thread";
- streams and pinned memory: copies are made, nothing runs beside anything, so that no race is seen;
- the loops that numba compiles: codes on the CPU are made by torch operations;
- what headers say: they hold no values, so a summary is given. `message.summarize_headers` reads
  them in host memory, where no device is waited for.
"""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_commfree.comm.background import to_host
from lightning_commfree.diloco import (
    CODECS,
    DiLoCoSettings,
    OuterFragment,
    StreamingDiLoCo,
    exchange,
    split_into_fragments,
)
from lightning_commfree.diloco.codec import BLOCK, decode_all, warm_up
from lightning_commfree.diloco.exchange import (
    HeaderSummary,
)
from lightning_commfree.diloco.nonfinite import is_nonfinite
from lightning_commfree.diloco.transport import FixedTransport
from tests.cuda_seams import memory, no_compiled_loops, tasks_at_once
from tests.cuda_walk import CPU, CUDA, CudaWalk, InstantChannel, Question, is_walked
from tests.diloco.training import DEFAULTS, NESTEROV

STEPS, WIDTH = 4, 64  # every fragment lands once; wide enough for shards at three replicas
Questions = set[Question]

# What a step waits for, by the step at which it happens, and why. A launch waits for nothing, and a
# landing for nothing that has arrived: it is decoded on the device, which the host does not ask.


def on_device(step: str, size: int) -> Questions:
    """The channel is the device's: what the headers say decides what becomes of the values.

    If any fragment is exchanged by shards, the thread reads them before it sends the means.
    """
    return {Question("thread" if size == 3 else step, "comm/background.py wait", "wait")}


def on_host(step: str, size: int) -> Questions:
    """The channel is the CPU's: the codes have to come down before they can have been sent."""
    del size
    return {
        Question(step, "comm/background.py wait", "wait"),
        # the thread waits for them too, before it sends them
        Question("thread", "comm/background.py wait", "wait"),
    }


# Figures of the log are read when it asks for them.
FIGURES = {Question("figures", "comm/background.py wait", "wait")}
# The global copy lives in host memory. It is made there, and so the mean is formed and the outer
# step taken there, at the landing; the end of a fit makes it the local copy.
OFFLOADED = {
    Question("start", "diloco/outer.py _to_device", "copy down"),
    Question("finish", "diloco/outer.py take_local", "copy down"),
}


def after_abstaining(step: str) -> Questions:
    """This replica's values were not finite: which fragments, and which state, begin anew."""
    places = ("take_global", "reset_nonfinite_state")
    return {Question(step, f"diloco/nonfinite.py {place}", "value") for place in places}


ANSWERS = {
    "diloco/nonfinite.py take_global": False,
    "diloco/nonfinite.py reset_nonfinite_state": False,
}


class Net(nn.Module):
    """Blocks with averaged buffers; nothing goes through them."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Linear(3, WIDTH, dtype=dtype)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(3))
        self.norm = nn.BatchNorm1d(WIDTH, dtype=dtype)


class Training:
    """Replica 0 of `size`, whose module is on the device; `channel` says where what is sent is.

    It may have several ranks, with a channel `within`.
    """

    together = True  # all replicas are at the same step

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        size: int,
        channel: torch.device,
        nonfinite: tuple[int, ...] = (),
        dtype: torch.dtype = torch.float32,
        walk: CudaWalk | None = None,
        within: Any = None,
    ) -> None:
        self.walk, self.module, self.size = walk or CudaWalk(ANSWERS), Net(dtype), size
        self.channel: Any = InstantChannel(size, device=channel)
        self.within = within
        self.diloco: StreamingDiLoCo

        def said(headers: Tensor, together: bool = True) -> HeaderSummary:
            assert headers.device == CPU
            assert together or not self.together
            positions = (exchange.Position(0, 0),) * len(headers)
            differ = False, False, False, False
            return HeaderSummary(*differ, nonfinite, (1,) * len(headers), positions)

        patch.setattr(exchange, "summarize_headers", said)
        if within is not None:  # the flags of the other ranks hold no values either
            whole = exchange.Arrival.shared_within

            def shared(arrival: exchange.Arrival, ranks: Any) -> exchange.Arrival:
                return whole(arrival, ranks)._replace(summary=arrival.summary)

            patch.setattr(exchange.Arrival, "shared_within", shared)
        no_compiled_loops(patch)
        memory(patch)
        tasks_at_once(patch, self.walk)

    def run(self, waits: bool = False, **changes: Any) -> Questions:
        """Take some steps and finish; return what was asked.

        `waits` is whether what is in flight arrives between steps, as the step "arrival".
        """
        with self.walk:
            self.walk.on_cuda(self.module)
            self._start(**changes)
            optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1, momentum=0.9)
            self.diloco.optimizers = [optimizer]
            for _ in range(STEPS):
                for parameter in self.module.parameters():
                    parameter.grad = torch.empty_like(parameter)
                optimizer.step()
                with self.walk.during("after step"):
                    self.diloco.after_step()
                if waits:
                    with self.walk.during("arrival"):
                        self.diloco.wait_in_flight()

            with self.walk.during("finish"):
                self.diloco.finish()
            with self.walk.during("figures"):
                self.diloco.figures()
        return self.walk.asked()

    def _start(self, **changes: Any) -> None:
        settings = DiLoCoSettings(**{**DEFAULTS, "sync_every": 2, "num_fragments": 3, **changes})
        fragments = split_into_fragments(self.module, 3, "strided")
        with self.walk.during("start"):
            self.transport = FixedTransport(self.channel)
            self.diloco = StreamingDiLoCo(
                self.module, fragments, settings, self.transport, self.within
            )
            self.diloco.warm_up()

    def two_phase(self) -> set[bool]:
        return {exchange.route.two_phase for exchange in self.transport.exchanges}


# every codec with both sizes and both channels, and these with each other
PLACES = [(2, CUDA), (3, CPU)], [(2, CPU), (3, CUDA)]
CASES = [(wire, *place) for i, wire in enumerate(CODECS) for place in PLACES[i % 2]]


@pytest.mark.parametrize(("wire_dtype", "size", "channel"), CASES, ids=str)
def test_a_launch_waits_for_nothing_and_a_landing_for_what_the_list_names(
    monkeypatch: pytest.MonkeyPatch, wire_dtype: str, size: int, channel: torch.device
) -> None:
    dtype = torch.bfloat16 if wire_dtype == "bf16" else torch.float32
    training = Training(monkeypatch, size, channel, dtype=dtype)
    asked = training.run(wire_dtype=wire_dtype)
    here = on_host if channel == CPU else on_device
    assert asked == here("after step", size) | here("finish", size) | FIGURES

    assert set(training.diloco.landings) == {0, 1, 2}
    assert (True in training.two_phase()) == (size == 3)
    assert all(is_walked(p) for p in training.module.parameters())
    assert all(is_walked(f.global_copy) for f in training.diloco.fragments)


def test_gathers_beside_shards_leave_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread sends all of them then, and a channel of the device takes tensors of the device.

    The message of a gather went down to the host first, and was refused by such a channel.
    """
    training = Training(monkeypatch, 3, CUDA)
    training.module.blocks[1] = nn.Linear(WIDTH, WIDTH, bias=False)
    training.run()
    assert training.two_phase() == {False, True}


@pytest.mark.parametrize("size", [2, 3])
def test_a_global_copy_in_host_memory(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    training = Training(monkeypatch, size, CPU)
    asked = training.run(outer_device="cpu", wire_dtype="fp4")
    assert asked == on_host("after step", size) | on_host("finish", size) | OFFLOADED
    assert not any(is_walked(f.global_copy) for f in training.diloco.fragments)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("outer_device", [None, "cpu"])
def test_a_landing_of_what_has_arrived_asks_nothing(
    monkeypatch: pytest.MonkeyPatch, outer_device: str | None, size: int
) -> None:
    asked = Training(monkeypatch, size, CPU).run(waits=True, outer_device=outer_device)
    assert {question.step for question in asked} >= {"arrival", "thread"}
    assert not {question for question in asked if question.step == "after step"}


@pytest.mark.filterwarnings("ignore:This replica was left out of the mean of fragment")
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("replica", [0, 1])
def test_an_abstaining_replica_looks_for_nonfinite_values(
    monkeypatch: pytest.MonkeyPatch, size: int, replica: int
) -> None:
    asked = Training(monkeypatch, size, CUDA, nonfinite=(replica,)).run(nonfinite="abstain")
    expected = on_device("after step", size) | on_device("finish", size) | FIGURES
    if replica == 0:
        expected |= after_abstaining("after step") | after_abstaining("finish")
    assert asked == expected


# By themselves


@pytest.mark.parametrize("numel", [1, BLOCK, 5 * BLOCK + 3])
@pytest.mark.parametrize("name", list(CODECS))
def test_codes_are_made_and_read_on_the_device(name: str, numel: int) -> None:
    wire = CODECS[name]
    with CudaWalk() as walk:
        warm_up(wire, CUDA)
        payload = torch.empty(wire.num_bytes(numel), dtype=torch.uint8, device=CUDA)
        wire.encode(torch.empty(numel, device=CUDA), payload)
        assert is_walked(decode_all(wire, payload, torch.empty(numel, device=CUDA)))
    assert walk.questions == []


@pytest.mark.parametrize("mix", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_work_within_a_replica_waits_for_nothing(
    dtype: torch.dtype, ranks: int, mix: float
) -> None:
    """From outer gradient to merge, with buffers, whole and in shards."""
    module = Net(dtype)
    with CudaWalk() as walk:
        walk.on_cuda(module)
        replica: Any = InstantChannel(ranks)
        [fragment] = _split(module)
        outer = OuterFragment(module, fragment, NESTEROV, replica)
        with torch.no_grad():
            gradient = outer.outer_gradient()
            assert is_walked(is_nonfinite(outer, gradient, replica))
            outer.outer_step(gradient)
            outer.average_buffers(gradient)
            outer.merge(mix)
            outer.take_local()
            assert is_walked(outer.digest())
        assert all(is_walked(tensor) for tensor in (gradient, outer.global_copy, *outer.local))
    assert walk.questions == []


def _split(module: nn.Module) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        memory(patch)
        return split_into_fragments(module, 1, "strided")


def test_a_message_on_its_way_down_holds_no_memory_of_the_device() -> None:
    with CudaWalk():
        message = torch.empty(3, device=CUDA)
        freed = weakref.ref(message.untyped_storage())
        _, wait = to_host(message)
        del message
        assert freed() is None
        wait()


# The tests above can fail.


@pytest.mark.parametrize("method", ["subtract_from", "local_values"])
def test_a_planted_item_is_seen(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    whole = getattr(OuterFragment, method)

    def planted(outer: OuterFragment, *args: Any) -> Tensor | None:
        found: Tensor | None = whole(outer, *args)
        (args[-1] if found is None else found).sum().item()
        return found

    monkeypatch.setattr(OuterFragment, method, planted)
    asked = Training(monkeypatch, 2, CUDA).run()
    here = "tests/diloco/test_cuda_walk_diloco.py planted"
    assert Question("after step", here, "value") in asked


@pytest.mark.parametrize("method", ["outer_step", "average_buffers"])
def test_a_planted_tensor_of_the_cpu_is_seen(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    whole = getattr(OuterFragment, method)

    def planted(outer: OuterFragment, mean: Tensor, *more: Any) -> None:
        whole(outer, mean + torch.ones(mean.shape), *more)

    monkeypatch.setattr(OuterFragment, method, planted)
    with pytest.raises(RuntimeError, match=r"cuda:1.*cpu|cpu and cuda:1"):
        Training(monkeypatch, 2, CUDA).run()
