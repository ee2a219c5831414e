"""What a module, its optimizers and its batches must be, so that its models can be divided."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.digest import digest
from lightning_commfree.comm.division import refuse_wrapped
from lightning_commfree.comm.handshake import check_agreement
from lightning_commfree.comm.materialize import on_meta
from lightning_commfree.domino.families import FAMILIES, family_of
from lightning_commfree.domino.parallel import check_divisible
from lightning_commfree.domino.plan import has_plan


def find_models(module: nn.Module) -> list[nn.Module]:
    """Return the outermost models inside that can be divided."""
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for child in module.modules():
        known = family_of(child) is not None or has_plan(child)
        if known and child not in inside and child is not module:
            found.append(child)
            inside.update(child.modules())
    return found


def check_module(strategy: str, module: nn.Module, ranks: int) -> None:
    """See that there is something to divide among so many ranks, as it is; nothing is changed.

    Args:
        strategy: for the messages.
        module: not divided yet.
        ranks: of a tensor group.

    Raises:
        ValueError: there is nothing, it is compiled, wrapped, is without values that nobody can
            give it, does not fit the ranks, or has adapters that cannot be divided.
    """
    refuse_wrapped(strategy, module)

    models = find_models(module)
    if not models:
        names = sorted({type(child).__name__ for child in module.children()})
        raise ValueError(
            f"`{strategy}` found no model in `{type(module).__name__}` that it can divide (its"
            f" children are {', '.join(names) or 'none'}). It divides {', '.join(FAMILIES)} of"
            " transformers, and other models of transformers whose config has a"
            " `base_model_tp_plan`."
        )

    _check_values(strategy, module, models)
    for model in models:
        check_divisible(model, ranks)


def refuse_meta(strategy: str, module: nn.Module) -> None:
    """Refuse, outside of a fit, a model without values.

    Raises:
        ValueError: it is on the `meta` device.
    """
    if without := on_meta(module):
        raise ValueError(
            f"{len(without)} tensors, {without[0]!r} among them, are on the meta device and hold no"
            f" values. `{strategy}` gives them some in `fit` only: call it first, or build the"
            " model on the CPU."
        )


def check_states(optimizers: Iterable[Optimizer], parts: Set[nn.Parameter]) -> None:
    """See that optimizers keep numbers for single elements, after their first step.

    A number for a whole row or column of a parameter would be one for a part of it here. No
    checkpoint could put those together.

    Args:
        optimizers: of the fit.
        parts: parameters of which this rank holds a part.

    Raises:
        ValueError: the state of a part has another shape than the parameter.
    """
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for key, value in state.items() if parameter in parts else ():
                other = isinstance(value, Tensor) and value.numel() > 1
                if other and value.shape != parameter.shape:
                    raise ValueError(
                        f"`{type(optimizer).__name__}` keeps a {key!r} of shape"
                        f" {tuple(value.shape)} for a parameter of shape"
                        f" {tuple(parameter.shape)}, which is a part of a divided one: it would"
                        " train something else than on the whole one. Take an optimizer that treats"
                        " elements one by one, such as AdamW, SGD or Lion."
                    )


def check_batch(channel: Channel, verb: str, batch: Any) -> None:
    """See that all ranks of a tensor group have the same batch; collective.

    Args:
        channel: to the tensor group.
        verb: what is done with it.
        batch: tensors in whatever.

    Raises:
        ValueError: they differ; on all of them alike.
    """
    tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    found = [f"{tuple(t.shape)} {int(digest(t.contiguous()))}" for t in tensors]
    try:
        check_agreement(channel, {"the first batch": " ".join(found)})
    except ValueError as error:
        raise ValueError(
            f"The ranks of a tensor group must {verb} on the same batch, and their first batches"
            f" differ: ranks {list(channel.ranks)}. Let Lightning put its own sampler in, or give"
            " your sampler `num_replicas` and `rank` of `trainer.distributed_sampler_kwargs`."
        ) from error


def _check_values(strategy: str, module: nn.Module, models: Sequence[nn.Module]) -> None:
    known = [model for model in models if family_of(model) is not None]
    empty = [model for model in known if all(p.is_meta for p in model.parameters())]
    gets_values = {id(t) for model in empty for t in (*model.parameters(), *model.buffers())}

    tensors = dict([*module.named_parameters(), *module.named_buffers()])
    left = [name for name in on_meta(module) if id(tensors[name]) not in gets_values]
    if left:
        raise ValueError(
            f"{len(left)} tensors, {left[0]!r} among them, are on the meta device and hold no"
            f" values. `{strategy}` gives values to a {', '.join(FAMILIES)} of which all parameters"
            " are there, and to nothing else: build the rest on the CPU."
        )
