"""Fine-tune with LoRA on two processes: only the adapters are trained and exchanged.

python examples/lora.py [FOLDER]     a folder written by `save_pretrained`; default: a small GPT-2
"""

import sys

import lightning as L
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from lightning_commfree import StreamingDiLoCoStrategy

ADAPTER, LENGTH = "outputs/lora", 32


class Tuning(L.LightningModule):
    """A causal language model with frozen weights and trainable adapters."""

    def __init__(self, base):
        super().__init__()
        self.model = get_peft_model(base, LoraConfig(r=8, target_modules="all-linear"))

    def training_step(self, batch, _):
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-2)


def small_model():
    """Build a model, so that nothing is downloaded."""
    config = GPT2Config(vocab_size=128, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=2)
    return GPT2LMHeadModel(config)


if __name__ == "__main__":
    L.seed_everything(1)
    folder = sys.argv[1:]
    model = Tuning(AutoModelForCausalLM.from_pretrained(*folder) if folder else small_model())
    starts = torch.randint(64, (2048, 1))
    rows = (starts + torch.arange(LENGTH)) % 64  # counting upwards, which the adapters learn
    strategy = StreamingDiLoCoStrategy(sync_every=20)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=2)
    trainer.fit(model, DataLoader(rows, 8, shuffle=True))
    if trainer.is_global_zero:
        model.model.save_pretrained(ADAPTER)
        exchanged = sum(map(len, strategy.fragments))
        print(f"{ADAPTER}: only the {exchanged} adapter tensors were exchanged")
