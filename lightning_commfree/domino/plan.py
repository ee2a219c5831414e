"""Shard a model according to the tensor-parallel plan in its config, without a schedule.

Such a plan (`base_model_tp_plan`) maps module names, where `*` is a wildcard, to styles:

=================================  ==============================================================
style                              sharding
=================================  ==============================================================
`colwise`, for a linear            by outputs
`colwise_gather_output`            by outputs, which are gathered afterwards
`rowwise`, for a linear            by inputs
`rowwise_split_input`              by inputs, sliced from an input that every rank has in full
`moe_tp_experts`                   by the hidden layer of every expert
`replicated_with_grad_allreduce`   none: full on every rank, with gradients summed
any, for an embedding              along the vocabulary, like the head, if both are plain layers
=================================  ==============================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatch
from typing import Any

from torch import nn

from lightning_commfree.domino.layers import ColumnLinear, GatheredLinear, RowLinear, SplitRowLinear
from lightning_commfree.domino.sharding import (
    Sharding,
    ShardSpec,
    check_heads,
    column,
    experts,
    has_adapters,
    row,
    vocabulary,
)

_COLUMNS = {
    "colwise": ColumnLinear,
    "colwise_gather_output": GatheredLinear,
    "colwise_rep": GatheredLinear,  # older name of the same style
}
_ROWS = {
    "rowwise": RowLinear,
    "rowwise_split_input": SplitRowLinear,
    "rowwise_rep": SplitRowLinear,
}
_FULL_ACTIVATIONS = (GatheredLinear, SplitRowLinear)  # full output, or full input, on every rank
_EXPERTS_STYLE = "moe_tp_experts"
_SHARED_STYLE = "replicated_with_grad_allreduce"


def plan_of(model: nn.Module) -> Mapping[str, str]:
    """Return the tensor-parallel plan in a model's config, or {} if there is none."""
    plan = getattr(getattr(model, "config", None), "base_model_tp_plan", None)
    return plan or {}


def has_plan(model: nn.Module) -> bool:
    """Return whether a module is a transformers model whose config has a tensor-parallel plan."""
    # check the class: a peft wrapper forwards attribute access to the model inside
    return bool(plan_of(model)) and hasattr(type(model), "base_model_prefix")


def check_plan(model: Any, num_ranks: int) -> None:
    """Raise a `ValueError` if a model cannot be sharded according to its plan; change nothing."""
    name, shards_heads = type(model).__name__, False
    if has_adapters(model):
        raise ValueError(
            f"`{name}` has adapters, which the tensor-parallel plan in its config does not cover."
            " The model is unchanged; train it with another strategy."
        )
    for path, style, module in _matched(model):
        if isinstance(module, nn.Embedding) or style == _SHARED_STYLE:
            continue
        if style == _EXPERTS_STYLE and (width := _experts_width(module)):
            _check_even(name, path, width, num_ranks)
        elif isinstance(module, nn.Linear) and style in (*_COLUMNS, *_ROWS):
            kind = _COLUMNS.get(style) or _ROWS[style]
            if kind in _FULL_ACTIVATIONS:
                width = module.out_features if style in _COLUMNS else module.in_features
                _check_even(name, path, width, num_ranks)
            elif "att" in path:  # `self_attn`, `attention`, `attn`
                shards_heads = True
        else:
            known = ", ".join(map(repr, (*_COLUMNS, *_ROWS)))
            raise ValueError(
                f"The tensor-parallel plan of `{name}` assigns the unsupported style {style!r} to"
                f" '{path}', a `{type(module).__name__}`. Supported styles: {known} for linear"
                f" layers, and {_EXPERTS_STYLE!r} for experts with `gate_up_proj` and `down_proj`."
                " The model is unchanged; train it with another strategy."
            )
    if shards_heads:  # if all queries and keys are gathered instead, heads may be split anywhere
        _check_heads(model, name, num_ranks)


def _check_even(model_name: str, path: str, width: int, num_ranks: int) -> None:
    """Raise a `ValueError` if a width cannot be split evenly."""
    if width % num_ranks:
        raise ValueError(
            f"{model_name} has a width of {width} at '{path}', which cannot be split evenly across"
            f" {num_ranks} tensor-parallel ranks. Choose a `tensor_parallel_size` that divides"
            f" {width}."
        )


def _check_heads(model: Any, model_name: str, num_ranks: int) -> None:
    """Raise a `ValueError` if heads, or key-value heads, cannot be split evenly."""
    heads = model.config.num_attention_heads
    key_heads = getattr(model.config, "num_key_value_heads", None) or heads
    check_heads(model_name, heads, key_heads, num_ranks)

    if key_heads % num_ranks:
        raise ValueError(
            f"{model_name} has {key_heads} key-value heads, which its plan cannot split evenly"
            f" across {num_ranks} tensor-parallel ranks. Choose a `tensor_parallel_size` that"
            f" divides {key_heads}."
        )


def apply_plan(sharding: Sharding) -> None:
    """Shard a model according to its plan; call `check_plan` first."""
    base, ranks = _base_model(sharding.model), sharding.group.size

    for path, style, module in _matched(sharding.model):
        if isinstance(module, nn.Embedding):
            continue
        if style == _SHARED_STYLE:
            assert isinstance(module, nn.Module), "`check_plan` refuses single parameters"
            sharding.mark_partial_gradients(module)  # a rank's gradient covers only its own heads
            continue
        if style == _EXPERTS_STYLE:
            experts(sharding, module)
            continue

        parent_path, _, child = path.rpartition(".")
        parent = base.get_submodule(parent_path)
        assert isinstance(module, nn.Linear), "`check_plan` refuses anything else"
        if style in _COLUMNS:
            spec = ShardSpec.even(0, module.weight.shape[0], ranks)
            column(sharding, parent, child, spec, _COLUMNS[style])
        else:
            row(sharding, parent, child, _ROWS[style])
    _shard_vocabulary(sharding)


def _shard_vocabulary(sharding: Sharding) -> None:
    """Shard the embedding and the head along the vocabulary, if both are plain layers used once."""
    # otherwise every rank keeps both in full: a subclass may scale its output, and with several
    # parents other code may read the weight
    model: Any = sharding.model
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    plain = type(embedding) is nn.Embedding and type(head) is nn.Linear
    if not plain or embedding.weight.shape != head.weight.shape or embedding.max_norm is not None:
        return

    places = [
        [
            (owner, name)
            for owner in model.modules()
            for name, m in owner.named_children()
            if m is known
        ]
        for known in (embedding, head)
    ]
    if all(len(found) == 1 for found in places):
        vocabulary(sharding, *(found[0] for found in places))


def _experts_width(module: nn.Module | nn.Parameter) -> int:
    """Return the hidden width of experts, or 0 if `sharding.experts` cannot shard the module."""
    if not isinstance(module, nn.Module):
        return 0
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    down = shapes.get("down_proj", ())
    if shapes.keys() != {"gate_up_proj", "down_proj"} or len(down) != 3:
        return 0
    number, hidden, width = down
    return width if shapes["gate_up_proj"] == (number, 2 * width, hidden) else 0


def _matched(model: nn.Module) -> list[tuple[str, str, nn.Module | nn.Parameter]]:
    """Return the modules and parameters that the plan matches, as (path, style, object)."""
    base, plan = _base_model(model), plan_of(model)
    found: list[tuple[str, str, nn.Module | nn.Parameter]] = []
    experts_paths: set[str] = set()  # their parameters are sharded with the module
    for path, owner in [*base.named_modules(), *base.named_parameters()]:
        style = next((style for pattern, style in plan.items() if fnmatch(path, pattern)), None)
        if style is None or path.rpartition(".")[0] in experts_paths:
            continue
        if style == _EXPERTS_STYLE:
            experts_paths.add(path)
        found.append((path, style, owner))
    return found


def _base_model(model: Any) -> nn.Module:
    """Return the model without its head, or `model` itself if it has no such part."""
    base: nn.Module = getattr(model, model.base_model_prefix, model)
    return base
