"""A LightningModule around a tiny Hugging Face model, and its data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from lightning_commfree.host import pl

WORDS = 37  # odd
LENGTH = 9


def make(kind: str, dropout: float = 0.0) -> Any:
    """Return a "gpt2" with a tied head or a "llama" with grouped queries; big weights, so that
    a mistake shows."""
    torch.manual_seed(0)
    if kind == "gpt2":
        rates = dict.fromkeys(("resid_pdrop", "attn_pdrop", "embd_pdrop"), dropout)
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16}
        words = {"vocab_size": WORDS, "bos_token_id": 0, "eos_token_id": 0}
        model: Any = GPT2LMHeadModel(GPT2Config(**sizes, **words, **rates))
    else:
        config = LlamaConfig(
            vocab_size=WORDS,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=16,
            attention_bias=True,
            attention_dropout=dropout,
        )
        model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


class CausalLM(pl.LightningModule):
    """The Hugging Face model is two modules deep, and computes its own loss."""

    def __init__(self, kind: str = "gpt2", lr: float = 1e-2, dropout: float = 0.0) -> None:
        super().__init__()
        self.wrapped = torch.nn.ModuleDict({"lm": make(kind, dropout)})
        self.lr = lr

    def training_step(self, batch: Any, i: int) -> Tensor:
        loss = self.wrapped["lm"](input_ids=batch[0], labels=batch[0]).loss
        if i == 0:
            self.log("loss", loss, on_step=True)
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        logits = self.wrapped["lm"](input_ids=batch[0]).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), batch[0][:, 1:].flatten()
        )
        self.log("val_loss", loss, sync_dist=True, batch_size=len(batch[0]))

    def configure_optimizers(self) -> Any:
        # the gradient of a key's bias is 0 but for rounding, which a small eps would blow up
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=0.1, eps=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


def words(rows: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randint(0, WORDS, (rows, LENGTH), generator=generator))


def loader(rows: int, batch_size: int) -> DataLoader[Any]:
    return DataLoader(words(rows), batch_size=batch_size)
