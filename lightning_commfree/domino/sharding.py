"""Shard a transformers model among the ranks of a tensor group, in place.

Parameter names do not change. `Sharding` records how each tensor is sharded, so that full tensors
can be gathered again, and how to undo every change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_commfree.comm.channel import Channel
from lightning_commfree.domino.layers import (
    ColumnLinear,
    DropoutAfterSum,
    RowLinear,
    TensorGroup,
    VocabEmbedding,
    VocabHead,
    spread,
    summed,
)
from lightning_commfree.domino.sublayers import Sublayer
from lightning_commfree.model.meta_init import Materializer


@dataclass(frozen=True)
class ShardSpec:
    """How a tensor is sharded: each rank holds a range of one dimension.

    A packed q, k, v weight has three equal blocks, and each rank holds the same range of each.
    Several ranks may hold the same range: if there are fewer key-value heads than ranks, ranks
    share a head.
    """

    dim: int
    ranges: tuple[tuple[int, int], ...]  # each rank's start and stop within a block
    size: int  # length of the full dimension
    blocks: int = 1  # in the full dimension, of equal length
    padded: int | None = None  # length to which a full tensor is zero-padded before sharding

    @classmethod
    def even(cls, dim: int, size: int, num_ranks: int, num_blocks: int = 1) -> ShardSpec:
        """Create a spec with equal shards; a single block is padded, several must divide evenly."""
        block = size // num_blocks
        length = -(-block // num_ranks)
        ranges = tuple((rank * length, (rank + 1) * length) for rank in range(num_ranks))
        padded = length * num_ranks
        assert num_blocks == 1 or padded == block, "only a single block is padded"
        return cls(dim, ranges, size, num_blocks, padded if padded > block else None)

    @property
    def overlapping(self) -> bool:
        """Whether any shard is held by several ranks."""
        return len(set(self.ranges)) < len(self.ranges)

    def shard(self, full: Tensor, rank: int) -> Tensor:
        """Return a rank's shard of a full tensor."""
        if self.padded is not None:
            shape = list(full.shape)
            shape[self.dim] = self.padded - self.size
            full = torch.cat([full, full.new_zeros(shape)], self.dim)

        start, stop = self.ranges[rank]
        block = full.shape[self.dim] // self.blocks
        firsts = [b * block + start for b in range(self.blocks)]
        # `cat` copies even one slice: a view would keep the full tensor in memory
        return torch.cat([full.narrow(self.dim, f, stop - start) for f in firsts], self.dim)

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        """Join the shards of all ranks into the full tensor, without the padding."""
        shape = list(shards[0].shape)
        shape[self.dim] = self.padded or self.size
        full = shards[0].new_empty(shape)

        block = shape[self.dim] // self.blocks
        for (start, stop), shard in zip(self.ranges, shards, strict=True):
            for b, values in enumerate(shard.chunk(self.blocks, self.dim)):
                full.narrow(self.dim, b * block + start, stop - start).copy_(values)

        return full.narrow(self.dim, 0, self.size).contiguous()


def gather_full_tensor(shard: Tensor, spec: ShardSpec, channel: Channel, tag: str) -> Tensor:
    """Gather a full tensor from the shards of all ranks; collective."""
    gathered = channel.all_gather(shard.detach().to(channel.device).contiguous(), tag).wait()
    return spec.join(list(gathered)).to(shard.device)


@dataclass
class Sharding:
    """A sharded model, with a record of every change made to it."""

    model: nn.Module  # changed in place
    group: TensorGroup
    materializer: Materializer  # initializes layers that are on the meta device
    # every rank holds all other parameters in full
    specs: dict[nn.Parameter, ShardSpec] = field(default_factory=dict)
    # both in order, with the same number of sublayers per block; empty if there is no schedule
    blocks: list[nn.Module] = field(default_factory=list)
    sublayers: list[Sublayer] = field(default_factory=list)
    experts: list[nn.Module] = field(default_factory=list)  # modules with sharded parameters
    raw_embedding: bool = False  # whether its output enters the first block unchanged
    # functions that each undo one change, in the order in which the changes were made
    restore: list[Callable[[], None]] = field(default_factory=list)

    def replace(self, parent: nn.Module, name: str, new: nn.Module) -> None:
        """Replace a child module, and record in `restore` how to undo this."""
        old = getattr(parent, name)
        new.train(old.training)  # a module in eval mode must not start to apply dropout
        setattr(parent, name, new)

        for key, _ in new.named_parameters(recurse=False):
            old.register_parameter(key, None)  # otherwise a rank would keep the full tensor too
        self.restore.append(lambda: _put_back(parent, name, old, new))

    def set(self, owner: nn.Module, name: str, value: Any) -> None:
        """Change a plain attribute, and record in `restore` how to undo this."""
        old = getattr(owner, name)
        setattr(owner, name, value)
        self.restore.append(lambda: setattr(owner, name, old))

    def shard(self, parameter: nn.Parameter, spec: ShardSpec) -> nn.Parameter:
        """Return this rank's shard as a new parameter, and record its spec."""
        values = spec.shard(parameter.detach(), self.group.rank)
        mine = nn.Parameter(values, requires_grad=parameter.requires_grad)
        self.specs[mine] = spec
        return mine

    def mark_partial_gradients(self, module: nn.Module) -> None:
        """Mark a replicated module whose gradients are partial sums, to be summed across ranks."""
        # Each rank's gradient covers only its own heads or outputs. With the full dimension as the
        # range of every rank, `sum_shared` adds them up, as for a key head that several ranks hold.
        for parameter in module.parameters():
            size = parameter.shape[0]
            self.specs[parameter] = ShardSpec(0, ((0, size),) * self.group.size, size)


def _put_back(parent: nn.Module, name: str, old: nn.Module, new: nn.Module) -> None:
    """Undo `Sharding.replace`; `old` gets the parameters and the training mode of `new`."""
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
    """Shard a linear layer by outputs; `spec` describes the weight's output dimension."""
    old: Any = getattr(parent, name)
    flat = ShardSpec(0, spec.ranges, spec.size, spec.blocks, spec.padded)
    if is_adapted(old):
        _shard_lora_of_column(sharding, old, flat)
        parent, name, old = old, "base_layer", old.base_layer

    weight = sharding.shard(old.weight, spec)
    bias = None if old.bias is None else sharding.shard(old.bias, flat)

    new = kind(weight, bias, sharding.group, transposed=not isinstance(old, nn.Linear))
    sharding.replace(parent, name, new)


def row(
    sharding: Sharding, parent: nn.Module, name: str, kind: type[RowLinear] = RowLinear
) -> None:
    """Shard a linear layer by inputs; every rank holds the full bias."""
    old: Any = getattr(parent, name)
    if is_adapted(old):
        _shard_lora_of_row(sharding, old)
        parent, name, old = old, "base_layer", old.base_layer

    transposed = not isinstance(old, nn.Linear)
    dim = 0 if transposed else 1
    spec = ShardSpec.even(dim, old.weight.shape[dim], sharding.group.size)

    new = kind(sharding.shard(old.weight, spec), old.bias, sharding.group, transposed)
    sharding.replace(parent, name, new)


def dropout(sharding: Sharding, parent: nn.Module, name: str) -> None:
    """Replace a dropout module after a row-parallel linear with a `DropoutAfterSum`."""
    old = getattr(parent, name)
    sharding.replace(parent, name, DropoutAfterSum(old.p, sharding.group))


def vocabulary(
    sharding: Sharding,
    embeddings: tuple[nn.Module, str],  # parent module, attribute name
    head: tuple[nn.Module, str],
) -> None:
    """Shard the embedding and the head along the vocabulary; a tied weight stays tied."""
    group = sharding.group
    old_embedding, old_head = getattr(*embeddings), getattr(*head)
    tied = old_head.weight is old_embedding.weight

    sharding.materializer.materialize(old_embedding)
    words = old_embedding.weight.shape[0]
    spec = ShardSpec.even(0, words, group.size)
    first = spec.ranges[group.rank][0]

    weight = sharding.shard(old_embedding.weight, spec)
    padding, scale = old_embedding.padding_idx, getattr(old_embedding, "embed_scale", None)
    sharding.replace(*embeddings, VocabEmbedding(weight, first, group, padding, scale))

    if not tied:
        sharding.materializer.materialize(old_head)
    head_weight = weight if tied else sharding.shard(old_head.weight, spec)
    bias = None if old_head.bias is None else sharding.shard(old_head.bias, spec)
    sharding.replace(*head, VocabHead(head_weight, bias, words, group))


def experts(sharding: Sharding, module: Any) -> None:
    """Shard the hidden layer of every expert (MoE), so that routing needs no communication.

    `module` has the parameters `gate_up_proj`, shape (experts, 2 * I, H), and `down_proj`, shape
    (experts, H, I). Its forward takes the hidden states, and the indices and weights of the chosen
    experts.
    """
    group, width = sharding.group, module.down_proj.shape[2]
    gate_up = ShardSpec.even(1, 2 * width, group.size, num_blocks=2)
    module.gate_up_proj = sharding.shard(module.gate_up_proj, gate_up)
    down = ShardSpec.even(2, width, group.size)
    module.down_proj = sharding.shard(module.down_proj, down)

    # a rank's gradients of hidden states and router weights are partial sums, because they come
    # from its slice of the experts
    def spread_inputs(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, indices, weights, *rest = given
        return spread(hidden, group), indices, spread(weights, group), *rest

    def sum_outputs(_: nn.Module, given: Any, partial: Tensor) -> Tensor:
        return summed(partial, group)

    handles = (
        module.register_forward_pre_hook(spread_inputs),
        module.register_forward_hook(sum_outputs),
    )
    sharding.restore += [handle.remove for handle in handles]
    sharding.experts.append(module)


# LoRA around a sharded linear. peft's layers stay in place; A and B are sharded to match the base
# weight W: y = x W + s (x A) B, with W, A and B in the order (in, out).
#
# ======  ===================  ===================  ==============================
# linear  A, (in, r)           B, (r, out)          gradient summed over the group
# ======  ===================  ===================  ==============================
# column  full on every rank   sharded by outputs   A
# row     sharded by inputs    full on every rank   B
# ======  ===================  ===================  ==============================
#
# In a row linear, a rank's base output and its adapter output are both partial sums. They are added
# first, so one all-reduce serves both and the schedule sends nothing extra.

_LORA = ("peft.tuners.lora.layer", "Linear")


def is_adapted(module: nn.Module) -> bool:
    """Return whether a module is a peft layer that wraps a base layer with an adapter."""
    return isinstance(getattr(module, "base_layer", None), nn.Module)


def base_of(module: Any) -> Any:
    """Return the base layer of a peft layer, or the module itself if it is not a peft layer."""
    return module.base_layer if is_adapted(module) else module


def has_adapters(model: nn.Module) -> bool:
    """Return whether any layer of a model has a peft adapter."""
    return any(is_adapted(module) for module in model.modules())


def check_adapters(model: nn.Module, vocabulary: tuple[nn.Module, ...]) -> None:
    """Raise a `ValueError` if an adapter is not plain LoRA on a linear layer of a block.

    `vocabulary` is the model's embedding and head.
    """
    for name, module in model.named_modules():
        if is_adapted(module) and (why := _why_unsupported(module, vocabulary)):
            raise ValueError(
                f"The adapter '{name}' (a `{type(module).__name__}`) cannot be sharded: {why} Use"
                " LoRA on linear layers of the transformer blocks only, or another strategy. The"
                " model is unchanged."
            )


def _shard_lora_of_column(sharding: Sharding, layer: Any, spec: ShardSpec) -> None:
    """Shard the adapters of a column-parallel layer; `spec` shards dimension 0, the outputs."""
    group = sharding.group

    def spread_inputs(_: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
        return given if group.scheduled else (spread(given[0], group),)

    for name in layer.lora_A:
        down, up = layer.lora_A[name], layer.lora_B[name]
        sharding.mark_partial_gradients(down)
        up.weight = sharding.shard(up.weight, spec)
        sharding.restore.append(down.register_forward_pre_hook(spread_inputs).remove)


def _shard_lora_of_row(sharding: Sharding, layer: Any) -> None:
    """Shard the adapters of a row-parallel layer."""
    group = sharding.group

    def sum_outputs(_: nn.Module, given: Any, partial: Tensor) -> Tensor:
        return partial if group.scheduled else summed(partial, group)

    for name in layer.lora_A:
        down, up = layer.lora_A[name], layer.lora_B[name]
        down.weight = sharding.shard(
            down.weight, ShardSpec.even(1, down.weight.shape[1], group.size)
        )
        sharding.mark_partial_gradients(up)
        sharding.restore.append(up.register_forward_hook(sum_outputs).remove)


def _why_unsupported(module: Any, vocabulary: tuple[nn.Module, ...]) -> str:
    """Return why an adapter cannot be sharded, or "" if it can."""
    if (type(module).__module__, type(module).__name__) != _LORA:
        return "it is not LoRA of a plain linear layer."
    if any(module is known for known in vocabulary):
        return "it is around the embedding or the head."
    if module.lora_variant:
        return "DoRA and other LoRA variants need full weights."
    if any(module.lora_bias.values()):
        return "every rank would add `lora_bias` to the sum. Set `lora_bias=False`."
    if any(not isinstance(dropout, nn.Identity) for dropout in module.lora_dropout.values()):
        return "its dropout mask would differ between ranks. Set `lora_dropout=0`."
    if any(parameter.is_meta for parameter in module.parameters()):
        return "it is on the meta device. Build the model on the CPU."
    return ""


def check_heads(model_name: str, heads: int, key_heads: int, num_ranks: int) -> None:
    """Raise a `ValueError` if a model's attention heads cannot be divided among the ranks."""
    if heads % num_ranks:
        raise ValueError(
            f"{model_name} has {heads} attention heads, which cannot be split evenly across"
            f" {num_ranks} tensor-parallel ranks. Choose a `tensor_parallel_size` that divides"
            f" {heads}."
        )
    if key_heads % num_ranks and num_ranks % key_heads:
        raise ValueError(
            f"{model_name} has {key_heads} key-value heads, which can be neither split evenly"
            f" across {num_ranks} tensor-parallel ranks nor replicated so that each rank holds one."
            f" Choose a `tensor_parallel_size` that divides {key_heads} or is a multiple of it."
        )


def check_width(model: nn.Module, config_key: str, width: int, num_ranks: int) -> None:
    """Raise a `ValueError` if an MLP's width, under `config_key`, cannot be divided evenly."""
    if width % num_ranks:
        raise ValueError(
            f"{type(model).__name__} has MLPs of width {width} (`{config_key}`), which cannot be"
            f" split evenly across {num_ranks} tensor-parallel ranks. Choose a"
            f" `tensor_parallel_size` that divides {width}."
        )
