"""Train an image classifier with BatchNorm: two replicas that exchange weights in 4 bits.

python examples/image_classifier.py
"""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.functional import accuracy

from lightning_commfree import StreamingDiLoCoStrategy

CLASSES, SIDE = 10, 12


class Classifier(L.LightningModule):
    """An ordinary module. BatchNorm statistics are averaged together with the weights."""

    def __init__(self):
        super().__init__()
        layers = []
        for channels, width in ((1, 16), (16, 32)):
            layers += [nn.Conv2d(channels, width, 3), nn.BatchNorm2d(width), nn.ReLU()]
        self.net = nn.Sequential(*layers, nn.MaxPool2d(4), nn.Flatten(), nn.LazyLinear(CLASSES))
        self.net(torch.zeros(2, 1, SIDE, SIDE))  # one pass sets the size of the lazy layer

    def training_step(self, batch, _):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, _):
        score = accuracy(self.net(batch[0]), batch[1], task="multiclass", num_classes=CLASSES)
        self.log("val/accuracy", score, prog_bar=True, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def images(count, seed):
    """Return noisy images: each class is a pattern, shifted by up to two pixels each way."""
    patterns = torch.randn(CLASSES, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=random)
    moves = torch.randint(-2, 3, (count, 2), generator=random).tolist()
    moved = [patterns[c].roll(m, (0, 1)) for c, m in zip(labels, moves, strict=True)]
    noise = torch.randn(count, 1, SIDE, SIDE, generator=random)
    return TensorDataset(torch.stack(moved).unsqueeze(1) + noise, labels)


if __name__ == "__main__":
    L.seed_everything(1)
    strategy = StreamingDiLoCoStrategy(sync_every=20)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=4, log_every_n_steps=10
    )
    train, validation = images(4096, seed=1), images(512, seed=2)
    trainer.fit(Classifier(), DataLoader(train, 32, shuffle=True), DataLoader(validation, 64))
