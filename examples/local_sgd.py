"""Write your own algorithm between replicas: average their weights every few steps.

python examples/local_sgd.py
"""

import lightning as L
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_commfree.comm.requests import STOP
from lightning_commfree.model.weight_swap import SharedCopy, WeightSwap
from lightning_commfree.strategies import DataParallel, LocalCopies, ReplicaStrategy


class LocalSGD(LocalCopies):
    """Local SGD (arXiv:1805.09767)."""

    name = "Local SGD"

    def __init__(self, module, channel, requests, every):
        self.step = 0
        self._channel, self._requests, self._every = channel, requests, every
        self._shared = SharedCopy(module)
        self.weight_swap = WeightSwap([self._shared])

    def after_step(self):
        self.step += 1
        if self.step % self._every == 0:
            self._average()

    def finish(self):
        with self.weight_swap.local_weights():
            self._average()

    @torch.no_grad()
    def _average(self):
        local, stops = self._shared.local, float(self._requests.outgoing() == STOP)
        sums = torch.cat([*(tensor.reshape(-1) for tensor in local), torch.tensor([stops])])
        sums = self._channel.all_reduce(sums, "average").wait()
        *means, wishes = sums.split([*(tensor.numel() for tensor in local), 1])
        for tensor, mean in zip(local, means, strict=True):
            tensor.copy_((mean / self._channel.size).view_as(tensor))
        self._shared.take_local()
        self._requests.incoming(STOP if wishes else 0)  # some replica wants all to stop

    def cycle(self):  # bytes that a rank sends in so many steps, by tag
        size = sum(tensor.numel() for tensor in self._shared.local) + 1
        return {"average": 8 * size * (self._channel.size - 1) / self._channel.size}, self._every

    def state_dict(self):
        shared = {"step": self.step, "weights": self._shared.outer()}  # equal in all replicas
        return shared, {"weights": self.weight_swap.local}  # and this replica's own

    def load_state_dict(self, shared, own):
        self.step = shared["step"]
        self._shared.load(shared["weights"])
        self.weight_swap.load_local((own or shared)["weights"])


class LocalSGDStrategy(ReplicaStrategy):
    """Train replicas with `LocalSGD`."""

    def __init__(self, every=10, **ddp_kwargs):
        super().__init__(DataParallel(), **ddp_kwargs)
        self.every = every

    def fingerprint(self):
        return {"every": str(self.every)}

    def make_algorithm(self, trainer):
        return LocalSGD(self.module, self.channels.between, self.requests, self.every)


if __name__ == "__main__":
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=LocalSGDStrategy(), max_epochs=2)
    trainer.fit(BoringModel())
