"""Find a pretrained model and check it before anything is launched."""

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

from recipes.training.language_model import built_from_config, load_pretrained


def find_pretrained(name_or_path: str) -> str:
    """Return the absolute path of a folder or of the newest match of a glob; keep a hub id.

    Raises:
        FileNotFoundError: a glob matches no folder with a model.
    """
    if not glob.has_magic(name_or_path):
        is_folder = os.path.isdir(os.path.expanduser(name_or_path))
        return os.path.abspath(os.path.expanduser(name_or_path)) if is_folder else name_or_path
    # a folder is written at the end of training, so the time of its config tells the newest one
    found = glob.glob(os.path.join(os.path.expanduser(name_or_path), "config.json"), recursive=True)
    if not found:
        raise FileNotFoundError(
            f"model.name_or_path: '{name_or_path}' matches no folder with a config.json (relative"
            f" to '{os.getcwd()}'). Pretrain a model first, for example by `make demo`, or give a"
            " folder written by `save_pretrained`, or the id of a model on the Hugging Face hub."
        )
    return os.path.dirname(os.path.abspath(max(found, key=os.path.getmtime)))


def pretrained_config(name_or_path: str, **changes: Any) -> PretrainedConfig:
    """Load the config of a pretrained model, with fp32 as the type of its weights.

    Args:
        name_or_path: hub id or folder.
        **changes: new values for attributes of the config, such as `attn_pdrop`.

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
        built_from_config(partial(setattr, config, name, value))
    # `torch_dtype` before transformers 4.56; checkpoints of this run must load in fp32 too
    setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", "float32")
    return config


def check_fit(
    config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, block_size: int
) -> None:
    """Check that vocabulary and context of a model fit the data.

    Args:
        config: of the model.
        tokenizer: of the data.
        block_size: maximum number of tokens of a row.

    Raises:
        ValueError: the vocabulary or the context of the model is too small.
    """
    text = config.get_text_config()
    if len(tokenizer) > text.vocab_size:
        raise ValueError(
            f"The tokenizer has {len(tokenizer)} tokens, but the model has embeddings for only"
            f" {text.vocab_size}. Use the model's own tokenizer (`tokenizer=model`)."
        )
    context = context_length(config)
    if context is not None and block_size > context:
        raise ValueError(
            f"data.block_size={block_size} is more than the model's context of {context} tokens."
            f" Use data.block_size={context} or less."
        )


def context_length(config: PretrainedConfig) -> int | None:
    """Return the context length of a model in tokens; None if its config has no limit."""
    found = getattr(config.get_text_config(), "max_position_embeddings", None)
    return int(found) if found else None


def one_block(config: PretrainedConfig) -> nn.Module:
    """Build a model of a config's class with one block and large random weights.

    `check_packing` uses it if no process holds the whole model: the code of masks and positions,
    which keeps examples apart, is the same for all blocks.
    """
    shallow = copy.deepcopy(config)
    text = shallow.get_text_config()
    count = text.num_hidden_layers
    for name, value in vars(text).items():
        if isinstance(value, list) and len(value) == count:  # one entry per block
            setattr(text, name, value[:1])
    text.num_hidden_layers = 1
    with isolate_rng(include_cuda=False):
        model: nn.Module = built_from_config(lambda: AutoModelForCausalLM.from_config(shallow))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data *= 10  # with a scale of 0.02 the context would have almost no effect
    return model


@torch.no_grad()
def check_packing(model: nn.Module) -> None:
    """Check on a few tokens that a model keeps the examples of a packed row apart.

    Whether a restart of the position ids separates examples depends on the code and version of the
    model. A model that ignores it would silently be trained on wrong contexts.

    Args:
        model: a causal language model of transformers, with its weights.

    Raises:
        ValueError: the preceding tokens in a row change the predictions in an example.
    """
    was_training = model.training
    model.eval()
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6], [6, 5, 4, 4, 5, 6]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]]).expand(2, -1)
    first, second = model(input_ids=tokens, position_ids=positions, use_cache=False).logits[:, 3:]
    model.train(was_training)
    # equal up to rounding
    if not torch.allclose(first, second, rtol=1e-3, atol=1e-3 * float(first.abs().max())):
        raise ValueError(
            f"`{type(model).__name__}` in transformers {transformers.__version__} does not keep the"
            " examples of a packed row apart. Use `data.packing=false`."
        )
