"""What a trained model is worth: its loss, that of a unigram model, and a sample of its text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torchmetrics import MeanMetric
from transformers import PreTrainedTokenizerBase

from recipes.data.token_blocks import TokenBlocks
from recipes.training.language_model import LanguageModel


@torch.no_grad()
def token_loss(module: LanguageModel, batches: Iterable[Tensor]) -> float:
    """Return the mean loss per token in nats over the batches of all ranks, which all must call it.

    Args:
        module: evaluated as it is, on the device where it is.
        batches: this rank's share, int64, shape (batch, block_size + 1).
    """
    was_training = module.training
    module.eval()
    mean = MeanMetric().to(module.device)
    for batch in batches:
        mean.update(module.loss(batch.to(module.device)), weight=batch[:, 1:].numel())
    module.train(was_training)
    return float(mean.compute())


def unigram_loss(train: TokenBlocks, validation: TokenBlocks, vocab_size: int) -> float:
    """Return the loss of the model that knows only how often each token occurs, in nats per token.

    It is fitted to all training tokens, with one added to every count (a token that never occurred
    would cost infinity), and evaluated on the targets of all validation blocks, the very tokens on
    which the model is.
    """
    counts_V = np.bincount(train.tokens, minlength=vocab_size) + 1
    log_p_V = np.log(counts_V / counts_V.sum())
    targets = validation.tokens[1 : len(validation) * validation.block_size + 1]
    return float(-log_p_V[targets].mean())


def generate_text(
    module: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    max_new_tokens: int,
    seed: int,
) -> str:
    """Return the prompt and what the model makes of it, sampled at temperature 0.8 from the top 50.

    Args:
        module: on any device; left in the mode it had.
        tokenizer: the model's.
        prompt: at least one token, or the tokenizer's end of text is taken.
        max_new_tokens: at most so many; prompt and they together stay within the model's context.
        seed: of the sampling; the global random state is left as it was.
    """
    tokens = tokenizer(prompt, add_special_tokens=False)["input_ids"] or [tokenizer.eos_token_id]
    context = module.model.config.max_position_embeddings
    tokens = tokens[: max(context - max_new_tokens, 1)]
    was_training = module.training
    module.eval()
    model: Any = module.model  # transformers types `generate` for its own mixins only
    with isolate_rng():
        torch.manual_seed(seed)
        row = torch.tensor([tokens], device=module.device)
        output = model.generate(
            row,
            attention_mask=torch.ones_like(row),
            max_new_tokens=min(max_new_tokens, context - len(tokens)),
            do_sample=True,
            temperature=0.8,
            top_k=50,
            pad_token_id=tokenizer.eos_token_id,
        )
    module.train(was_training)
    return str(tokenizer.decode(output[0], skip_special_tokens=True))
