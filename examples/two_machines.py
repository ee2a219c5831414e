r"""Train your own module on two machines with torchrun.

Run this on the first machine, where HOST is its address, and with `--node-rank 1` on the second:

torchrun --nnodes 2 --nproc-per-node 1 --master-addr HOST --master-port 29500 --node-rank 0 \
    examples/two_machines.py
"""

import os

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_commfree import StreamingDiLoCoStrategy


class Regression(L.LightningModule):
    """Replace this with your own module: it needs no code for several machines."""

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
    L.seed_everything(1)
    x = torch.randn(4096, 16)
    data = DataLoader(TensorDataset(x, x.square().sum(1, keepdim=True)), 16, shuffle=True)
    strategy = StreamingDiLoCoStrategy(sync_every=20, overlap_steps=2)
    trainer = L.Trainer(
        accelerator="auto",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),  # torchrun's --nproc-per-node
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", 2)),  # torchrun's --nnodes
        strategy=strategy,
        max_epochs=2,
        enable_progress_bar=False,
        log_every_n_steps=20,
    )
    model = Regression()
    trainer.fit(model, data)
    weights = sum(p.double().sum().item() for p in model.parameters())  # equal on all ranks
    sent = strategy.ledger.bytes_by_phase["steps"]
    print(f"rank {trainer.global_rank}: {trainer.global_step} steps, weights sum to {weights:.12f}")
    print(f"rank {trainer.global_rank}: sent in training steps {dict(sent)} bytes")
