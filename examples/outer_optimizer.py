"""Use your own outer optimizer, with a learning-rate schedule: Yogi (arXiv:2003.00295).

python examples/outer_optimizer.py
"""

import lightning as L
import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, TensorDataset

from lightning_commfree import StreamingDiLoCoStrategy


class Yogi(torch.optim.Optimizer):
    """Keeps everything in `state`, so checkpoints contain it and a resume is exact."""

    def __init__(self, params, lr=0.02, betas=(0.9, 0.99), eps=1e-3):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                state, square = self.state[p], p.grad.square()
                if not state:
                    state["m"], state["v"] = torch.zeros_like(p), square.clone()
                state["m"].lerp_(p.grad, 1 - beta1)
                state["v"].sub_((state["v"] - square).sign() * square, alpha=1 - beta2)
                p.addcdiv_(state["m"], state["v"].sqrt().add_(group["eps"]), value=-group["lr"])


def outer_optimizer(parameters):
    """Return a fragment's optimizer and its scheduler, which steps after every outer step."""
    yogi = Yogi(parameters)
    return yogi, LinearLR(yogi, start_factor=0.25, total_iters=5)


class Regression(L.LightningModule):
    """Any module: its own optimizer is the inner optimizer."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))

    def training_step(self, batch, _):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    L.seed_everything(1)
    x = torch.randn(4096, 16)
    data = DataLoader(TensorDataset(x, x.sin().mean(1, keepdim=True)), 16, shuffle=True)
    strategy = StreamingDiLoCoStrategy(sync_every=10, outer_optimizer=outer_optimizer)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=3)
    trainer.fit(Regression(), data)
