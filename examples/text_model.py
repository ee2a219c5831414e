"""Train a byte-level language model: two processes vote with one bit per parameter and step.

python examples/text_model.py [FILE]
"""

import argparse
import sys
from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_commfree import DistributedLion, DistributedLionStrategy

WIDTH, LENGTH, BYTES = 64, 64, 256


class ByteModel(L.LightningModule):
    """A transformer that predicts the next byte."""

    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(BYTES, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, BYTES)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=tokens.device)
        x = self.embed(tokens) + self.place.weight
        return self.head(self.blocks(x, mask, is_causal=True))

    def training_step(self, batch, _):
        (tokens,) = batch
        logits = self(tokens[:, :-1]).flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        # a quarter of AdamW's learning rate, four times its weight decay, betas for a short run
        return DistributedLion(self.parameters(), lr=1e-3, betas=(0.8, 0.9), weight_decay=0.04)


if __name__ == "__main__":
    L.seed_everything(1)
    file = sys.argv[1] if len(sys.argv) > 1 else argparse.__file__  # any text file
    text = torch.frombuffer(bytearray(Path(file).read_bytes()), dtype=torch.uint8).long()
    rows = text.unfold(0, LENGTH + 1, LENGTH // 2)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=DistributedLionStrategy(), max_epochs=4
    )
    trainer.fit(ByteModel(), DataLoader(TensorDataset(rows), 16, shuffle=True))
