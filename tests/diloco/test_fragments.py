"""Fragments of real models by hand, and the partition property on random module trees."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from lightning_commfree.diloco.fragments import (
    PATTERNS,
    Fragment,
    averaged_buffers,
    split_into_fragments,
)

BY_BLOCKS = ("strided", "sequential")


def gpt2(layers: int) -> GPT2LMHeadModel:
    sizes = {"n_embd": 8, "n_head": 2, "vocab_size": 11, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(n_layer=layers, bos_token_id=0, eos_token_id=0, **sizes))


def llama(layers: int) -> LlamaForCausalLM:
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 11}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **sizes))


def t5(encoder_layers: int, decoder_layers: int) -> T5ForConditionalGeneration:
    sizes = {"d_model": 8, "d_ff": 16, "num_heads": 2, "d_kv": 4, "vocab_size": 11}
    layers = {"num_layers": encoder_layers, "num_decoder_layers": decoder_layers}
    return T5ForConditionalGeneration(T5Config(**layers, **sizes))


def blocks_in(fragments: Iterable[Fragment], prefix: str) -> list[list[int]]:
    """Return the numbers of the blocks under `prefix` that every fragment holds."""
    return [
        sorted({int(n[len(prefix) :].split(".")[0]) for n in f.parameters if n.startswith(prefix)})
        for f in fragments
    ]


def outside(fragment: Fragment, prefix: str) -> list[str]:
    return [name for name in fragment.parameters if not name.startswith(prefix)]


def bytes_of(module: nn.Module, fragment: Fragment) -> int:
    return sum(module.get_parameter(name).nbytes for name in fragment.parameters)


def assert_partition(module: nn.Module, fragments: list[Fragment]) -> None:
    """All trainable parameters once, by object as well as by name; all averaged buffers once."""
    parameters = [name for fragment in fragments for name in fragment.parameters]
    trainable = {name for name, p in module.named_parameters() if p.requires_grad}
    assert len(parameters) == len(set(parameters))
    assert set(parameters) == trainable
    assert len({id(module.get_parameter(name)) for name in parameters}) == len(parameters)
    assert all(fragment.parameters for fragment in fragments), "an empty fragment"
    buffers = [name for fragment in fragments for name in fragment.buffers]
    assert sorted(buffers) == sorted(averaged_buffers(module))


# Real models


@pytest.mark.parametrize("layers", [2, 3, 4, 6, 7])
def test_by_default_three_blocks_a_fragment_and_one_for_the_rest(layers: int) -> None:
    model = gpt2(layers)
    fragments = split_into_fragments(model, None, "strided")
    groups = (layers + 2) // 3
    assert blocks_in(fragments, "transformer.h.") == [
        *[list(range(g, layers, groups)) for g in range(groups)],
        [],
    ]
    assert fragments[-1].parameters == (
        "transformer.wte.weight",  # tied to lm_head.weight, which must not come again
        "transformer.wpe.weight",
        "transformer.ln_f.weight",
        "transformer.ln_f.bias",
    )
    assert_partition(model, fragments)


def test_strided_and_sequential_differ_as_in_figure_3_of_the_paper() -> None:
    model = gpt2(7)
    strided = split_into_fragments(model, 4, "strided")
    sequential = split_into_fragments(model, 4, "sequential")
    assert blocks_in(strided, "transformer.h.") == [[0, 3, 6], [1, 4], [2, 5], []]
    assert blocks_in(sequential, "transformer.h.") == [[0, 1, 2], [3, 4], [5, 6], []]
    assert strided[-1] == sequential[-1]
    for fragments in (strided, sequential):
        for fragment in fragments[:-1]:
            assert outside(fragment, "transformer.h.") == []


def test_llama_with_an_untied_head_and_buffers_that_are_no_state() -> None:
    model = llama(4)
    fragments = split_into_fragments(model, None, "strided")
    assert blocks_in(fragments, "model.layers.") == [[0, 2], [1, 3], []]
    rest = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    assert fragments[-1].parameters == rest
    assert [name for name, _ in model.named_buffers()], "the rotary tables are buffers"
    assert all(fragment.buffers == () for fragment in fragments)
    assert_partition(model, fragments)


def test_t5_has_blocks_in_two_stacks() -> None:
    """Encoder blocks 0, 1 and decoder blocks 0, 1, 2 are dealt out in turn, as one row of five.

    Each holds a `ModuleList` of its own, whose children are no blocks.
    """
    model = t5(encoder_layers=2, decoder_layers=3)
    fragments = split_into_fragments(model, None, "strided")
    assert blocks_in(fragments, "encoder.block.") == [[0], [1], []]
    assert blocks_in(fragments, "decoder.block.") == [[0, 2], [1], []]
    assert fragments[-1].parameters == (
        "shared.weight",  # tied to both embeddings and to the head
        "encoder.final_layer_norm.weight",
        "decoder.final_layer_norm.weight",
    )
    assert_partition(model, fragments)


def test_a_wrapper_only_puts_a_prefix_in_front() -> None:
    """A LightningModule holds the model as an attribute; `model.` then starts every name."""
    inner = gpt2(3)
    wrapper = nn.Module()
    wrapper.model = inner
    for pattern in PATTERNS:
        expected = split_into_fragments(inner, 3, pattern)
        got = split_into_fragments(wrapper, 3, pattern)
        assert [f.parameters for f in got] == [
            tuple(f"model.{name}" for name in f.parameters) for f in expected
        ]


def test_block_1_does_not_take_what_belongs_to_block_10() -> None:
    fragments = split_into_fragments(gpt2(11), 12, "strided")
    assert blocks_in(fragments, "transformer.h.") == [*[[i] for i in range(11)], []]


# What is split


def test_a_model_without_blocks_is_one_fragment() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    for pattern in BY_BLOCKS:
        (fragment,) = split_into_fragments(model, None, pattern)
        assert fragment.parameters == ("0.weight", "0.bias", "2.weight", "2.bias")


def test_a_model_of_nothing_but_blocks_has_no_fragment_for_the_rest() -> None:
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(4)])
    fragments = split_into_fragments(model, None, "strided")
    assert [f.parameters for f in fragments] == [
        ("0.weight", "0.bias", "2.weight", "2.bias"),
        ("1.weight", "1.bias", "3.weight", "3.bias"),
    ]


def test_a_list_of_one_is_no_list_of_blocks() -> None:
    assert len(split_into_fragments(gpt2(1), None, "strided")) == 1


def test_one_fragment_is_the_whole_model() -> None:
    model = gpt2(2)
    for pattern in PATTERNS:
        (fragment,) = split_into_fragments(model, 1, pattern)
        assert fragment.parameters == tuple(name for name, _ in model.named_parameters())


def test_frozen_parameters_are_left_out() -> None:
    model = gpt2(4)
    model.transformer.wte.requires_grad_(False)
    model.transformer.h[1].requires_grad_(False)  # a frozen block is none to be dealt out
    fragments = split_into_fragments(model, 3, "strided")
    assert blocks_in(fragments, "transformer.h.") == [[0, 3], [2], []]
    assert "transformer.wte.weight" not in fragments[-1].parameters
    assert_partition(model, fragments)


def test_where_only_blocks_train_nothing_is_left_for_a_last_fragment() -> None:
    model = gpt2(3)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("transformer.h."))
    fragments = split_into_fragments(model, None, "strided")
    assert blocks_in(fragments, "transformer.h.") == [[0, 1, 2]]


def test_a_weight_tied_between_blocks_goes_with_the_first() -> None:
    model = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    model[2].weight = model[0].weight
    fragments = split_into_fragments(model, 3, "strided")
    assert [f.parameters for f in fragments] == [
        ("0.weight", "0.bias"),
        ("1.weight", "1.bias"),
        ("2.bias",),
    ]
    assert_partition(model, fragments)


def test_a_block_that_is_used_several_times_is_no_list_of_blocks() -> None:
    shared = nn.Linear(2, 2)
    model = nn.ModuleList([shared, shared, shared])
    (fragment,) = split_into_fragments(model, None, "strided")
    assert fragment.parameters == ("0.weight", "0.bias")


# Buffers


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("table", torch.ones(2), persistent=False)


def test_buffers_travel_with_their_module() -> None:
    model = nn.Module()
    model.stem = nn.BatchNorm1d(2)
    model.blocks = nn.ModuleList(Block() for _ in range(3))
    strided = split_into_fragments(model, 3, "strided")
    statistics = [
        (f"blocks.{i}.norm.running_mean", f"blocks.{i}.norm.running_var") for i in range(3)
    ]
    assert strided[0].buffers == statistics[0] + statistics[2]
    assert strided[1].buffers == statistics[1]
    assert strided[2].buffers == ("stem.running_mean", "stem.running_var")
    assert_partition(model, strided)
    sequential = split_into_fragments(model, 3, "sequential")
    assert sequential[0].buffers == statistics[0] + statistics[1]


def test_buffers_follow_most_of_the_parameters_of_their_module() -> None:
    """Balanced fragments may tear a module apart; its statistics go where most tensors went."""
    norm = nn.BatchNorm1d(4)
    norm.register_parameter("slope", nn.Parameter(torch.ones(4)))
    model = nn.ModuleDict({"large": nn.Linear(2, 2, bias=False), "norm": norm})
    for fragment in split_into_fragments(model, 2, "balanced"):
        own = [name for name in fragment.parameters if name.startswith("norm.")]
        assert bool(fragment.buffers) == (len(own) >= 2), fragment


def test_integer_and_unsaved_buffers_are_not_averaged() -> None:
    model = Block()
    assert set(averaged_buffers(model)) == {"norm.running_mean", "norm.running_var"}
    left_out = {name for name, _ in model.named_buffers()} - set(averaged_buffers(model))
    assert left_out == {"norm.num_batches_tracked", "table"}


# Balanced


@pytest.mark.parametrize("num_fragments", [2, 3, 5, 8])
def test_balanced_bytes_differ_by_the_largest_tensor_at_most(num_fragments: int) -> None:
    model = gpt2(5).to(torch.bfloat16)
    model.transformer.wpe.to(torch.float32)  # bytes count, not elements
    fragments = split_into_fragments(model, num_fragments, "balanced")
    sizes = [bytes_of(model, fragment) for fragment in fragments]
    assert max(sizes) - min(sizes) <= max(p.nbytes for p in model.parameters())
    assert_partition(model, fragments)

    by_count = [0] * num_fragments  # the likely mistake: in turn, whatever the size
    for i, parameter in enumerate(model.parameters()):
        by_count[i % num_fragments] += parameter.nbytes
    assert max(sizes) - min(sizes) < max(by_count) - min(by_count)


def test_balanced_by_hand() -> None:
    """16, 12, 8, 4, 4 bytes to two fragments: 16 | 12, then 8 to the second, 4 and 4 to the first.

    Within a fragment the tensors are in the order of the model.
    """
    model = nn.ParameterList(torch.ones(numel) for numel in (1, 3, 4, 2, 1))
    first, second = split_into_fragments(model, 2, "balanced")
    assert first.parameters == ("0", "2", "4")
    assert second.parameters == ("1", "3")


@pytest.mark.parametrize(("layers", "num_fragments"), [(2, 2), (4, 3), (7, 4)])
def test_balanced_takes_the_number_from_the_blocks_if_there_are_any(
    layers: int, num_fragments: int
) -> None:
    assert len(split_into_fragments(gpt2(layers), None, "balanced")) == num_fragments


@pytest.mark.parametrize(("tensors", "num_fragments"), [(1, 1), (3, 3), (9, 4)])
def test_balanced_without_blocks_makes_four_fragments_at_most(
    tensors: int, num_fragments: int
) -> None:
    model = nn.ParameterList(torch.ones(i + 1) for i in range(tensors))
    assert len(split_into_fragments(model, None, "balanced")) == num_fragments


def test_a_tensor_without_elements_leaves_no_fragment_empty() -> None:
    model = nn.ParameterList([torch.empty(0), torch.empty(0), torch.ones(2)])
    assert_partition(model, split_into_fragments(model, 3, "balanced"))


# Refusals


def test_nothing_to_train_is_refused() -> None:
    message = r"no trainable parameters.*Set `requires_grad=True` on what is to be trained"
    for module in (nn.ReLU(), nn.Linear(2, 2).requires_grad_(False)):
        with pytest.raises(ValueError, match=message):
            split_into_fragments(module, None, "strided")


def test_complex_parameters_are_refused() -> None:
    module = nn.Linear(2, 2, dtype=torch.complex64)
    message = r"'weight' is of dtype torch\.complex64.*real floating-point.*`requires_grad=False`"
    with pytest.raises(ValueError, match=message):
        split_into_fragments(module, None, "strided")
    module.requires_grad_(False)
    module.real = nn.Linear(2, 2)
    split_into_fragments(module, None, "strided")


def test_two_parameters_over_one_memory_are_refused() -> None:
    module = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    module[1].weight = nn.Parameter(module[0].weight.data)
    message = r"'0\.weight' and '1\.weight' share memory.*module_b\.weight = module_a\.weight"
    with pytest.raises(ValueError, match=message):
        split_into_fragments(module, None, "strided")


@pytest.mark.parametrize("pattern", BY_BLOCKS)
def test_more_fragments_than_blocks_and_the_rest_are_refused(pattern: str) -> None:
    assert len(split_into_fragments(gpt2(3), 4, pattern)) == 4
    message = (
        rf"`num_fragments=5` is more than .* `fragment_pattern='{pattern}'`: it has 3 blocks and"
        r" something besides, so at most 4\. Lower `num_fragments`, or use"
        r" `fragment_pattern='balanced'`"
    )
    with pytest.raises(ValueError, match=message):
        split_into_fragments(gpt2(3), 5, pattern)


def test_more_fragments_than_blocks_alone_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ValueError, match="it has 2 blocks, so at most 2"):
        split_into_fragments(model, 3, "strided")


def test_two_fragments_without_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="it has 0 blocks and something besides, so at most 1"):
        split_into_fragments(nn.Linear(2, 2), 2, "strided")


def test_more_balanced_fragments_than_tensors_are_refused() -> None:
    assert len(split_into_fragments(nn.Linear(2, 2), 2, "balanced")) == 2
    message = r"`num_fragments=3` .*: it has 2 trainable tensors\. Choose at most 2\."
    with pytest.raises(ValueError, match=message):
        split_into_fragments(nn.Linear(2, 2), 3, "balanced")


# Any module


LEAVES = st.sampled_from(
    [
        lambda: nn.Linear(2, 3),
        lambda: nn.Linear(3, 3, bias=False),
        lambda: nn.BatchNorm1d(3),
        lambda: nn.BatchNorm1d(2, affine=False),
        Block,
        nn.ReLU,
    ]
)


def tree_of(children: st.SearchStrategy[nn.Module]) -> st.SearchStrategy[nn.Module]:
    several = st.lists(children, max_size=4)
    return st.one_of(
        several.map(nn.ModuleList),
        several.map(lambda modules: nn.Sequential(*modules)),
        several.map(lambda modules: nn.ModuleDict({f"m{i}": m for i, m in enumerate(modules)})),
        st.builds(
            lambda make, n: nn.ModuleList(make() for _ in range(n)), LEAVES, st.integers(2, 5)
        ),
    )


TREES = st.recursive(LEAVES.map(lambda make: make()), tree_of, max_leaves=8)


@settings(max_examples=150, deadline=None)
@given(
    module=TREES,
    pattern=st.sampled_from(PATTERNS),
    num_fragments=st.none() | st.integers(1, 6),
    choices=st.randoms(use_true_random=False),
)
def test_fragments_of_any_module_partition_it_or_are_refused(
    module: nn.Module, pattern: str, num_fragments: int | None, choices: Random
) -> None:
    freeze_and_tie(module, choices)
    trainable = [p for p in module.parameters() if p.requires_grad]
    try:
        fragments = split_into_fragments(module, num_fragments, pattern)
    except ValueError:
        assert not trainable or num_fragments not in (None, 1), "these fit what can be trained"
        assert pattern != "balanced" or (num_fragments or 1) > len(trainable)
        return
    assert num_fragments in (None, len(fragments))
    assert_partition(module, fragments)
    assert fragments == split_into_fragments(module, num_fragments, pattern)


def freeze_and_tie(module: nn.Module, choices: Random) -> None:
    linears = [m for m in module.modules() if isinstance(m, nn.Linear)]
    for linear in linears:
        if choices.random() < 0.3:
            twin = choices.choice(linears)
            if twin.weight.shape == linear.weight.shape:
                linear.weight = twin.weight
    for parameter in module.parameters():
        parameter.requires_grad_(choices.random() < 0.8)
