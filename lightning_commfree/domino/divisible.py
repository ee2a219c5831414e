"""Can this be shared equally? What is asked of a model's sizes before anything is changed."""

from __future__ import annotations

from torch import nn


def check_heads(name: str, heads: int, key_heads: int, ranks: int) -> None:
    """See that attention can be divided.

    Args:
        name: of the model's class.
        heads: of the queries.
        key_heads: of keys and values.
        ranks: of the tensor group.

    Raises:
        ValueError: heads or key heads do not fit the ranks.
    """
    if heads % ranks:
        raise ValueError(
            f"{name} has {heads} attention heads, which {ranks} tensor-parallel ranks cannot share"
            f" equally. Choose a `tensor_parallel_size` that divides {heads}."
        )
    if key_heads % ranks and ranks % key_heads:
        raise ValueError(
            f"{name} has {key_heads} key-value heads, and {ranks} tensor-parallel ranks can neither"
            " share them equally nor all hold one. Choose a `tensor_parallel_size` that divides"
            f" {key_heads} or is a multiple of it."
        )


def check_width(model: nn.Module, name: str, width: int, ranks: int) -> None:
    """See that an MLP can be divided.

    Args:
        model: around it.
        name: what the model's config calls the width.
        width: of the hidden layer.
        ranks: of the tensor group.

    Raises:
        ValueError: the width does not fit the ranks.
    """
    if width % ranks:
        raise ValueError(
            f"{type(model).__name__} has MLPs of width {width} (`{name}`), which {ranks}"
            f" tensor-parallel ranks cannot share equally. Choose a `tensor_parallel_size` that"
            f" divides {width}."
        )
