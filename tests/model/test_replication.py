"""All ranks take the first rank's tensors: bytes and values, on real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.ledger import Ledger, all_gather_bytes, broadcast_bytes
from lightning_commfree.model.replication import take_first_rank
from tests.world import run_ranks

SIZE = 3
ROWS = 600
KINDS: dict[str, Any] = {  # tensors of every kind, by what is particular
    "large": lambda: torch.arange(ROWS * 1000.0).view(ROWS, 1000),
    "transposed": lambda: torch.arange(12.0).view(3, 4).t(),
    "bf16": lambda: torch.ones(5, dtype=torch.bfloat16),
    "flags": lambda: torch.tensor([True, False, True]),
    "number": lambda: torch.tensor(7),
    "part": lambda: torch.arange(7.0)[3:],
    "nan": lambda: torch.tensor([float("nan"), -0.0]),
    "empty": lambda: torch.empty(0, 3),
    "meta": lambda: torch.empty(4, device="meta"),
}


def tensors() -> dict[str, Tensor]:
    return {name: make() for name, make in KINDS.items()}


def change(tensor: Tensor, step: int) -> None:
    flat = tensor.view(-1) if tensor.is_contiguous() else tensor.t().view(-1)
    flat[-1] = not flat[-1] if tensor.dtype == torch.bool else flat[-1] + step


def share(rank: int, size: int) -> list[Any]:
    """By case: the tensors after it, and the bytes sent."""
    outcomes = []
    cases: list[tuple[tuple[int, ...], tuple[str, ...]]] = [
        ((), ()),
        ((2,), ("large",)),
        ((0,), ("transposed", "flags")),
        ((1, 2), ("bf16", "number", "part", "nan")),
    ]
    for ranks, names in cases:
        channel = Channel.open([list(range(size))], rank, Ledger())
        mine = tensors()
        for name in names if rank in ranks else ():
            change(mine[name], 1 + rank)
        take_first_rank(channel, mine.values(), "start")
        sent = channel.ledger.bytes_by_tag["start"]
        outcomes.append(({k: v for k, v in mine.items() if k != "meta"}, sent))
        channel.close()
    return outcomes


def test_only_tensors_that_differ_are_sent(tmp_path: Path) -> None:
    ranks = run_ranks(share, SIZE, tmp_path)
    hashes = all_gather_bytes(8 * (len(KINDS) - 2), SIZE)
    sent = [(), ("large",), ("transposed", "flags"), ("bf16", "number", "part", "nan")]
    for case, names in enumerate(sent):
        first = tensors()
        for name in names if case == 2 else ():
            change(first[name], 1)
        travels = sum(broadcast_bytes(first[name].nbytes, SIZE) for name in names)
        for outcome in ranks:
            mine, num_bytes = outcome[case]
            assert num_bytes == hashes + travels
            for name, tensor in mine.items():
                bits = (
                    one.contiguous().view(-1).view(torch.uint8) for one in (tensor, first[name])
                )
                assert torch.equal(*bits), (case, name)
