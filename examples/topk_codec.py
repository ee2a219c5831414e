"""A codec of your own: only the largest values of each chunk, half a bit a parameter.

All other values wait in the residual (SparseLoCo, arXiv:2508.15706). At H = 15, with an overlap
of one step and 257 exchanges, the loss was 2.6 % above that of fp4 (benchmarks/size_ladder). So it
is for links that are too slow for anything else.

python examples/topk_codec.py
"""

from functools import partial

import lightning as L
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.nn.functional import pad

from lightning_commfree import StreamingDiLoCoStrategy

CHUNK, KEPT = 4096, 64  # values per chunk, and how many of them are sent


class TopKCodec:
    """Positions (int16) and values (bf16) of the `KEPT` largest values of each chunk."""

    name, error_feedback = f"topk({KEPT} of {CHUNK})", 0.95

    def num_bytes(self, numel):
        return 4 * KEPT * -(-numel // CHUNK)

    def encode(self, values, out, residual=None):
        sent_places, sent_values = self._split(out)
        rows = pad(values, (0, -values.numel() % CHUNK)).view(len(sent_places), CHUNK)
        places = rows.abs().topk(KEPT).indices
        sent_places.copy_(places)
        sent_values.copy_(rows.gather(1, places))
        if residual is not None:
            self.decode(out, values.numel(), slice(0, values.numel()), residual)
            torch.sub(values, residual, out=residual)

    def decode(self, payload, numel, values, out):
        first, last = values.start // CHUNK, -(-values.stop // CHUNK)
        places, kept = (part[first:last] for part in self._split(payload))
        rows = torch.zeros(last - first, CHUNK, device=out.device)
        rows.scatter_(1, places.long(), kept.float())
        out.copy_(rows.flatten()[values.start - first * CHUNK :][: out.numel()])

    def _split(self, payload):
        half, shape = payload.numel() // 2, (payload.numel() // (4 * KEPT), KEPT)
        places, kept = payload[:half], payload[half:]
        return places.view(torch.int16).view(shape), kept.view(torch.bfloat16).view(shape)


if __name__ == "__main__":
    outer = partial(torch.optim.SGD, lr=1.0)  # momentum would repeat the residual
    strategy = StreamingDiLoCoStrategy(
        sync_every=10, mix=0.0, wire_dtype=TopKCodec(), outer_optimizer=outer
    )
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=2)
    trainer.fit(BoringModel())
