"""LoRA beside divided linears: peft's layers stay, and what they hold is divided with their base.

y = x W + s (x A) B, with W, A and B in the field's order of (in, out):

=============  =====================  ====================  =======================================
linear         A, (in, r)             B, (r, out)           whose gradient is added up
=============  =====================  ====================  =======================================
column         whole on every rank    a rank's outputs      A's: each rank has that of its outputs
row            a rank's inputs        whole on every rank   B's: each rank has that of its inputs
=============  =====================  ====================  =======================================

A rank's product of a row linear is a summand, and so is that of its adapter: one sum serves both,
and under a schedule nothing else is sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lightning_commfree.domino.layers import spread, summed
from lightning_commfree.domino.shard_spec import ShardSpec

if TYPE_CHECKING:
    from lightning_commfree.domino.sharding import Sharding

_LORA = ("peft.tuners.lora.layer", "Linear")


def is_adapted(module: nn.Module) -> bool:
    """Return whether a module is an adapter around a layer, by peft's name for the layer."""
    return isinstance(getattr(module, "base_layer", None), nn.Module)


def base_of(module: Any) -> Any:
    """Return the layer inside an adapter, or the module itself."""
    return module.base_layer if is_adapted(module) else module


def has_adapters(model: nn.Module) -> bool:
    """Return whether some layer of a model has an adapter."""
    return any(is_adapted(module) for module in model.modules())


def check_adapters(model: nn.Module, vocabulary: tuple[nn.Module, ...]) -> None:
    """See that a model's adapters can be divided.

    Args:
        model: not divided yet.
        vocabulary: its embedding and head.

    Raises:
        ValueError: one is of another kind, at another place, or has what is not divided here.
    """
    for name, module in model.named_modules():
        if is_adapted(module) and (why := _why_not(module, vocabulary)):
            raise ValueError(
                f"'{name}', a `{type(module).__name__}`, is an adapter that cannot be divided:"
                f" {why} LoRA of linear layers in the blocks is divided; nothing was changed."
            )


def divide_column(sharding: Sharding, layer: Any, spec: ShardSpec) -> None:
    """Divide the adapters of a column linear.

    Args:
        sharding: of the model.
        layer: peft's.
        spec: of the outputs, the first dimension.
    """
    group = sharding.group

    def before(_: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
        return given if group.scheduled else (spread(given[0], group),)

    for name in layer.lora_A:
        down, up = layer.lora_A[name], layer.lora_B[name]
        sharding.share(down)
        up.weight = sharding.part(up.weight, spec)
        sharding.restore.append(down.register_forward_pre_hook(before).remove)


def divide_row(sharding: Sharding, layer: Any) -> None:
    """Divide the adapters of a row linear.

    Args:
        sharding: of the model.
        layer: peft's.
    """
    group = sharding.group

    def after(_: nn.Module, given: Any, partial: Tensor) -> Tensor:
        return partial if group.scheduled else summed(partial, group)

    for name in layer.lora_A:
        down, up = layer.lora_A[name], layer.lora_B[name]
        down.weight = sharding.part(
            down.weight, ShardSpec.even(1, down.weight.shape[1], group.size)
        )
        sharding.share(up)
        sharding.restore.append(up.register_forward_hook(after).remove)


def _why_not(module: Any, vocabulary: tuple[nn.Module, ...]) -> str:
    if (type(module).__module__, type(module).__name__) != _LORA:
        return "it is no LoRA of a plain linear layer."
    if any(module is known for known in vocabulary):
        return "it is around the embedding or the head."
    if module.lora_variant:
        return "DoRA and other variants need whole weights."
    if any(module.lora_bias.values()):
        return "`lora_bias` would be added once by every rank. Leave it out."
    if any(not isinstance(dropout, nn.Identity) for dropout in module.lora_dropout.values()):
        return "its dropout would differ from rank to rank. Take `lora_dropout=0`."
    if any(parameter.is_meta for parameter in module.parameters()):
        return "it is on the meta device. Build the model on the CPU."
    return ""
