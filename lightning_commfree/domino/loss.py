"""Cross entropy over a vocabulary that is sharded across ranks, without gathering logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_commfree.domino.layers import TensorGroup

LOSS_TAG = "tensor_loss"


class _CrossEntropy(torch.autograd.Function):
    """Cross entropy of each position: log-sum-exp of the logits, minus the target's logit.

    Name suffixes are dimensions: N positions, V vocabulary entries on this rank, R ranks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits_NV: Tensor,
        targets_N: Tensor,
        first_id: int,
        num_words: int,
        group: TensorGroup,
    ) -> Tensor:
        width = logits_NV.shape[1]
        if first_id + width > num_words:  # padding must get probability 0
            logits_NV = logits_NV.clone()
            logits_NV[:, max(num_words - first_id, 0) :] = float("-inf")

        # a rank that holds only padding would have a maximum of -inf, and exp(-inf + inf) is NaN
        lowest = torch.finfo(logits_NV.dtype).min
        largest_N = logits_NV.amax(1).clamp(min=lowest)
        exponentials_NV = (logits_NV - largest_N.unsqueeze(1)).exp()

        local_N = targets_N - first_id
        mine_N = (local_N >= 0) & (local_N < width)
        index_N = local_N.masked_fill(~mine_N, 0).unsqueeze(1)
        found_N = logits_NV.gather(1, index_N).squeeze(1).masked_fill(~mine_N, 0.0)

        # one collective instead of two (maximum, then sum): each rank sends its sum relative to its
        # own maximum, and all sums are rescaled to the common maximum afterwards
        own = torch.stack([largest_N, exponentials_NV.sum(1), found_N])
        largest_RN, sums_RN, found_RN = group.channel.all_gather(own, LOSS_TAG).wait().unbind(1)
        common_N = largest_RN.amax(0)
        total_N = (sums_RN * (largest_RN - common_N).exp()).sum(0)

        scale_N = (largest_N - common_N).exp() / total_N
        # backward needs only the softmax, which reuses the memory of the exponentials
        ctx.save_for_backward(exponentials_NV.mul_(scale_N.unsqueeze(1)), index_N, mine_N)
        losses_N: Tensor = total_N.log() + common_N - found_RN.sum(0)
        return losses_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient_N,) = grads
        shares_NV, index_N, mine_N = ctx.saved_tensors
        result = shares_NV * gradient_N.unsqueeze(1)
        # softmax minus one-hot target: subtract 1 on the rank that holds the target
        result.scatter_add_(1, index_N, -(gradient_N * mine_N).unsqueeze(1))
        return result, None, None, None, None


def vocab_cross_entropy(
    logits: Tensor,  # (N, V / t), floating point: this rank's part of the vocabulary
    targets: Tensor,  # (N,), int64, the same on all ranks; ids outside the vocabulary go unnoticed
    first_id: int,  # this rank's first token id
    num_words: int,  # size of the vocabulary without padding
    group: TensorGroup,
) -> Tensor:
    """Compute each position's cross entropy from logits sharded by vocabulary; collective.

    Returns the losses, shape (N,), dtype of `logits`; the same on all ranks of the group.
    """
    loss: Tensor = _CrossEntropy.apply(logits, targets, first_id, num_words, group)  # type: ignore[no-untyped-call]
    return loss


def causal_lm_loss(group: TensorGroup, first_id: int, num_words: int) -> Callable[..., Tensor]:
    """Return a replacement for transformers' `ForCausalLMLoss` that takes this rank's logits."""

    def loss_function(
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        if shift_labels is None:
            shift_labels = pad(labels, (0, 1), value=ignore_index)[..., 1:]
        targets = shift_labels.reshape(-1).to(logits.device)
        counted = targets != ignore_index

        flat = logits.reshape(-1, logits.shape[-1])
        # as in transformers: sums of exponentials over a large vocabulary need float32
        flat = flat.float() if flat.dtype in (torch.float16, torch.bfloat16) else flat

        each = vocab_cross_entropy(
            flat, targets.masked_fill(~counted, 0), first_id, num_words, group
        )
        total = each.masked_fill(~counted, 0.0).sum()
        return total / (counted.sum() if num_items_in_batch is None else num_items_in_batch)

    return loss_function
