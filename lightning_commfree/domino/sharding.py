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
from lightning_commfree.domino.group import TensorGroup
from lightning_commfree.domino.layers import (
    ColumnLinear,
    DropoutAfterSum,
    RowLinear,
    VocabEmbedding,
    VocabHead,
)
from lightning_commfree.domino.materialize import Materializer
from lightning_commfree.domino.shard_spec import ShardSpec
from lightning_commfree.domino.sublayers import Sublayer, gpt2_sublayers, llama_sublayers

Parts = dict[int, ShardSpec]  # by the id of a parameter


@dataclass
class Sharding:
    """A divided model.

    Attributes:
        model: the transformers model, changed in place.
        group: the tensor group.
        materializer: gives layers values that have none.
        specs: of the parameters that are divided; the others are whole on every rank.
        sublayers: of the stack, in order; empty if no schedule is known for the model.
        embedding_is_stream: the first block gets the embedding as it is.
        restore: puts the original modules back, for parameters that are whole again.
    """

    model: nn.Module
    group: TensorGroup
    materializer: Materializer
    specs: dict[nn.Parameter, ShardSpec] = field(default_factory=dict)
    sublayers: list[Sublayer] = field(default_factory=list)
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


def _put_back(parent: nn.Module, name: str, old: nn.Module, new: nn.Module) -> None:
    for key, parameter in new.named_parameters(recurse=False):
        old.register_parameter(key, parameter)
    old.train(new.training)
    setattr(parent, name, old)


def check_heads(name: str, heads: int, key_heads: int, ranks: int) -> None:
    """See that attention can be divided.

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


def column(sharded: Sharding, parent: nn.Module, name: str, spec: ShardSpec) -> None:
    """Divide a linear layer's outputs; `cut` is of the output dimension."""
    old = getattr(parent, name)
    weight = sharded.part(old.weight, spec)
    bias = None
    if old.bias is not None:
        flat = ShardSpec(0, spec.ranges, spec.size, spec.blocks, spec.padded)
        bias = sharded.part(old.bias, flat)
    new = ColumnLinear(weight, bias, sharded.group, transposed=not isinstance(old, nn.Linear))
    sharded.replace(parent, name, new)


def row(sharded: Sharding, parent: nn.Module, name: str) -> None:
    """Divide a linear layer's inputs; the bias stays whole."""
    old = getattr(parent, name)
    transposed = not isinstance(old, nn.Linear)
    dim = 0 if transposed else 1
    spec = ShardSpec.even(dim, old.weight.shape[dim], sharded.group.size)
    new = RowLinear(sharded.part(old.weight, spec), old.bias, sharded.group, transposed)
    sharded.replace(parent, name, new)


def dropout(sharded: Sharding, parent: nn.Module, name: str) -> None:
    """Let a dropout behind a row linear wait for the sum."""
    old = getattr(parent, name)
    sharded.replace(parent, name, DropoutAfterSum(old.p, sharded.group))


def vocabulary(
    sharded: Sharding, embeddings: tuple[nn.Module, str], head: tuple[nn.Module, str]
) -> None:
    """Divide embedding and head by words; a tied weight stays one parameter."""
    group = sharded.group
    old_embedding, old_head = getattr(*embeddings), getattr(*head)
    tied = old_head.weight is old_embedding.weight
    sharded.materializer.materialize(old_embedding)
    words = old_embedding.weight.shape[0]
    spec = ShardSpec.even(0, words, group.size)
    first = spec.ranges[group.rank][0]
    weight = sharded.part(old_embedding.weight, spec)
    padding = old_embedding.padding_idx
    sharded.replace(*embeddings, VocabEmbedding(weight, first, group, padding))
    if not tied:
        sharded.materializer.materialize(old_head)
    head_weight = weight if tied else sharded.part(old_head.weight, spec)
    bias = None if old_head.bias is None else sharded.part(old_head.bias, spec)
    sharded.replace(*head, VocabHead(head_weight, bias, words, group))


def shared_by_heads(sharded: Sharding, module: nn.Module | None) -> None:
    """Mark a module that is whole on every rank but sees only the rank's heads.

    Its gradients are partial: they add up over the group, like those of a key head that several
    ranks hold.
    """
    if module is None:
        return
    for parameter in module.parameters():
        size = parameter.shape[0]
        sharded.specs[parameter] = ShardSpec(0, ((0, size),) * sharded.group.size, size)


def check_gpt2(model: Any, ranks: int) -> None:
    """See that a `GPT2LMHeadModel` can be divided.

    Raises:
        ValueError: heads or widths do not fit the ranks.
    """
    check_heads(type(model).__name__, model.config.n_head, model.config.n_head, ranks)
    for block in model.transformer.h:
        _check_width(model, "n_inner", block.mlp.c_fc.weight.shape[1], ranks)


def shard_gpt2(sharded: Sharding) -> None:
    """Divide a `GPT2LMHeadModel`."""
    model: Any = sharded.model
    ranks = sharded.group.size
    blocks = model.transformer.h
    for block in blocks:
        sharded.materializer.materialize(block)
        attention, mlp = block.attn, block.mlp
        width = attention.c_attn.weight.shape[1]
        column(sharded, attention, "c_attn", ShardSpec.even(1, width, ranks, blocks=3))
        row(sharded, attention, "c_proj")
        dropout(sharded, attention, "resid_dropout")
        sharded.set(attention, "num_heads", attention.num_heads // ranks)
        sharded.set(attention, "split_size", attention.split_size // ranks)
        column(sharded, mlp, "c_fc", ShardSpec.even(1, mlp.c_fc.weight.shape[1], ranks))
        row(sharded, mlp, "c_proj")
        dropout(sharded, mlp, "dropout")
    vocabulary(sharded, (model.transformer, "wte"), (model, "lm_head"))
    sharded.sublayers = gpt2_sublayers(list(blocks))


def check_llama(model: Any, ranks: int) -> None:
    """See that a model with Llama's blocks can be divided.

    Raises:
        ValueError: heads or widths do not fit the ranks.
    """
    heads, key_heads = model.config.num_attention_heads, model.config.num_key_value_heads
    check_heads(type(model).__name__, heads, key_heads, ranks)
    for layer in model.model.layers:
        _check_width(model, "intermediate_size", layer.mlp.gate_proj.weight.shape[0], ranks)


def shard_llama(sharded: Sharding) -> None:
    """Divide a causal language model whose blocks are Llama's."""
    model: Any = sharded.model
    config, ranks = model.config, sharded.group.size
    heads, key_heads = config.num_attention_heads, config.num_key_value_heads
    for layer in model.model.layers:
        sharded.materializer.materialize(layer)
        attention, mlp = layer.self_attn, layer.mlp
        head_dim = attention.head_dim
        column(sharded, attention, "q_proj", ShardSpec.even(0, heads * head_dim, ranks))
        key_spec = _key_spec(heads, key_heads, head_dim, ranks)
        for name in ("k_proj", "v_proj"):
            column(sharded, attention, name, key_spec)
        for name in ("q_norm", "k_norm"):  # Qwen3: one norm for all heads, which sees only ours
            shared_by_heads(sharded, getattr(attention, name, None))
        row(sharded, attention, "o_proj")
        groups = (heads // ranks) // max(key_heads // ranks, 1)
        sharded.set(attention, "num_key_value_groups", groups)
        width = mlp.gate_proj.weight.shape[0]
        for name in ("gate_proj", "up_proj"):
            column(sharded, mlp, name, ShardSpec.even(0, width, ranks))
        row(sharded, mlp, "down_proj")
    vocabulary(sharded, (model.model, "embed_tokens"), (model, "lm_head"))
    sharded.sublayers = llama_sublayers(list(model.model.layers))
    sharded.embedding_is_stream = True


def _key_spec(heads: int, key_heads: int, head_dim: int, ranks: int) -> ShardSpec:
    if key_heads % ranks == 0:
        return ShardSpec.even(0, key_heads * head_dim, ranks)
    per_rank = heads // ranks
    firsts = [rank * per_rank // (heads // key_heads) for rank in range(ranks)]
    ranges = tuple((first * head_dim, (first + 1) * head_dim) for first in firsts)
    return ShardSpec(0, ranges, key_heads * head_dim)


def _check_width(model: nn.Module, name: str, width: int, ranks: int) -> None:
    if width % ranks:
        raise ValueError(
            f"{type(model).__name__} has MLPs of width {width} (`{name}`), which {ranks}"
            f" tensor-parallel ranks cannot share equally. Choose a `tensor_parallel_size` that"
            f" divides {width}."
        )


def whole_tensor(part: Tensor, spec: ShardSpec, channel: Channel, tag: str) -> Tensor:
    """Return a tensor as it would be without sharding, on every rank; collective.

    Args:
        part: this rank's.
        spec: how it was sharded.
        channel: to the tensor group.
        tag: what for.
    """
    gathered = channel.all_gather(part.detach().to(channel.device).contiguous(), tag).wait()
    return spec.join(list(gathered)).to(part.device)
