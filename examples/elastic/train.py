"""Train one replica of an elastic job: start as many as you like, whenever you like.

    python examples/elastic/train.py    # in several terminals

End one with `kill -9`, start it again, and it joins the others.

They share a store: the folder `elastic_store`, or the URL in `COMMFREE_STORE` (docs/elastic.md).
Each replica has its own Trainer, which sees this replica only.
"""

import os
from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_commfree import ElasticDiLoCoStrategy


class Regression(L.LightningModule):
    """Replace this with your own module."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 1))

    def training_step(self, batch, _):
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    L.seed_everything(1)  # the same on all replicas: they begin with equal weights and data
    x = torch.randn(4096, 16)
    data = DataLoader(TensorDataset(x, x.square().sum(1, keepdim=True)), 16, shuffle=True)
    folder = Path("elastic_store").resolve()  # one store for each job
    folder.mkdir(exist_ok=True)
    strategy = ElasticDiLoCoStrategy(
        store=os.environ.get("COMMFREE_STORE", folder.as_uri()),
        max_replicas=8,
        min_replicas=1,
        sync_every=20,
        overlap_steps=2,
    )
    trainer = L.Trainer(
        accelerator="auto",
        devices=1,
        strategy=strategy,
        max_steps=int(os.environ.get("MAX_STEPS", 2000)),  # the same on all replicas
        enable_progress_bar=False,
        log_every_n_steps=20,
    )
    model = Regression()
    trainer.fit(model, data)
    weights = sum(p.double().sum().item() for p in model.parameters())  # equal on all replicas
    print(f"slot {strategy.slot}: step {trainer.global_step}, weights sum to {weights:.12f}")
