"""Streaming DiLoCo in a training loop of your own, without a Trainer.

torchrun --nproc-per-node 2 examples/plain_pytorch.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_commfree.diloco import streaming_diloco


def make_net():
    """Replace these three functions with your own."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 1))


def make_loader():
    """Return a loader of this rank's share of the data."""
    x = torch.randn(2048, 16, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x.square().sum(1, keepdim=True))
    return DataLoader(data, batch_size=16, sampler=DistributedSampler(data))


def loss_of(net, batch):
    """Return the loss of a batch."""
    x, y = batch
    return nn.functional.mse_loss(net(x), y)


def train(net, loader, epochs):
    """Train a replica."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    with streaming_diloco(net, optimizer, sync_every=20, overlap_steps=2) as diloco:
        for epoch in range(epochs):
            loader.sampler.set_epoch(epoch)
            for batch in loader:
                with diloco.stepping():
                    loss = loss_of(net, batch)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                diloco.after_step()
            if dist.get_rank() == 0:
                print(f"epoch {epoch}: loss {loss.item():.3f}")
    return diloco


if __name__ == "__main__":
    dist.init_process_group("gloo")
    net = make_net()
    diloco = train(net, make_loader(), epochs=4)
    weights = sum(p.double().sum().item() for p in net.parameters())  # equal on all ranks
    sent = diloco.ledger.bytes_sent
    print(f"rank {dist.get_rank()}: {diloco.step} steps, weights sum to {weights:.12f}")
    print(f"rank {dist.get_rank()}: sent {sent:,} bytes")
    dist.destroy_process_group()
