"""The model that a tuning begins with: found, and checked before anything is launched."""

from __future__ import annotations

import copy
import glob
import os
from functools import partial
from typing import Any

import torch
import transformers
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)

from recipes.training.language_model import described, load_pretrained


def find_pretrained(name_or_path: str) -> str:
    """Return a hub id as it is, a folder as a whole path, and for a glob its newest folder.

    Raises:
        FileNotFoundError: a glob matches no folder with a model.
    """
    if not glob.has_magic(name_or_path):
        is_folder = os.path.isdir(os.path.expanduser(name_or_path))
        return os.path.abspath(os.path.expanduser(name_or_path)) if is_folder else name_or_path
    # a model's folder is written when its training ends: its config tells which one is the newest
    found = glob.glob(os.path.join(os.path.expanduser(name_or_path), "config.json"), recursive=True)
    if not found:
        raise FileNotFoundError(
            f"model.name_or_path: '{name_or_path}' matches no folder with a config.json (looked"
            f" from '{os.getcwd()}'). Pretrain a model first, as by `make demo`, or give a folder"
            " that `save_pretrained` has written, or the id of a model on the Hugging Face hub."
        )
    return os.path.dirname(os.path.abspath(max(found, key=os.path.getmtime)))


def pretrained_config(name_or_path: str, **changes: Any) -> PretrainedConfig:
    """Return the config of a pretrained model, whose weights are then loaded in fp32.

    Args:
        name_or_path: hub id or folder.
        **changes: attributes of the config that shall have other values, such as `attn_pdrop`.

    Raises:
        ValueError: it cannot be found or read, or has no attribute of a given name.
    """
    config: PretrainedConfig = load_pretrained(AutoConfig, name_or_path)
    for name, value in changes.items():
        if not hasattr(config, name):
            raise ValueError(
                f"model.{name}: the `{type(config).__name__}` of '{name_or_path}' has no attribute"
                f" of that name. It has {', '.join(sorted(config.to_diff_dict()))}, among others."
            )
        described(partial(setattr, config, name, value))
    # `torch_dtype` before transformers 4.56; a checkpoint of this run shall load in fp32 as well
    setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", "float32")
    return config


def check_fit(
    config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, block_size: int
) -> None:
    """See that a model can read what it will be given.

    Args:
        config: of the model.
        tokenizer: makes its tokens.
        block_size: tokens of a row, at most.

    Raises:
        ValueError: the model lacks words of the tokenizer, or its context is shorter than a row.
    """
    text = config.get_text_config()
    if len(tokenizer) > text.vocab_size:
        raise ValueError(
            f"The tokenizer has {len(tokenizer)} tokens and the model embeddings for"
            f" {text.vocab_size}. Use the model's own tokenizer (`tokenizer=model`)."
        )
    context = context_length(config)
    if context is not None and block_size > context:
        raise ValueError(
            f"data.block_size={block_size} is more than the model's context of {context} tokens."
            f" Use data.block_size={context} or less."
        )


def context_length(config: PretrainedConfig) -> int | None:
    """Return how many tokens a model can read at once; None where its config names no limit."""
    found = getattr(config.get_text_config(), "max_position_embeddings", None)
    return int(found) if found else None


def one_block(config: PretrainedConfig) -> nn.Module:
    """Return a model of a config's class with one block and large fresh weights.

    For `check_packing` where no process holds the model: what keeps examples apart is the code of
    masks and positions, which all blocks share.
    """
    shallow = copy.deepcopy(config)
    text = shallow.get_text_config()
    count = text.num_hidden_layers
    for name, value in vars(text).items():
        if isinstance(value, list) and len(value) == count:  # one entry a block
            setattr(text, name, value[:1])
    text.num_hidden_layers = 1
    with isolate_rng(include_cuda=False):
        model: nn.Module = described(lambda: AutoModelForCausalLM.from_config(shallow))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data *= 10  # of 0.02 a context would hardly be seen
    return model


@torch.no_grad()
def check_packing(model: nn.Module) -> None:
    """See that a model keeps the examples of a packed row apart, by trying it on a few tokens.

    Whether positions that begin again are taken for the begin of another example is the model's
    code's to know, and its version's. A model that does not would be tuned on wrong contexts, and
    nothing would tell.

    Args:
        model: a causal language model of transformers, with its weights.

    Raises:
        ValueError: what stands before an example in its row changes what is foretold in it.
    """
    was_training = model.training
    model.eval()
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6], [6, 5, 4, 4, 5, 6]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]]).expand(2, -1)
    first, second = model(input_ids=tokens, position_ids=positions, use_cache=False).logits[:, 3:]
    model.train(was_training)
    # of the size of rounding, if at all
    if not torch.allclose(first, second, rtol=1e-3, atol=1e-3 * float(first.abs().max())):
        raise ValueError(
            f"`{type(model).__name__}` in transformers {transformers.__version__} does not keep the"
            " examples of a packed row apart. Use `data.packing=false`."
        )
