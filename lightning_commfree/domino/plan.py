"""Dividing a model by the tensor-parallel plan in its config; nothing is scheduled.

A plan of transformers gives names, with `*` for any part of one, a style:

=================================  =================================================
style                              what is done
=================================  =================================================
`colwise`, of a linear             each rank holds some outputs
`rowwise`, of a linear             each rank holds some inputs
`replicated_with_grad_allreduce`   whole on every rank, gradients added up
any, of an embedding               whole on every rank
=================================  =================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatch
from typing import Any

from torch import nn

from lightning_commfree.domino.divisible import check_heads
from lightning_commfree.domino.shard_spec import ShardSpec
from lightning_commfree.domino.sharding import Sharding, column, row, shared_by_heads

_LINEAR_STYLES = ("colwise", "rowwise")
_SHARED_STYLE = "replicated_with_grad_allreduce"


def plan_of(model: nn.Module) -> Mapping[str, str]:
    """Return the tensor-parallel plan in a model's config; empty for none."""
    plan = getattr(getattr(model, "config", None), "base_model_tp_plan", None)
    return plan or {}


def has_plan(model: nn.Module) -> bool:
    """Return whether this is a model of transformers whose config has a plan."""
    return bool(plan_of(model)) and hasattr(model, "base_model_prefix")


def check_plan(model: Any, ranks: int) -> None:
    """See that a plan can be followed, all of it; nothing is changed.

    Raises:
        ValueError: it has a style that is not known here, or heads do not fit the ranks.
    """
    name = type(model).__name__
    for path, style, module in _styled(model):
        if isinstance(module, nn.Embedding) or style == _SHARED_STYLE:
            continue
        if style not in _LINEAR_STYLES or not isinstance(module, nn.Linear):
            raise ValueError(
                f"The tensor-parallel plan of `{name}` divides '{path}', a"
                f" `{type(module).__name__}`, as {style!r}, which is not supported: 'colwise' and"
                " 'rowwise' are, of linear layers. Nothing was changed; train it with another"
                " strategy."
            )

    config = model.config
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    check_heads(name, heads, key_heads, ranks)

    if key_heads % ranks:
        raise ValueError(
            f"{name} has {key_heads} key-value heads; by its plan {ranks} ranks cannot"
            f" share them. Choose a `tensor_parallel_size` that divides {key_heads}."
        )


def apply_plan(sharding: Sharding) -> None:
    """Divide a model by its plan, which `check_plan` has seen."""
    base, ranks = _base(sharding.model), sharding.group.size

    for path, style, module in _styled(sharding.model):
        if isinstance(module, nn.Embedding):
            continue
        if style == _SHARED_STYLE:
            assert isinstance(module, nn.Module), "a style of single parameters is refused"
            shared_by_heads(sharding, module)
            continue

        parent_path, _, child = path.rpartition(".")
        parent = base.get_submodule(parent_path)
        assert isinstance(module, nn.Linear), "another one is refused"
        if style == "colwise":
            column(sharding, parent, child, ShardSpec.even(0, module.weight.shape[0], ranks))
        else:
            row(sharding, parent, child)


def _styled(model: nn.Module) -> list[tuple[str, str, nn.Module | nn.Parameter]]:
    """Return path, style and what lies there, of all that the plan names: experts are parameters.

    A name that is not there stands for a layer that some configurations of the model have.
    """
    base, plan = _base(model), plan_of(model)
    found: list[tuple[str, str, nn.Module | nn.Parameter]] = []
    for path, owner in [*base.named_modules(), *base.named_parameters()]:
        style = next((style for pattern, style in plan.items() if fnmatch(path, pattern)), None)
        if style is not None:
            found.append((path, style, owner))
    return found


def _base(model: Any) -> nn.Module:
    base: nn.Module = getattr(model, model.base_model_prefix, model)
    return base
