"""What replicas lose by dividing a batch that is mostly noise, however often they exchange.

A bigram model, which is convex: a table of logits, trained with Adam on tokens of a random Markov
chain. Adam divides a replica's gradient by its own second moment. Its noise is M times that of the
whole batch's, so the averaged step is up to sqrt(M) shorter.
"""

from __future__ import annotations

import math
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.size_ladder.played import PlayedReplicas
from lightning_commfree.diloco import DiLoCoSettings

VOCABULARY, TOKENS, STEPS, LR = 64, 128, 240, 0.02


@cache
def chain() -> tuple[Tensor, Tensor]:
    """Return the probability of each token after each other one, and of each token."""
    rows = torch.softmax(2 * torch.randn(VOCABULARY, VOCABULARY), 1)
    return rows, torch.linalg.matrix_power(rows, 64)[0]


@cache
def batches() -> list[tuple[Tensor, Tensor]]:
    """Return tokens and the tokens that follow them, for each step."""
    rows, first = chain()
    tokens = torch.multinomial(first, STEPS * TOKENS, replacement=True).view(STEPS, TOKENS)
    return [(one, torch.multinomial(rows[one], 1).view(-1)) for one in tokens]


def loss(table: nn.Module) -> float:
    """Return the cross-entropy on all pairs of tokens, by their probability."""
    rows, first = chain()
    (logits,) = table.parameters()
    return float(-(first[:, None] * rows * functional.log_softmax(logits.detach(), 1)).sum())


def losses(replicas: int, lr: float = LR, mean_every: int = 0, **settings: Any) -> list[float]:
    """Train; return the loss of the replicas' mean weights after every step.

    They take the plain mean of their weights every few steps, or Streaming DiLoCo's outer steps.
    """
    torch.manual_seed(0)
    batches()
    modules = [nn.Embedding.from_pretrained(torch.zeros(VOCABULARY, VOCABULARY), freeze=False)]
    modules += [deepcopy(modules[0]) for _ in range(replicas - 1)]
    optimizers = [torch.optim.Adam(one.parameters(), lr, betas=(0.9, 0.98)) for one in modules]
    played = PlayedReplicas(modules, DiLoCoSettings(**settings)) if settings else None
    mean, found = deepcopy(modules[0]), []
    for tokens, following in batches():
        for m, (module, optimizer) in enumerate(zip(modules, optimizers, strict=True)):
            optimizer.zero_grad()
            functional.cross_entropy(module(tokens[m::replicas]), following[m::replicas]).backward()
            optimizer.step()
        if played is not None:
            played.after_steps()
        with torch.no_grad():
            weights = torch.stack([module.weight for module in modules])
            mean.weight.copy_(weights.mean(0))
            for module in modules if mean_every and (len(found) + 1) % mean_every == 0 else ():
                module.weight.copy_(mean.weight)
        found.append(loss(mean))
    if played is not None:
        played.finish()
        played.close()
    return found


def delay(found: list[float]) -> float:
    """Return in how many times as many steps as DDP the replicas reach DDP's loss at half time."""
    half = STEPS // 2
    reached = next(step for step, one in enumerate(found, 1) if one <= losses_of_ddp()[half - 1])
    return reached / half


@cache
def losses_of_ddp() -> list[float]:
    return losses(1)


@pytest.mark.parametrize("replicas", [2, 4])
def test_the_delay_is_that_of_the_divided_batch(replicas: int) -> None:
    root = math.sqrt(replicas)
    often, rarely = (delay(losses(replicas, mean_every=h)) for h in (1, 10))
    assert often == pytest.approx(rarely, abs=0.03), "how often they exchange is not the cause"
    assert 1.1 < often < root
    assert delay(losses(replicas, LR * root, mean_every=10)) < 0.95, "a larger rate removes it"
    # of the shipped outer step, momentum makes up for a part
    shipped = delay(losses(replicas, sync_every=10, overlap_steps=5))
    assert 1.0 < shipped < rarely - 0.03
