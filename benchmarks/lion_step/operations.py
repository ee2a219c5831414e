"""Operations timed by `benchmarks.lion_step` and `benchmarks.gpu_check`: optimizer steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from lightning_commfree.comm.bits import pack_bits_part
from lightning_commfree.lion import DistributedLion
from lightning_commfree.lion.buckets import Bucket, split_into_buckets
from lightning_commfree.lion.vote import PackedDelta
from lightning_commfree.lion.worker import LionParam, cast_ballot, take_step

Operations = dict[str, Callable[[], object]]

ADAMW, ADAMW_FUSED = "AdamW(foreach=True)", "AdamW(fused=True)"
LION = "DistributedLion.step, single worker"
CAST, APPLY = "cast the ballots", "read the result and apply the step"
WORKER = "one of several workers: cast, read, apply"


def gpt2_shapes(blocks: int, width: int, vocabulary: int, positions: int) -> list[tuple[int, ...]]:
    """Return the shapes of a GPT-2's parameters in order of use; the output layer is tied."""
    norm: list[tuple[int, ...]] = [(width,), (width,)]
    block: list[tuple[int, ...]] = [*norm, (width, 3 * width), (3 * width,)]
    block += [(width, width), (width,), *norm, (width, 4 * width), (4 * width,)]
    block += [(4 * width, width), (width,)]
    return [(vocabulary, width), (positions, width), *(block * blocks), *norm]


def parameters_with_gradients(
    shapes: list[tuple[int, ...]], device: torch.device
) -> list[nn.Parameter]:
    """Return random parameters of these shapes, the same at every call."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(0.02 * torch.randn(shape, device=device)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = 1e-3 * torch.randn_like(parameter)
    return parameters


class Worker:
    """One of two workers of Distributed Lion; its ballots are not sent, and the result is fixed.

    Args:
        parameters: with gradients.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._buckets = split_into_buckets([(str(i), p) for i, p in enumerate(parameters)], 2)
        group = {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.1}
        states = {p: {"momentum": torch.zeros_like(p)} for p in parameters}
        self._members = [
            [LionParam(p, states[p], group) for p in b.parameters] for b in self._buckets
        ]
        self._valid = [_valid(bucket) for bucket in self._buckets]
        self._packed_deltas = [_packed_delta(bucket) for bucket in self._buckets]

    def cast(self) -> None:
        """Cast the ballots of all buckets."""
        for bucket, members, valid in zip(self._buckets, self._members, self._valid, strict=True):
            cast_ballot(bucket, members, valid, requests=0, digest=0)

    @torch.no_grad()
    def apply(self) -> None:
        """Read the results and apply the step."""
        for bucket, members, packed_delta in zip(
            self._buckets, self._members, self._packed_deltas, strict=True
        ):
            take_step(
                bucket, members, packed_delta, (True,) * len(bucket.parameters), abstained=False
            )

    def cast_and_apply(self) -> None:
        """Cast, read and apply."""
        self.cast()
        self.apply()


def step_operations(shapes: list[tuple[int, ...]], device: torch.device) -> Operations:
    """Return the steps to compare, each on its own parameters with equal values."""
    make = partial(parameters_with_gradients, shapes, device)
    adamw = partial(torch.optim.AdamW, lr=1e-4, weight_decay=0.1)
    worker = Worker(make())
    return {
        ADAMW: adamw(make(), foreach=True).step,
        ADAMW_FUSED: adamw(make(), fused=True).step,
        LION: DistributedLion(make(), lr=1e-4, weight_decay=0.1).step,
        CAST: worker.cast,
        APPLY: worker.apply,
        WORKER: worker.cast_and_apply,
    }


def _valid(bucket: Bucket) -> Tensor:
    device = bucket.parameters[0].device
    plane = torch.zeros(bucket.plane_bytes, dtype=torch.uint8, device=device)
    pack_bits_part(torch.ones(bucket.numel, dtype=torch.bool, device=device), 0, plane)
    return plane


def _packed_delta(bucket: Bucket) -> PackedDelta:
    """Return the majority of two random ballots, half of which are ties."""
    device = bucket.parameters[0].device
    size = (2, bucket.plane_bytes)
    mine, other = torch.randint(0, 256, size, dtype=torch.uint8, device=device)
    return PackedDelta(torch.stack([mine & other, mine ^ other]), (2, 1), 1)
