"""Find the transformer blocks of a model, the repeated modules that make up most of it.

A block is a child of a `ModuleList` or `Sequential` that is not inside another block and has at
least two children, all of the same class: `transformer.h` of GPT-2, `model.layers` of Llama,
`encoder.block` and `decoder.block` of T5.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import nn


def block_names(module: nn.Module, prefix: str = "") -> Iterator[str]:
    """Yield the names of the blocks in `module`, in model order."""
    children = list(module.named_children())
    is_list = isinstance(module, nn.ModuleList | nn.Sequential)
    if is_list and len(children) > 1 and len({type(child) for _, child in children}) == 1:
        yield from (prefix + name for name, _ in children)
        return

    for name, child in children:
        yield from block_names(child, f"{prefix}{name}.")


def is_compiled_submodule(module: nn.Module) -> bool:
    """Return whether this module itself, rather than a parent or child, was compiled.

    Both `torch.compile(module)` and `module.compile()` count as compiling it.
    """
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None


def outermost(module: nn.Module, class_names: Collection[str]) -> list[str]:
    """Return the names of the outermost submodules of the named classes, in model order.

    Raise a ValueError if `module` has no submodule of one of the classes, or has one only inside a
    submodule of another.
    """
    found: list[str] = []
    seen: set[str] = set()
    for name, child in module.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if name and type(child).__name__ in class_names and not inside:
            found.append(name)
            seen.add(type(child).__name__)
    if missing := [name for name in class_names if name not in seen]:
        known = sorted({type(child).__name__ for child in module.modules() if child is not module})
        raise ValueError(
            f"`units` contains {', '.join(map(repr, missing))}, but `{type(module).__name__}` has"
            " no submodule of that class, or has one only inside another unit. Choose from its"
            f" classes: {', '.join(known)}."
        )
    return found
