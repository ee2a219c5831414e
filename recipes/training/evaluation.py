"""Evaluate a model: its loss, and a sample of its text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torchmetrics import MeanMetric
from transformers import PreTrainedTokenizerBase

from recipes.stages import Advance
from recipes.training.language_model import Batch, LanguageModel, num_targets, to_device
from recipes.training.pretrained import context_length


@torch.no_grad()
def token_loss(
    module: LanguageModel, batches: Iterable[Batch], advance: Advance | None = None
) -> float:
    """Return the mean loss in nats per token over the batches of all ranks; a collective.

    Args:
        module: evaluated on its current device.
        batches: this rank's share.
        advance: called after every batch.
    """
    was_training = module.training
    module.eval()
    mean = MeanMetric().to(module.device)
    for batch in batches:
        loss = module.test_step(to_device(batch, module.device), 0)
        mean.update(loss, weight=num_targets(batch))
        if advance is not None:
            advance(1)
    module.train(was_training)
    return float(mean.compute())


def generate_text(
    module: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    max_new_tokens: int,
    seed: int,
    temperature: float = 0.8,
) -> str:
    """Continue a prompt, sampling from the top 50 tokens; return both.

    Args:
        module: on any device; its mode is restored.
        tokenizer: the model's.
        prompt: if it has no token, the tokenizer's end of text is used.
        max_new_tokens: limit; prompt and new tokens together stay within the model's context.
        seed: of the sampling; the global random state is restored.
        temperature: of the sampling; 0: always take the most likely token.
    """
    tokens = tokenizer(prompt, add_special_tokens=False)["input_ids"] or [tokenizer.eos_token_id]
    context = context_length(module.model.config) or len(tokens) + max_new_tokens
    tokens = tokens[: max(context - max_new_tokens, 1)]
    was_training = module.training
    module.eval()
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 50}
    model: Any = module.model  # transformers types `generate` for its own mixins only
    # do not touch CUDA otherwise: a process forked from one that uses it cannot use it
    with isolate_rng(include_cuda=module.device.type == "cuda"):
        torch.manual_seed(seed)
        row = torch.tensor([tokens], device=module.device)
        output = model.generate(
            row,
            attention_mask=torch.ones_like(row),
            max_new_tokens=min(max_new_tokens, context - len(tokens)),
            **sampling,
            pad_token_id=tokenizer.eos_token_id,
        )
    module.train(was_training)
    return str(tokenizer.decode(output[0], skip_special_tokens=True))
