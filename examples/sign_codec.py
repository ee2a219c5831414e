"""A codec of your own: the sign of every value and their mean magnitude, 1 bit a parameter.

So coarse a codec needs error feedback: what it loses is added to the next outer gradient. With a
weight of 1, the outer optimizer must have no momentum.

python examples/sign_codec.py
"""

from functools import partial

import lightning as L
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.nn.functional import pad

from lightning_commfree import StreamingDiLoCoStrategy

SCALE_BYTES = 4


class SignCodec:
    """Scaled signs with error feedback (EF-signSGD, arXiv:1901.09847)."""

    name, error_feedback = "sign", 1.0

    def num_bytes(self, numel):
        return SCALE_BYTES + -(-numel // 8)

    def encode(self, values, out, residual=None):
        # zeros may be padding: they must not make the scale smaller
        scale = values.abs().sum() / values.count_nonzero().clamp(min=1)
        out[:SCALE_BYTES].view(torch.float32).copy_(scale)

        positive = pad(values >= 0, (0, -values.numel() % 8)).view(-1, 8)
        weights = 2 ** torch.arange(8, device=values.device)
        out[SCALE_BYTES:].copy_((positive * weights).sum(dim=1))
        if residual is not None:
            torch.sub(values, torch.where(values >= 0, scale, -scale), out=residual)

    def decode(self, payload, numel, values, out):
        index = torch.arange(values.start, values.stop, device=payload.device)
        bits = payload[SCALE_BYTES:][index // 8] >> index % 8 & 1
        scale = payload[:SCALE_BYTES].view(torch.float32)
        out.copy_((2.0 * bits - 1.0) * scale)


if __name__ == "__main__":
    outer = partial(torch.optim.SGD, lr=1.0)  # momentum would repeat the residual
    strategy = StreamingDiLoCoStrategy(
        sync_every=10, mix=0.0, wire_dtype=SignCodec(), outer_optimizer=outer
    )
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=2)
    trainer.fit(BoringModel())
