"""Forecast the bytes that each rank of a tensor group sends in a training step, by ledger tag.

==================  ==================================================================
tag                 payload
==================  ==================================================================
`tensor_forward`    tokens x hidden size, for each sublayer and the embedding
`tensor_backward`   tokens x hidden size, for each sublayer and the head
`tensor_loss`       3 numbers per token
`tensor_shared`     gradients of parameters that several ranks of a tensor group hold
`tensor_norm`       one number, if gradients are clipped by their norm
==================  ==================================================================

Under autocast, forward activations are sent in the autocast dtype. Everything else is sent in the
dtype of the parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from lightning_commfree.comm.ledger import all_gather_bytes, ring_all_reduce_bytes
from lightning_commfree.domino.gradients import NORM_TAG, SHARED_TAG
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

# tag; formula for the bytes sent, given payload and group size; payload in bytes per token
Collective = tuple[str, Callable[[int, int], int], int]


def bytes_per_step(
    models: Sequence[ParallelModel],
    tokens_per_step: int,  # of a tensor group
    autocast_dtype: torch.dtype | None,  # None without autocast
    clips_by_norm: bool,
) -> Counter[str]:
    """Return the bytes that a rank sends to its tensor group per optimizer step, by tag.

    Models that can compute their own loss (`labels=`) are assumed to do so.
    """
    sent = Counter[str]()
    size = models[0].group.size
    if clips_by_norm:
        sent[NORM_TAG] += ring_all_reduce_bytes(torch.float32.itemsize, size)
    for model in models:
        # `sum_shared` sends the full shape, with zeros outside this rank's shard
        for parameter, spec in model.sharding.specs.items():
            if spec.overlapping and parameter.requires_grad:
                full = parameter.nbytes // parameter.shape[spec.dim] * spec.size
                sent[SHARED_TAG] += ring_all_reduce_bytes(full, size)
        for tag, formula, payload in _collectives(model, autocast_dtype):
            sent[tag] += formula(payload, size) * tokens_per_step
    return sent


def _collectives(model: ParallelModel, autocast_dtype: torch.dtype | None) -> Iterator[Collective]:
    """Yield a (tag, formula, payload) tuple for each collective in a forward and backward pass."""
    for module in model.sharding.model.modules():
        if isinstance(module, ColumnLinear | RowLinear):
            yield from _linear_collectives(module, model.scheduled, autocast_dtype)
        elif isinstance(module, VocabEmbedding):
            yield FORWARD_TAG, ring_all_reduce_bytes, module.weight[0].nbytes
        elif isinstance(module, VocabHead):
            weight = module.weight
            yield BACKWARD_TAG, ring_all_reduce_bytes, weight[0].nbytes
            if model.shards_loss:
                yield LOSS_TAG, all_gather_bytes, 3 * max(weight.itemsize, 4)
            else:
                logits = len(weight) * (autocast_dtype or weight.dtype).itemsize
                yield FORWARD_TAG, all_gather_bytes, logits

    config: Any = model.sharding.model.config
    for experts in model.sharding.experts:
        down: Any = experts.down_proj
        hidden, chosen = down.shape[1], config.num_experts_per_tok
        yield FORWARD_TAG, ring_all_reduce_bytes, hidden * down.itemsize
        yield BACKWARD_TAG, ring_all_reduce_bytes, hidden * down.itemsize
        yield BACKWARD_TAG, ring_all_reduce_bytes, chosen * down.itemsize  # the router's weights


def _linear_collectives(
    module: ColumnLinear | RowLinear, scheduled: bool, autocast_dtype: torch.dtype | None
) -> Iterator[Collective]:
    """Yield a (tag, formula, payload) tuple for each collective of one linear layer."""
    weight = module.weight
    outputs, inputs = reversed(weight.shape) if module.transposed else weight.shape
    item, forward_item = weight.itemsize, (autocast_dtype or weight.dtype).itemsize
    if isinstance(module, RowLinear):
        yield FORWARD_TAG, ring_all_reduce_bytes, outputs * forward_item
        if scheduled:  # the gradient of the sublayer's input, which is as wide as its output
            yield BACKWARD_TAG, ring_all_reduce_bytes, outputs * item
    elif not scheduled:  # each column linear all-reduces the gradient of its own input
        yield BACKWARD_TAG, ring_all_reduce_bytes, inputs * item
    if isinstance(module, GatheredLinear):
        yield FORWARD_TAG, all_gather_bytes, outputs * forward_item
    elif isinstance(module, SplitRowLinear):
        yield BACKWARD_TAG, all_gather_bytes, inputs * forward_item
