"""Small models to be split, and what must hold of every split."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from lightning_commfree.diloco.fragments import Fragment, averaged_buffers


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


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("table", torch.ones(2), persistent=False)


def blocks_in(fragments: Iterable[Fragment], prefix: str) -> list[list[int]]:
    """Return the numbers of the blocks under `prefix` that every fragment holds."""
    return [
        sorted({int(n[len(prefix) :].split(".")[0]) for n in f.parameters if n.startswith(prefix)})
        for f in fragments
    ]


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
