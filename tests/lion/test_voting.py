"""A worker among others: when buckets leave and land, and what a step changes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_commfree.lion import DistributedLion, LionSettings
from tests.lion.threads import in_threads


def disagree(steps: int, numel: int = 4000, workers: int = 2) -> list[list[Tensor]]:
    """Let half of the workers vote + and half - on everything; return Delta by worker and step.

    The first 100 parameters have no gradient other than 0 anywhere.
    """

    def worker(channel: Any) -> list[Tensor]:
        parameter = nn.Parameter(torch.zeros(numel))
        lion = DistributedLion([parameter], lr=1.0)
        lion.join([("p", parameter)], channel, LionSettings(ties="random", check_drift_every=0))
        deltas = []
        for _ in range(steps):
            before = parameter.detach().clone()
            parameter.grad = torch.full((numel,), 1.0 if channel.rank % 2 else -1.0)
            parameter.grad[:100] = 0.0
            lion.step()
            deltas.append(before - parameter.detach())
        lion.leave()
        return deltas

    return in_threads(workers, worker)


def test_a_tie_is_drawn_once_for_all_workers_and_anew_at_every_step() -> None:
    first, second = disagree(steps=3)
    for mine, others in zip(first, second, strict=True):
        assert torch.equal(mine, others)
        assert (mine[:100] == 0).all(), "nobody votes: it does not move"
        assert (mine[100:].abs() == 1).all()
        # 3900 fair coins: their mean has a standard deviation of 0.016
        assert abs(float(mine[100:].mean())) < 0.08
    for before, after in zip(first, first[1:], strict=False):
        alike = float((before[100:] == after[100:]).float().mean())
        assert abs(alike - 0.5) < 0.04, "a coordinate that ties again is drawn again"
    again, _ = disagree(steps=3)
    for mine, repeated in zip(first, again, strict=True):
        assert torch.equal(mine, repeated)
