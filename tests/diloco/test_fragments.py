"""Fragments of real models, and what a fragment holds, by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_commfree.diloco.fragments import (
    Fragment,
    averaged_buffers,
    split_into_fragments,
)
from tests.diloco.models import Block, assert_partition, blocks_in, gpt2, llama, t5


def outside(fragment: Fragment, prefix: str) -> list[str]:
    return [name for name in fragment.parameters if not name.startswith(prefix)]


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


# What is split


def test_a_model_of_nothing_but_blocks_has_no_fragment_for_the_rest() -> None:
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(4)])
    fragments = split_into_fragments(model, None, "strided")
    assert [f.parameters for f in fragments] == [
        ("0.weight", "0.bias", "2.weight", "2.bias"),
        ("1.weight", "1.bias", "3.weight", "3.bias"),
    ]


def test_frozen_parameters_are_left_out() -> None:
    model = gpt2(4)
    model.transformer.wte.requires_grad_(False)
    model.transformer.h[1].requires_grad_(False)  # a frozen block is none to be dealt out
    fragments = split_into_fragments(model, 3, "strided")
    assert blocks_in(fragments, "transformer.h.") == [[0, 3], [2], []]
    assert "transformer.wte.weight" not in fragments[-1].parameters
    assert_partition(model, fragments)


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
