"""The blocks of a model: the equal modules, one behind the other, that most of it consists of.

A *block* is an element of a list of equal modules, like `transformer.h` of GPT-2, `model.layers` of
Llama, `encoder.block` and `decoder.block` of T5: in every outermost `ModuleList` or `Sequential`
with at least two children, all of one class, each child is a block.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def block_names(module: nn.Module, prefix: str = "") -> Iterator[str]:
    """Yield the names of the blocks below `module`, in the order of the model."""
    children = list(module.named_children())
    is_list = isinstance(module, nn.ModuleList | nn.Sequential)
    if is_list and len(children) > 1 and len({type(child) for _, child in children}) == 1:
        yield from (prefix + name for name, _ in children)
        return

    for name, child in children:
        yield from block_names(child, f"{prefix}{name}.")
