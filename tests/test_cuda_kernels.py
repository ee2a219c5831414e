"""Kernels and bytes of Streaming DiLoCo and Distributed Lion on a CUDA device, counted without one.

Every kernel costs the host some microseconds, and a large tensor takes its bytes over the bandwidth
of memory. `BOUNDS` holds what was counted: more is a regression. A count that falls by a fifth asks
for a lower bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from benchmarks.lion_step.operations import gpt2_shapes
from lightning_commfree.comm.exchange import View
from lightning_commfree.diloco import (
    DiLoCoSettings,
    StreamingDiLoCo,
    exchange,
    split_into_fragments,
)
from lightning_commfree.diloco.exchange import HeaderSummary
from lightning_commfree.diloco.transport import FixedTransport
from lightning_commfree.lion import DistributedLion, LionSettings, ballot, worker
from lightning_commfree.lion.ballot import VoteHeaders
from tests.cuda_seams import memory, no_compiled_loops, tasks_at_once
from tests.cuda_walk import CPU, CUDA, CudaWalk, InstantChannel
from tests.diloco.training import DEFAULTS
from tests.kernels import KernelCount


class Cost(NamedTuple):
    kernels: int
    bytes_per_parameter: float


# At most. The floor reads and writes every value once, in as few kernels as the shapes
# allow; fused AdamW is one kernel for up to some hundred tensors, and 28 bytes.
BOUNDS = {
    # 27 tensors of 2048 x 2048 as one fragment in fp4; half of a launch is on the side stream
    "DiLoCo launch": (Cost(175, 93.8), "floor 8.5 bytes"),
    "DiLoCo landing": (Cost(361, 164.1), "floor 25 bytes"),
    # GPT-2 with 124M parameters in 148 tensors and 19 buckets, in every step
    "Lion cast": (Cost(501, 49.6), "floor 8.25 bytes"),
    "Lion step": (Cost(362, 66.5), "floor 20.3 bytes"),
    "Lion cast, Triton": (Cost(322, 9.4), "floor 8.25 bytes"),
    "Lion step, Triton": (Cost(317, 20.8), "floor 20.3 bytes"),
    "Lion cast, Triton, bf16": (Cost(322, 7.4), "floor 6.25 bytes"),
    # of which 148 kernels and 6 bytes look for values that hooks have changed
    "Lion step, Triton, bf16": (Cost(484, 32.8), "floor 30.3 bytes"),
}
LIONS: dict[str, dict[str, Any]] = {
    "": {},
    ", Triton": {"has_triton": True},
    ", Triton, bf16": {"has_triton": True, "dtype": torch.bfloat16},
}
GPT2 = gpt2_shapes(12, 768, 50257, 1024)


def counted(count: KernelCount, numel: int, triton: Kernels | None = None) -> Cost:
    ours = triton or Kernels()
    kernels = count.kernels.total() + ours.kernels
    return Cost(kernels, round((count.num_bytes.total() + ours.num_bytes) / numel, 1))


class Kernels:
    """Stands in for `worker_triton`, and counts what its kernels read and write."""

    def __init__(self) -> None:
        self.kernels, self.num_bytes = 0, 0.0

    def cast(self, momentum: Tensor, gradient: Tensor, *_: Any) -> None:
        self._launch(momentum.nbytes, gradient.nbytes, 2 * 2 * momentum.numel() / 8)  # two planes

    def update_values(
        self, values: Tensor, planes: Tensor, weights: tuple[int, ...], *_: Any
    ) -> None:
        self._launch(2 * values.nbytes, len(weights) * values.numel() / 8)

    def follow(self, master: Tensor, values: Tensor) -> None:
        self._launch(master.nbytes, values.nbytes)  # it writes only what has changed

    def update_momentum(self, momentum: Tensor, gradient: Tensor, beta: float) -> None:
        self._launch(2 * momentum.nbytes, gradient.nbytes)

    def _launch(self, *num_bytes: float) -> None:
        self.kernels += 1
        self.num_bytes += sum(num_bytes)


def lion(
    patch: pytest.MonkeyPatch,
    shapes: Sequence[tuple[int, ...]],
    has_triton: bool = False,
    dtype: torch.dtype = torch.float32,
) -> list[Cost]:
    """Return the cost of casting all ballots, and of the step by their results."""

    def said(headers: Tensor, count: int) -> VoteHeaders:
        alike = {"parameters_differ": False, "hyperparameters_differ": False}
        return VoteHeaders(0, 0, (), (), (True,) * count, **alike)

    walk = CudaWalk()
    patch.setattr(ballot, "read_headers", said)
    memory(patch)
    tasks_at_once(patch, walk)
    made = [Kernels()]
    if has_triton:
        patch.setattr(worker, "load_kernels", lambda module, users: made[-1])
    with walk:
        parameters = [
            nn.Parameter(torch.empty(shape, dtype=dtype, device=CUDA)) for shape in shapes
        ]
        numel = sum(p.numel() for p in parameters)
        optimizer = DistributedLion(parameters)
        channel, settings = InstantChannel(3, device=CPU), LionSettings(check_drift_every=0)
        named = [(str(i), p) for i, p in enumerate(parameters)]
        voting = optimizer.join(named, View.of(channel), settings)  # type: ignore[arg-type]
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        optimizer.step()  # makes the momenta
        with KernelCount() as cast:
            made.append(Kernels())
            for index in range(len(voting.buckets)):
                voting._launch(index)
        with KernelCount() as step:
            made.append(Kernels())
            optimizer.step()
    return [counted(cast, numel, made[-2]), counted(step, numel, made[-1])]


def diloco(patch: pytest.MonkeyPatch, tensors: int, width: int) -> dict[str, Cost]:
    """Return the cost of a launch and of a landing, between two replicas."""
    summary = HeaderSummary(False, False, False, False, (), (1, 1))
    patch.setattr(exchange, "summarize_headers", lambda headers, together=True: summary)
    walk = CudaWalk()
    no_compiled_loops(patch)
    memory(patch)
    tasks_at_once(patch, walk)
    settings = {"sync_every": 2, "num_fragments": 1, "overlap_steps": 1, "wire_dtype": "fp4"}
    layers = [nn.Linear(width, width, bias=False, device="meta") for _ in range(tensors)]
    module = nn.ModuleList([nn.ModuleList(layers)])  # one block
    with walk:
        walk.on_cuda(module)
        channel = FixedTransport(InstantChannel(2, device=CPU))  # type: ignore[arg-type]
        fragments = split_into_fragments(module, 1, "strided")
        training = StreamingDiLoCo(
            module, fragments, DiLoCoSettings(**{**DEFAULTS, **settings}), channel
        )
        for _ in range(3):  # the first landing makes the outer momentum
            training.after_step()
        with KernelCount() as launch:
            training.after_step()
        with KernelCount() as landing:
            training.after_step()
    numel = tensors * width**2
    return {"DiLoCo launch": counted(launch, numel), "DiLoCo landing": counted(landing, numel)}


def test_costs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    found = diloco(monkeypatch, 27, 2048)
    for name, settings in LIONS.items():
        cast, step = lion(monkeypatch, GPT2, **settings)
        found |= {f"Lion cast{name}": cast, f"Lion step{name}": step}
    assert found.keys() == BOUNDS.keys()
    for name, (bound, floor) in BOUNDS.items():
        print(f"{name}: {found[name]}, at most {bound}, {floor}")  # shown where it fails
        for now, most in zip(found[name], bound, strict=True):
            assert now <= most, f"{name} costs more: {found[name]}"
            assert now >= 0.8 * most, f"{name} costs less: lower its bound to {found[name]}"


Operation = Callable[[Tensor], object]
COUNTED: dict[str, tuple[Operation, int, int]] = {  # kernels and bytes, on ten fp32 values
    "in place": (lambda x: x.mul_(2.0), 1, 80),
    "new": (lambda x: x + 1.0, 1, 80),
    "overwritten": (lambda x: x.fill_(1.0), 1, 40),
    "out": (lambda x: torch.mul(x, 2.0, out=torch.empty_like(x)), 1, 80),
    "copy": (lambda x: torch.empty_like(x).copy_(x), 1, 80),
    "copy down": (lambda x: torch.empty(10, pin_memory=True).copy_(x, non_blocking=True), 1, 80),
    "expanded": (lambda x: x[:1].expand(10).clone(), 1, 44),
    "lists": (lambda x: torch._foreach_mul_([x[:5], x[5:]], 2.0), 1, 80),
    "view": (lambda x: x.view(2, 5)[:, 1:].detach(), 0, 0),
    "of the CPU": (lambda x: torch.ones(3) + 1.0, 0, 0),
}


@pytest.mark.parametrize("name", COUNTED)
def test_an_operation_is_counted(name: str) -> None:
    operation, kernels, num_bytes = COUNTED[name]
    with CudaWalk() as walk:
        x = torch.empty(10, device=walk.device)
        with KernelCount() as count:
            operation(x)
    assert (count.kernels.total(), count.num_bytes.total()) == (kernels, num_bytes)
