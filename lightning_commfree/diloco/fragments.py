"""Split a model into fragments (arXiv:2501.18512, section 2.2 and Figure 3).

A *block* is one of the repeated modules that make up most of a model (`model.blocks`). The last of
the P fragments contains the parameters outside the blocks (embeddings, final norm, head). A
pattern distributes the blocks over the other G fragments:

- "strided" (the paper's choice): block i goes to fragment i mod G, so that each fragment is spread
  over the depth of the model.
- "sequential": each fragment gets consecutive blocks, about the same number per fragment.
- "balanced": tensors are assigned instead of blocks, largest first, each to whichever of the P
  fragments has the fewest bytes so far.

The fragments partition the trainable parameters; a tied weight is in one fragment, under its first
name. Persistent floating-point buffers (BatchNorm statistics) belong to their module's fragment.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_commfree.model.blocks import block_names
from lightning_commfree.model.replication import persistent_buffers
from lightning_commfree.model.shards import local_tensor
from lightning_commfree.model.trained import trained_parameters

PATTERNS = ("strided", "sequential", "balanced")
_BLOCKS_PER_FRAGMENT = 3  # as at every scale in the paper (section 3.1)
_BALANCED_WITHOUT_BLOCKS = 4  # default number of "balanced" fragments if there are no blocks


@dataclass(frozen=True)
class Fragment:
    """Names of the parameters and buffers that are exchanged together."""

    parameters: tuple[str, ...]
    buffers: tuple[str, ...] = ()


def split_into_fragments(
    module: nn.Module,
    num_fragments: int | None,
    pattern: str,  # one of `PATTERNS`
    optimizers: Iterable[Optimizer] = (),
) -> list[Fragment]:
    """Split the trained parameters (`trained_parameters`) and the averaged buffers into fragments.

    With `num_fragments=None`, 3 blocks per fragment, plus one fragment for everything else; without
    blocks, a single fragment, or up to 4 with "balanced". Raise a `ValueError` if no parameter is
    trained, one cannot be exchanged, or there are too few blocks or tensors.
    """
    parameters = trained_parameters(module, optimizers)
    _check_parameters(parameters)
    blocks = [b for b in block_names(module) if any(_inside(name, b) for name in parameters)]
    rest = [name for name in parameters if not any(_inside(name, block) for block in blocks)]

    if num_fragments is not None:
        count = num_fragments
    elif blocks:
        count = math.ceil(len(blocks) / _BLOCKS_PER_FRAGMENT) + bool(rest)
    else:
        count = min(_BALANCED_WITHOUT_BLOCKS, len(parameters)) if pattern == "balanced" else 1

    if pattern == "balanced":
        groups = _balanced(parameters, count)
    elif count == 1:
        groups = [list(parameters)]
    else:
        groups = _by_blocks(list(parameters), blocks, rest, count, pattern)

    buffers = _buffers_by_group(groups, module)
    return [Fragment(tuple(p), tuple(b)) for p, b in zip(groups, buffers, strict=True)]


def has_blocks(module: nn.Module) -> bool:
    """Return whether the model has repeated blocks (`model.blocks`) with trainable parameters."""
    names = [name for name, p in module.named_parameters() if p.requires_grad]
    return any(_inside(name, block) for block in block_names(module) for name in names)


def averaged_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that replicas average, by name: all persistent floating-point buffers."""
    # integers are counters, and non-persistent buffers are tables rebuilt from the config
    return {name: b for name, b in persistent_buffers(module).items() if b.is_floating_point()}


def _inside(name: str, module_name: str) -> bool:
    return name.startswith(module_name + ".")


def _by_blocks(
    parameters: list[str], blocks: list[str], rest: list[str], count: int, pattern: str
) -> list[list[str]]:
    """Return groups of names: blocks, distributed by `pattern`, and the rest as the last group.

    Raise a ValueError if `count` is too large.
    """
    most = max(len(blocks) + bool(rest and blocks), 1)
    if count > most:
        raise ValueError(
            f"`num_fragments={count}` is too large for this model with"
            f" `fragment_pattern={pattern!r}`: it has {len(blocks)} blocks"
            f"{' and other parameters' if rest else ''}, so the maximum is {most}. Lower"
            " `num_fragments`, or use `fragment_pattern='balanced'`, which can split blocks."
        )

    num_groups = count - bool(rest)
    groups: list[list[str]] = [[] for _ in range(num_groups)]
    for i, block in enumerate(blocks):
        group = i % num_groups if pattern == "strided" else i * num_groups // len(blocks)
        groups[group] += [name for name in parameters if _inside(name, block)]

    return [*groups, rest] if rest else groups


def _balanced(parameters: Mapping[str, nn.Parameter], count: int) -> list[list[str]]:
    """Return `count` groups of names, of about equal bytes; raise a ValueError if too many."""
    if count > len(parameters):
        raise ValueError(
            f"`num_fragments={count}` is too large for this model: it has"
            f" {len(parameters)} trainable tensors. Choose at most {len(parameters)}."
        )

    order = {name: i for i, name in enumerate(parameters)}
    filled_bytes = [0] * count
    groups: list[list[str]] = [[] for _ in range(count)]

    for name in sorted(parameters, key=lambda name: (-parameters[name].nbytes, order[name])):
        # break ties by number of tensors, or tensors without elements might leave a fragment empty
        emptiest = min(range(count), key=lambda p: (filled_bytes[p], len(groups[p]), p))
        filled_bytes[emptiest] += parameters[name].nbytes
        groups[emptiest].append(name)

    return [sorted(group, key=order.__getitem__) for group in groups]


def _buffers_by_group(groups: list[list[str]], module: nn.Module) -> list[list[str]]:
    """Assign each averaged buffer to the group with the most parameters of the buffer's module."""
    buffers: list[list[str]] = [[] for _ in groups]
    for name in averaged_buffers(module):
        owner = name.rpartition(".")[0]
        siblings = [0]
        # a module may have no parameters (BatchNorm with `affine=False`): try its parents
        while owner and not any(siblings):
            siblings = [sum(_inside(p, owner) for p in group) for group in groups]
            owner = owner.rpartition(".")[0]

        buffers[siblings.index(max(siblings)) if any(siblings) else -1].append(name)
    return buffers


def _check_parameters(parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise a ValueError if there is no parameter, or one cannot be exchanged."""
    if not parameters:
        raise ValueError(
            "The module has no trainable parameters, so there is nothing to synchronize. Set"
            " `requires_grad=True` on some parameters, before `fit` or in `configure_model`."
        )

    names_by_memory: dict[int, str] = {}
    for name, parameter in parameters.items():
        if not parameter.is_floating_point():
            raise ValueError(
                f"The parameter {name!r} has dtype {parameter.dtype}, but only real floating-point"
                " parameters can be exchanged. Set `requires_grad=False` on it, or make it a"
                " buffer."
            )

        memory = local_tensor(parameter)
        twin = names_by_memory.setdefault(memory.data_ptr(), name) if memory.numel() else name
        if twin != name:
            raise ValueError(
                f"The parameters {twin!r} and {name!r} share memory but are two `Parameter`"
                " objects, so they would be synchronized twice. Tie them by assignment:"
                " `module_b.weight = module_a.weight`."
            )
