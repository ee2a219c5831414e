"""What a rank will send in a training step, by tag, by the ledger's own formulas.

==================  ==================================================================
tag                 bytes of a payload
==================  ==================================================================
`tensor_forward`    tokens x width, a sublayer and the embedding
`tensor_backward`   tokens x width, a sublayer and the head
`tensor_loss`       3 numbers a token
`tensor_shared`     gradients of parts that several ranks of a tensor group hold
`tensor_norm`       one number, if gradients are clipped by their norm
`data_gradient`     gradients of this rank's part of the model
==================  ==================================================================

Under autocast the sums of forward are in its dtype; all else is in that of the parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from lightning_commfree.comm.ledger import all_gather_bytes, ring_all_reduce_bytes
from lightning_commfree.domino.gradients import AVERAGE_TAG, NORM_TAG, SHARED_TAG
from lightning_commfree.domino.layers import (
    BACKWARD_TAG,
    FORWARD_TAG,
    ColumnLinear,
    GatheredLinear,
    RowLinear,
    SplitRowLinear,
    VocabEmbedding,
    VocabHead,
)
from lightning_commfree.domino.loss import LOSS_TAG
from lightning_commfree.domino.parallel import ParallelModel


def bytes_per_token(model: ParallelModel, autocast: torch.dtype | None = None) -> Counter[str]:
    """Return what a rank sends for a token, forward and backward.

    Args:
        model: divided. It computes its own loss, as with `labels=`, if it can.
        autocast: dtype of autocast; None without.
    """
    size, found = model.group.size, Counter[str]()

    def add(tag: str, width: int, itemsize: int) -> None:
        found[tag] += ring_all_reduce_bytes(width * itemsize, size)

    for module in model.sharding.model.modules():
        if isinstance(module, RowLinear):
            weight = module.weight
            width = weight.shape[1 if module.transposed else 0]
            add(FORWARD_TAG, width, (autocast or weight.dtype).itemsize)
            if model.scheduled:  # by sublayers; else every column linear sends its own
                add(BACKWARD_TAG, width, weight.itemsize)
        elif isinstance(module, ColumnLinear) and not model.scheduled:
            width = module.weight.shape[0 if module.transposed else 1]
            add(BACKWARD_TAG, width, module.weight.itemsize)
        elif isinstance(module, VocabEmbedding):
            add(FORWARD_TAG, module.weight.shape[1], module.weight.itemsize)
        elif isinstance(module, VocabHead):
            add(BACKWARD_TAG, module.weight.shape[1], module.weight.itemsize)
            if model.divides_loss:
                found[LOSS_TAG] += all_gather_bytes(3 * max(module.weight.itemsize, 4), size)
            else:
                logits = len(module.weight) * (autocast or module.weight.dtype).itemsize
                found[FORWARD_TAG] += all_gather_bytes(logits, size)

    return found + _bytes_of_plans(model, autocast)


def _bytes_of_plans(model: ParallelModel, autocast: torch.dtype | None) -> Counter[str]:
    """Return what else a model sends for a token that is divided by its plan."""
    sharding, size, found = model.sharding, model.group.size, Counter[str]()
    for module in sharding.model.modules():
        if isinstance(module, GatheredLinear | SplitRowLinear):
            forward = isinstance(module, GatheredLinear)
            width = module.weight.shape[0 if forward else 1]
            num_bytes = width * (autocast or module.weight.dtype).itemsize
            found[FORWARD_TAG if forward else BACKWARD_TAG] += all_gather_bytes(num_bytes, size)

    config: Any = sharding.model.config
    for experts in sharding.experts:
        weight: Any = experts.down_proj
        hidden, chosen = weight.shape[1], config.num_experts_per_tok
        for tag, width in ((FORWARD_TAG, hidden), (BACKWARD_TAG, hidden), (BACKWARD_TAG, chosen)):
            found[tag] += ring_all_reduce_bytes(width * weight.itemsize, size)
    return found


def bytes_per_step(
    models: Sequence[ParallelModel],
    parameters: Iterable[nn.Parameter],
    tokens: int,
    data_size: int,
    autocast: torch.dtype | None,
    clips: bool,
) -> Counter[str]:
    """Return what a rank sends for an optimizer step: for its tokens and for its gradients.

    Args:
        models: divided.
        parameters: of the module around them.
        tokens: of a tensor group's batches of a step.
        data_size: ranks that average their gradients.
        autocast: its dtype; None without.
        clips: by the norm of the whole gradient.
    """
    found = bytes_of_gradients(models, parameters, data_size, clips)
    for model in models:
        for tag, num_bytes in bytes_per_token(model, autocast).items():
            found[tag] += num_bytes * tokens
    return found


def bytes_of_gradients(
    models: Sequence[ParallelModel],
    parameters: Iterable[nn.Parameter],
    data_size: int,
    clips: bool,
) -> Counter[str]:
    """Return what a rank sends for the gradients of a step.

    Args:
        models: divided.
        parameters: of the module around them.
        data_size: ranks that average their gradients.
        clips: by the norm of the whole gradient.
    """
    own = sum(p.nbytes for p in parameters if p.requires_grad)
    found = Counter({AVERAGE_TAG: ring_all_reduce_bytes(own, data_size)})
    for model in models:
        for p, spec in model.sharding.specs.items():
            if spec.overlapping and p.requires_grad:
                whole = p.nbytes // p.shape[spec.dim] * spec.size
                found[SHARED_TAG] += ring_all_reduce_bytes(whole, model.group.size)
    if clips:
        size = models[0].group.size
        found[NORM_TAG] += ring_all_reduce_bytes(torch.float32.itemsize, size)
    return found
