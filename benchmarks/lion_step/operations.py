"""Operations timed by `benchmarks.lion_step`: the vote on random ballots, and optimizer steps.

W: workers, N: parameters, B: int64 words of a plane.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from lightning_commfree.comm.bits import pack_bits_part, unpack_bits_part
from lightning_commfree.lion import DistributedLion
from lightning_commfree.lion.buckets import Bucket, split_into_buckets
from lightning_commfree.lion.vote import Majority, PackedDelta, Shard
from lightning_commfree.lion.worker import LionParam, cast_ballot, take_step

Operations = dict[str, Callable[[], object]]

COPY, PACKBITS = "copy of the fp32 values", "numpy.packbits"
PACK, UNPACK = "pack", "unpack"
ADAMW, ADAMW_FUSED = "AdamW(foreach=True)", "AdamW(fused=True)"
LION = "DistributedLion.step, single worker"
CAST, APPLY = "cast the ballots", "read the result and apply the step"
WORKER = "one of several workers: cast, read, apply"
_CHUNK = 1 << 16  # values that a CPU worker packs at a time
_WORD = 64


def pack(values_N: Tensor, plane: Tensor) -> None:
    """Pack the signs of fp32 values like `cast_ballot`, in chunks on a CPU."""
    for start in range(0, values_N.numel(), _chunk_size(values_N)):
        pack_bits_part(values_N[start : start + _chunk_size(values_N)] > 0, start, plane)


def unpack(packed_delta: PackedDelta, out_N: Tensor) -> None:
    """Write Delta of all parameters in fp32 like `take_step`, in chunks on a CPU."""
    for start in range(0, out_N.numel(), _chunk_size(out_N)):
        packed_delta.read(start, out_N[start : start + _chunk_size(out_N)])


def vote(ballots_WB: Tensor, valid_B: Tensor) -> Shard:
    """Count one shard by majority, including ties, without zero votes."""
    return Majority().count(ballots_WB, None, valid_B, shard=0)


def ballots_of_a_share(numel: int, workers: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return random ballots on one rank's share of the parameters, int64 (W, B), and `valid`."""
    words = -(-numel // (_WORD * workers))
    ballots = torch.randint(0, 256, (workers, 8 * words), dtype=torch.uint8, device=device)
    return ballots.view(torch.int64), torch.full((words,), -1, device=device)


def unpack_and_add(ballots_WB: Tensor, flags: Tensor, sums: Tensor) -> Tensor:
    """Count without bit-slicing: unpack every ballot, add in int16, take the sign.

    Args:
        ballots_WB: int64.
        flags: scratch, uint8, shape (64 B,).
        sums: scratch, int16, shape (64 B,).
    """
    sums.fill_(-len(ballots_WB))
    for ballot in ballots_WB.view(torch.uint8):
        unpack_bits_part(ballot, 0, flags)
        sums.add_(flags, alpha=2)
    return sums.sign_()


def vote_operations(numel: int, workers: tuple[int, ...], device: torch.device) -> Operations:
    """Return a copy, numpy's packing, and our packing, counting and unpacking of `numel` values.

    The count for n workers is over one rank's share of `numel` / n parameters, which is what one
    rank counts in a step of `DistributedLion`.
    """
    values = torch.randn(numel, device=device)
    copied, deltas = torch.empty_like(values), torch.empty_like(values)
    plane = torch.zeros(8 * -(-numel // _WORD), dtype=torch.uint8, device=device)
    pack(values, plane)
    packed_delta = PackedDelta(torch.stack([plane, torch.zeros_like(plane)]), (2, 1), 1)
    table: Operations = {COPY: lambda: copied.copy_(values)}
    if device.type == "cpu":
        array = values.numpy()
        table[PACKBITS] = lambda: np.packbits(array > 0)
    table |= {PACK: lambda: pack(values, plane), UNPACK: lambda: unpack(packed_delta, deltas)}
    for n in workers:
        ballots, valid = ballots_of_a_share(numel, n, device)
        table[vote_name(n)] = partial(vote, ballots, valid)
        flags = torch.empty(_WORD * ballots.shape[1], dtype=torch.uint8, device=device)
        sums = torch.empty(flags.shape, dtype=torch.int16, device=device)
        table[plain_name(n)] = partial(unpack_and_add, ballots, flags, sums)
    return table


def vote_name(workers: int) -> str:
    """Return the name of the count of `workers` ballots."""
    return f"vote, n = {workers}"


def plain_name(workers: int) -> str:
    """Return the name of the count of `workers` unpacked ballots."""
    return f"unpack and add, n = {workers}"


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


def _chunk_size(values: Tensor) -> int:
    return _CHUNK if values.device.type == "cpu" else values.numel()
