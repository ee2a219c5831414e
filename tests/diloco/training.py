"""A small training without Lightning, for the tests of `StreamingDiLoCo`.

`train` plays one replica, alone or as a gloo rank; `twin` plays all of them in this process by the
serial twin.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.ledger import Ledger
from lightning_commfree.diloco import (
    CODECS,
    DiLoCoSettings,
    StreamingDiLoCo,
    split_into_fragments,
)
from lightning_commfree.diloco.codec import decode_all
from lightning_commfree.diloco.transport import FixedTransport
from tests.diloco.serial import SerialDiLoCo

WIDTH = 5
AVERAGING = partial(torch.optim.SGD, lr=1.0)
NESTEROV = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
PLAIN_SGD = partial(torch.optim.SGD, lr=0.05)
ADAMW = partial(torch.optim.AdamW, lr=1e-2)
DEFAULTS: dict[str, Any] = {
    "sync_every": 4,
    "num_fragments": None,
    "fragment_pattern": "strided",
    "overlap_steps": 1,
    "mix": 0.5,
    "wire_dtype": "fp32",
    "outer_optimizer": NESTEROV,
    "replica_size": 1,
    "check_drift_every": 1,
}

State = dict[str, Tensor]
InnerOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Net(nn.Module):
    """Three blocks between an input and an output layer, in as many odd shapes as that gives."""

    def __init__(self, dtype: torch.dtype = torch.float32, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Linear(3, width, dtype=dtype)
        self.blocks = nn.ModuleList(nn.Linear(width, width, dtype=dtype) for _ in range(3))
        self.head = nn.Linear(width, 1, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


def batch(replica: int, step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * replica + step))
    return x, x.sin().sum(1, keepdim=True)


def backward(module: nn.Module, replica: int, step: int) -> None:
    x, y = batch(replica, step)
    dtype = next(module.parameters()).dtype
    module.zero_grad()
    nn.functional.mse_loss(module(x.to(dtype)), y.to(dtype)).backward()


def start(module: nn.Module, channel: Channel, **changes: Any) -> StreamingDiLoCo:
    settings = DiLoCoSettings(**{**DEFAULTS, **changes})
    fragments = split_into_fragments(module, settings.num_fragments, settings.fragment_pattern)
    return StreamingDiLoCo(module, fragments, settings, FixedTransport(channel))


def alone() -> Channel:
    return Channel([0], 0, Ledger())


def world(rank: int, size: int) -> Channel:
    return Channel.open([list(range(size))], rank, Ledger())


def elsewhere(make: Callable[..., Channel]) -> Callable[..., Channel]:
    """Return `make` with another name of the device: CPU tensors then take the way of CUDA's."""

    def made(*args: int) -> Channel:
        channel = make(*args)
        channel.device = torch.device("cpu", 0)
        return channel

    return made


def state_of(module: nn.Module) -> State:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(torch.uint8).clone()


@dataclass
class Trace:
    """What one replica held after every step, and after `finish` where that ran."""

    local: list[State] = field(default_factory=list)
    outer: list[list[Tensor]] = field(default_factory=list)
    in_flight: list[list[int]] = field(default_factory=list)
    fragments: list[list[str]] = field(default_factory=list)

    def record(self, module: nn.Module, diloco: StreamingDiLoCo) -> None:
        self.local.append(state_of(module))
        self.outer.append([fragment.global_copy.clone() for fragment in diloco.fragments])
        self.in_flight.append(diloco.in_flight)


@dataclass(frozen=True)
class Run:
    """A training: the same on ranks, alone and in the twin."""

    steps: int
    changes: dict[str, Any] = field(default_factory=dict)
    inner: InnerOptimizer = ADAMW
    dtype: torch.dtype = torch.float32
    same_data: bool = False
    finish: bool = True
    between_steps: Callable[[StreamingDiLoCo], None] = lambda diloco: None
    paces: dict[int, tuple[int, int]] = field(default_factory=dict)  # H and tau, by first step

    def data_of(self, replica: int) -> int:
        return 0 if self.same_data else replica


def train(rank: int, size: int, run: Run) -> Trace:
    module = Net(run.dtype)
    diloco = start(module, world(rank, size) if size > 1 else alone(), **run.changes)
    follow(diloco, run.paces)
    optimizer = run.inner(list(module.parameters()))
    trace = Trace()
    trace.fragments = [
        list(f.parameters)
        for f in split_into_fragments(
            module,
            run.changes.get("num_fragments"),
            run.changes.get("fragment_pattern", "strided"),
        )
    ]
    for step in range(1, run.steps + 1):
        backward(module, run.data_of(rank), step)
        optimizer.step()
        diloco.after_step()
        trace.record(module, diloco)
        run.between_steps(diloco)
    if run.finish:
        diloco.finish()
        trace.record(module, diloco)
    return trace


def follow(diloco: StreamingDiLoCo, paces: dict[int, tuple[int, int]]) -> None:
    """Change H and tau after given steps, instead of by what is measured."""

    def choose(sync_every: int, overlap_steps: int, num_fragments: int) -> tuple[int, int]:
        del num_fragments
        begins = diloco.schedule.next_launch_of(0, diloco.step)
        return paces.get(begins, (sync_every, overlap_steps))

    diloco.pacer.choose = choose  # type: ignore[method-assign]


def through(wire_dtype: str) -> Callable[[Tensor], Tensor]:
    """One tensor at a time, so that fragments must be single tensors where blocks have scales."""
    wire = CODECS[wire_dtype]

    def transfer(delta: Tensor) -> Tensor:
        payload = torch.empty(wire.num_bytes(delta.numel()), dtype=torch.uint8)
        wire.encode(delta.reshape(-1), out=payload)
        return decode_all(wire, payload, torch.empty(delta.numel())).view(delta.shape)

    return transfer


def twin(size: int, run: Run, fragments: list[list[str]]) -> list[Trace]:
    """Return the replicas' traces, played by the serial twin."""
    modules = [Net(run.dtype) for _ in range(size)]
    optimizers = [run.inner(list(module.parameters())) for module in modules]
    settings = {**DEFAULTS, **run.changes}

    def inner_step(replica: int, step: int) -> None:
        backward(modules[replica], run.data_of(replica), step)
        optimizers[replica].step()

    serial = SerialDiLoCo(
        modules,
        inner_step,
        fragments,
        DiLoCoSettings(**settings).first_sync_every,
        DiLoCoSettings(**settings).first_overlap_steps,
        settings["mix"],
        settings["outer_optimizer"],
        through(settings["wire_dtype"]),
    )
    traces = [Trace() for _ in modules]
    for step in range(1, run.steps + 1 + run.finish):
        if step <= run.steps:
            serial.run_step()
            if step in run.paces:
                serial.change_pace(*run.paces[step])
        else:
            serial.finish()
        outer = [torch.cat([serial.outer[n].detach().flatten() for n in f]) for f in fragments]
        for trace, module in zip(traces, modules, strict=True):
            trace.local.append(state_of(module))
            trace.outer.append(outer)
    return traces


def assert_same_bits(got: Trace, expected: Trace, what: str) -> None:
    assert len(got.local) == len(expected.local)
    for step, (got_state, state) in enumerate(zip(got.local, expected.local, strict=True), 1):
        for name, tensor in state.items():
            assert torch.equal(bits(got_state[name]), bits(tensor)), f"{what} step {step} {name}"
    for step, (got_outer, outer) in enumerate(zip(got.outer, expected.outer, strict=True), 1):
        for p, tensor in enumerate(outer):
            # the sum of the twin does not start from 0.0, so that it may be -0.0
            assert torch.equal(got_outer[p], tensor), f"{what} step {step} global copy {p}"


def largest_difference(one: list[State], other: list[State]) -> float:
    return max(
        float((a[name].double() - b[name].double()).abs().max())
        for a, b in zip(one, other, strict=True)
        for name in a
    )


def after_some_steps(steps: int, **changes: Any) -> tuple[Net, StreamingDiLoCo]:
    module = Net()
    diloco = start(module, alone(), **changes)
    optimizer = ADAMW(module.parameters())
    for step in range(1, steps + 1):
        backward(module, 0, step)
        optimizer.step()
        diloco.after_step()
    return module, diloco


def all_bits(module: nn.Module) -> State:
    return {name: bits(tensor) for name, tensor in module.state_dict().items()}


def assert_equal_states(got: State, expected: State) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name
