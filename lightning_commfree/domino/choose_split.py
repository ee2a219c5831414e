"""Which split a batch gets: not every batch can be split in the way that was asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_commfree.domino.settings import DominoSettings
from lightning_commfree.domino.splits import (
    BatchSplit,
    HybridSplit,
    NoSplit,
    Split,
    TokenSplit,
    WeightSplit,
    takes_cache,
)


def choose_split(
    settings: DominoSettings,
    hidden: Tensor,
    arguments: Mapping[str, Any],
    config: Any,
    fell_back: Callable[[str], None],
) -> Split:
    """Return the split of one batch.

    Args:
        settings: what was asked for, or chosen by `auto_split`.
        hidden: of the batch, shape (B, T, H).
        arguments: what transformers passes to a block besides it.
        config: of attention; None if there is none.
        fell_back: told why the batch is split in another way than asked for.
    """
    rows, tokens = hidden.shape[:2]
    parts, split = settings.num_micro_batches, settings.split
    if split == "hybrid":
        if rows >= 2:
            return HybridSplit(min(parts, rows))
        split = "weight"
        fell_back(
            f"A batch of {rows} cannot be split by rows (`split='hybrid'`); only the outputs of row"
            " linears are."
        )
    if split == "batch" and rows < 2:
        split = "token" if tokens >= 2 and is_causal(arguments, config) else "none"
        fell_back(
            f"A batch of {rows} cannot be split by rows (`split='batch'`); it is split by"
            f" {'tokens' if split == 'token' else 'nothing'} instead."
        )
    if split == "batch":
        return BatchSplit(min(parts, rows))

    flash = _is_flash(config)
    if split == "token" and flash and is_packed(arguments):
        split = "none"
        fell_back(
            "Flash attention is told where the examples of a packed row begin, for queries and"
            " keys alike, and a chunk has fewer queries: the row is split by nothing instead."
        )
    if split == "token" and tokens >= 2:
        return TokenSplit(min(parts, tokens), flash)
    return WeightSplit(parts) if split == "weight" else NoSplit()


def legal_splits(
    hidden: Tensor, arguments: Mapping[str, Any], attention: nn.Module | None
) -> list[str]:
    """Return the ways in which a batch may be split so that its sums are hidden, and "none".

    Args:
        hidden: of the batch, shape (B, T, H).
        arguments: what transformers passes to a block besides it.
        attention: of a block; None if there is none.
    """
    rows, tokens = hidden.shape[:2]
    config = getattr(attention, "config", None)
    packed_for_flash = _is_flash(config) and is_packed(arguments)
    by_token = (
        tokens >= 2
        and (attention is None or takes_cache(type(attention)))
        and not packed_for_flash
        and is_causal(arguments, config)
    )
    by_row = ["batch"] if rows >= 2 else []
    return ["none", *by_row, *(["token"] if by_token else [])]


def is_causal(arguments: Mapping[str, Any], config: Any) -> bool:
    """Return whether no token of a batch of one row sees a later one.

    Args:
        arguments: of a block.
        config: of its attention.
    """
    if False in (arguments.get("is_causal"), getattr(config, "is_causal", None)):
        return False
    mask = arguments.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        return True
    visible = mask if mask.dtype == torch.bool else mask == 0
    return not bool(visible.triu(1).any())


def is_packed(arguments: Mapping[str, Any]) -> bool:
    """Return whether a row holds several examples, as flash attention is told: without a mask."""
    if arguments.get("cu_seq_lens_q") is not None:
        return True
    positions = arguments.get("position_ids")
    return isinstance(positions, Tensor) and bool((positions.diff(dim=-1) != 1).any())


def _is_flash(config: Any) -> bool:
    return "flash" in str(getattr(config, "_attn_implementation", ""))
