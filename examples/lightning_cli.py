r"""Set the strategy with LightningCLI, in a YAML file or on the command line.

python examples/lightning_cli.py fit --config examples/lightning_cli.yaml
python examples/lightning_cli.py fit --config examples/lightning_cli.yaml \
    --trainer.strategy.sync_every=10
"""

import lightning as L
import torch
from lightning.pytorch.cli import LightningCLI  # pip install 'jsonargparse[signatures]'
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Curve(L.LightningModule):
    """A small network that fits a curve."""

    def __init__(self, width: int = 32, lr: float = 1e-2):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, 1))
        self.lr = lr

    def training_step(self, batch, _):
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class Points(L.LightningDataModule):
    """Points on a sine curve."""

    def __init__(self, count: int = 4096, batch_size: int = 32):
        super().__init__()
        self.count, self.batch_size = count, batch_size

    def train_dataloader(self):
        x = torch.linspace(-3, 3, self.count).unsqueeze(1)
        return DataLoader(TensorDataset(x, x.sin()), self.batch_size, shuffle=True)


if __name__ == "__main__":
    cli = LightningCLI(Curve, Points)
    trainer = cli.trainer
