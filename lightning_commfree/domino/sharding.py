"""Dividing an unmodified transformers model among the ranks of a tensor group, in place.

Parameter names stay what they are. `Sharding` remembers how each tensor was divided, so that whole
ones can be made again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.materialize import Materializer
from lightning_commfree.domino.adapters import divide_column, divide_row, is_adapted
from lightning_commfree.domino.group import TensorGroup
from lightning_commfree.domino.layers import (
    ColumnLinear,
    DropoutAfterSum,
    RowLinear,
    VocabEmbedding,
    VocabHead,
    spread,
    summed,
)
from lightning_commfree.domino.shard_spec import ShardSpec
from lightning_commfree.domino.sublayers import Sublayer


@dataclass
class Sharding:
    """A divided model.

    Attributes:
        model: the transformers model, changed in place.
        group: the tensor group.
        materializer: gives layers values that have none.
        specs: of the parameters that are divided; the others are whole on every rank.
        blocks: of the stack, in order; empty if no schedule is known for the model.
        sublayers: of the blocks; as many of each.
        experts: modules whose parameters are experts, divided.
        embedding_is_stream: the first block gets the embedding as it is.
        restore: puts the original modules back, for parameters that are whole again.
    """

    model: nn.Module
    group: TensorGroup
    materializer: Materializer
    specs: dict[nn.Parameter, ShardSpec] = field(default_factory=dict)
    blocks: nn.ModuleList = field(default_factory=nn.ModuleList)
    sublayers: list[Sublayer] = field(default_factory=list)
    experts: list[nn.Module] = field(default_factory=list)
    embedding_is_stream: bool = False
    restore: list[Callable[[], None]] = field(default_factory=list)

    def replace(self, parent: nn.Module, name: str, new: nn.Module) -> None:
        """Put `new` in the place of a child, until `restore`."""
        old = getattr(parent, name)
        new.train(old.training)
        setattr(parent, name, new)

        for key, _ in new.named_parameters(recurse=False):
            old.register_parameter(key, None)  # or a rank would keep the whole beside its part
        self.restore.append(lambda: _put_back(parent, name, old, new))

    def set(self, owner: nn.Module, name: str, value: Any) -> None:
        """Change a plain attribute, until `restore`."""
        old = getattr(owner, name)
        setattr(owner, name, value)
        self.restore.append(lambda: setattr(owner, name, old))

    def part(self, parameter: nn.Parameter, spec: ShardSpec) -> nn.Parameter:
        """Return this rank's part as a new parameter, and remember the spec."""
        values = spec.part(parameter.detach(), self.group.rank)
        mine = nn.Parameter(values.clone(), requires_grad=parameter.requires_grad)
        self.specs[mine] = spec
        return mine

    def share(self, module: nn.Module) -> None:
        """Mark a module that is whole on every rank, whose gradients are partial.

        They add up over the group, like those of a key head that several ranks hold.
        """
        for parameter in module.parameters():
            size = parameter.shape[0]
            self.specs[parameter] = ShardSpec(0, ((0, size),) * self.group.size, size)


def _put_back(parent: nn.Module, name: str, old: nn.Module, new: nn.Module) -> None:
    for key, parameter in new.named_parameters(recurse=False):
        old.register_parameter(key, parameter)
    old.train(new.training)
    setattr(parent, name, old)


def column(
    sharding: Sharding,
    parent: nn.Module,
    name: str,
    spec: ShardSpec,
    kind: type[ColumnLinear] = ColumnLinear,
) -> None:
    """Divide a linear layer's outputs; `spec` is of the output dimension."""
    old: Any = getattr(parent, name)
    flat = ShardSpec(0, spec.ranges, spec.size, spec.blocks, spec.padded)
    if is_adapted(old):
        divide_column(sharding, old, flat)
        parent, name, old = old, "base_layer", old.base_layer

    weight = sharding.part(old.weight, spec)
    bias = None if old.bias is None else sharding.part(old.bias, flat)

    new = kind(weight, bias, sharding.group, transposed=not isinstance(old, nn.Linear))
    sharding.replace(parent, name, new)


def row(
    sharding: Sharding, parent: nn.Module, name: str, kind: type[RowLinear] = RowLinear
) -> None:
    """Divide a linear layer's inputs; the bias stays whole."""
    old: Any = getattr(parent, name)
    if is_adapted(old):
        divide_row(sharding, old)
        parent, name, old = old, "base_layer", old.base_layer

    transposed = not isinstance(old, nn.Linear)
    dim = 0 if transposed else 1
    spec = ShardSpec.even(dim, old.weight.shape[dim], sharding.group.size)

    new = kind(sharding.part(old.weight, spec), old.bias, sharding.group, transposed)
    sharding.replace(parent, name, new)


def dropout(sharding: Sharding, parent: nn.Module, name: str) -> None:
    """Let a dropout behind a row linear wait for the sum."""
    old = getattr(parent, name)
    sharding.replace(parent, name, DropoutAfterSum(old.p, sharding.group))


def vocabulary(
    sharding: Sharding, embeddings: tuple[nn.Module, str], head: tuple[nn.Module, str]
) -> None:
    """Divide embedding and head by words; a tied weight stays one parameter.

    Args:
        sharding: of the model.
        embeddings: owner of the embedding, and its name there.
        head: owner of the head, and its name there.
    """
    group = sharding.group
    old_embedding, old_head = getattr(*embeddings), getattr(*head)
    tied = old_head.weight is old_embedding.weight

    sharding.materializer.materialize(old_embedding)
    words = old_embedding.weight.shape[0]
    spec = ShardSpec.even(0, words, group.size)
    first = spec.ranges[group.rank][0]

    weight = sharding.part(old_embedding.weight, spec)
    padding, scale = old_embedding.padding_idx, getattr(old_embedding, "embed_scale", None)
    sharding.replace(*embeddings, VocabEmbedding(weight, first, group, padding, scale))

    if not tied:
        sharding.materializer.materialize(old_head)
    head_weight = weight if tied else sharding.part(old_head.weight, spec)
    bias = None if old_head.bias is None else sharding.part(old_head.bias, spec)
    sharding.replace(*head, VocabHead(head_weight, bias, words, group))


def experts(sharding: Sharding, module: Any) -> None:
    """Divide every expert's hidden layer; each rank computes its part of all experts.

    Args:
        sharding: of the model.
        module: with `gate_up_proj`, shape (experts, 2 * I, H), and `down_proj`, (experts, H, I). It
            is called with hidden states, indices and weights of the chosen experts.
    """
    group, width = sharding.group, module.down_proj.shape[2]
    gate_up = ShardSpec.even(1, 2 * width, group.size, blocks=2)
    module.gate_up_proj = sharding.part(module.gate_up_proj, gate_up)
    down = ShardSpec.even(2, width, group.size)
    module.down_proj = sharding.part(module.down_proj, down)

    def before(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, indices, weights, *rest = given
        return spread(hidden, group), indices, spread(weights, group), *rest

    def after(_: nn.Module, given: Any, partial: Tensor) -> Tensor:
        return summed(partial, group)

    handles = module.register_forward_pre_hook(before), module.register_forward_hook(after)
    sharding.restore += [handle.remove for handle in handles]
    sharding.experts.append(module)


def whole_tensor(part: Tensor, spec: ShardSpec, channel: Channel, tag: str) -> Tensor:
    """Return a tensor as it would be without sharding, on every rank; collective.

    Args:
        part: this rank's.
        spec: how it is divided.
        channel: to the tensor group.
        tag: what for.
    """
    gathered = channel.all_gather(part.detach().to(channel.device).contiguous(), tag).wait()
    return spec.join(list(gathered)).to(part.device)
