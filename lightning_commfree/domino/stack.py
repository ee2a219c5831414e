"""A stack of blocks as one node of autograd, whose inside is a `ScheduleRun`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_commfree.domino.auto_split import TimedRun
from lightning_commfree.domino.micro_sublayer import Arguments
from lightning_commfree.domino.schedule import ScheduleRun


class _Stack(torch.autograd.Function):
    """The whole stack as one node; a `ScheduleRun` computes its inside."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, run: ScheduleRun | TimedRun, arguments: Sequence[Arguments]
    ) -> Tensor:
        ctx.run = run
        return run.forward(hidden, arguments)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        if not torch.autograd._is_checkpoint_valid():  # type: ignore[no-untyped-call]
            # the inside would add to the gradients of all parameters, asked for or not
            raise RuntimeError(
                "A model that is divided and scheduled cannot be differentiated by"
                " `torch.autograd.grad` or `backward(inputs=...)`: its blocks run their own"
                " backward, for all parameters. Call `backward()`, or use another strategy."
            )
        return ctx.run.backward(gradients[0]), None, None


def run_schedule(
    run: ScheduleRun | TimedRun, hidden: Tensor, arguments: Sequence[Arguments]
) -> Tensor:
    """Run `hidden`, shape (B, T, H), through the stack.

    Args:
        run: a new one.
        hidden: the residual stream behind the embedding.
        arguments: what transformers passes to each block besides it, by name; one for all of them,
            or one for each.

    Returns:
        The residual stream before the last norm; gradients flow back through it once.
    """
    if not hidden.requires_grad:  # frozen embeddings: the node must be in the graph all the same
        hidden = hidden.detach().requires_grad_()

    output: Tensor = _Stack.apply(hidden, run, arguments)  # type: ignore[no-untyped-call]
    return output
