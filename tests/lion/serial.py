"""Distributed Lion in one process, a for-loop over workers: the formulas as they are written.

Imports nothing of the package.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sign(values: Tensor) -> Tensor:
    """-1, 0 or 1; NaN and -0.0 give 0."""
    return (values > 0).to(values.dtype) - (values < 0).to(values.dtype)


def delta(directions: Sequence[Tensor], vote: str) -> Tensor:
    """Return Delta of the workers' directions c; shape and dtype of each."""
    total = sum((sign(c) for c in directions), torch.zeros_like(directions[0]))
    return sign(total) if vote == "majority" else total / len(directions)


def newton_schulz(matrix: Tensor, steps: int) -> Tensor:
    """Muon's iteration on a matrix with at most as many rows as columns, or on its transpose."""
    if matrix.shape[0] > matrix.shape[1]:
        return newton_schulz(matrix.T, steps).T
    x = matrix / matrix.norm().clamp(min=1e-7)
    for _ in range(steps):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x


class SerialLion:
    """The optimizer of n workers on one set of parameters.

    `groups` are dicts with "params", "lr", "betas" and "weight_decay", read at every step.
    """

    def __init__(self, groups: list[dict], workers: int, vote: str = "majority") -> None:
        self.groups, self.vote = groups, vote
        self.momenta = [
            {p: torch.zeros_like(p) for group in groups for p in group["params"]}
            for _ in range(workers)
        ]

    def step(self, gradients: Sequence[dict[Tensor, Tensor | None]]) -> None:
        """Take a step; a gradient for every worker and parameter, None where there is none."""
        for group in self.groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                directions = []
                for momenta, mine in zip(self.momenta, gradients, strict=True):
                    m, g = momenta[p], mine[p]
                    if g is None:
                        directions.append(torch.zeros_like(p))
                        continue
                    direction = m * b1 + g * (1 - b1)
                    if p.ndim == 2 and group.get("ns_steps"):
                        direction = newton_schulz(direction, group["ns_steps"])
                    directions.append(direction)
                    momenta[p] = m * b2 + g * (1 - b2)
                if any(mine[p] is not None for mine in gradients):
                    with torch.no_grad():
                        change = delta(directions, self.vote) * group["lr"]
                        p.copy_(p * (1 - group["lr"] * group["weight_decay"]) - change)
