"""Real outer gradients, and their error after encoding and decoding.

Besides the wire formats of the library there are variants of E3M0 with other blocks and scales,
simulated in plain tensor arithmetic, to justify the choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

from benchmarks.common.pretraining import composed
from lightning_commfree.diloco import (
    CODECS,
    OuterFragment,
    default_outer_optimizer,
    split_into_fragments,
)
from lightning_commfree.diloco.codec import decode_all
from recipes.training.pretraining import build_data, build_module

POWERS = 7  # magnitudes of E3M0 besides zero
BLOCKS = (32, 64, 128, 256, 512, 1024, None)  # None: one block for the fragment
POWER_SCALE_BITS = 8


class Error(NamedTuple):
    """Error of a format over all outer gradients together.

    `relative_rms` is the norm of the error over the norm of the values; `zeroed` is the share of
    nonzero values that become zero.
    """

    bits_per_value: float
    relative_rms: float
    cosine: float
    zeroed: float


def outer_gradients(
    sync_every: int, cycles: int, batch_size: int, overrides: Sequence[str] = ()
) -> list[list[Tensor]]:
    """Train the model of `recipes.pretrain` in this process; return its outer gradients.

    Args:
        sync_every: inner steps between old and new weights.
        cycles: number of outer gradients. The inner optimizer continues from one to the next, and
            old weights are those at the end of the previous cycle, as with an outer learning rate
            of 1 and no momentum.
        batch_size: blocks of tokens per step.
        overrides: for `conf/pretrain.yaml`.

    Returns:
        Old minus new weights, fp32 and flat, by cycle and default fragment.
    """
    words = [f"trainer.max_steps={cycles * sync_every}", f"data.batch_size={batch_size}"]
    config = composed([*words, *overrides])
    torch.manual_seed(config["seed"])
    data = build_data(config)
    module = build_module(config, data)
    batches = _endless(DataLoader(data.blocks("train"), batch_size, shuffle=True, drop_last=True))
    optimizers = cast(Any, module.configure_optimizers())
    optimizer, scheduler = optimizers["optimizer"], optimizers["lr_scheduler"]["scheduler"]
    gradients = []
    for _ in range(cycles):
        named = split_into_fragments(module, None, "strided")
        outer = default_outer_optimizer(2, sync_every)
        fragments = [OuterFragment(module, f, outer) for f in named]
        for _ in range(sync_every):
            optimizer.zero_grad()
            module.loss(next(batches)).backward()
            clip_grad_norm_(module.parameters(), config["trainer"]["gradient_clip_val"])
            optimizer.step()
            scheduler.step()
        with torch.no_grad():
            gradients.append([fragment.outer_gradient() for fragment in fragments])
    return gradients


def wire_errors(gradients: Sequence[Tensor]) -> dict[str, Error]:
    """Return the error of every wire format over all of `gradients`."""
    errors = {}
    for name, wire in CODECS.items():
        num_bytes = sum(wire.num_bytes(values.numel()) for values in gradients)
        decoded = []
        for values in gradients:
            payload = torch.empty(wire.num_bytes(values.numel()), dtype=torch.uint8)
            wire.encode(values, out=payload)
            decoded.append(decode_all(wire, payload, torch.empty_like(values)))
        errors[name] = _error(gradients, decoded, 8 * num_bytes)
    return errors


def grid_errors(gradients: Sequence[Tensor]) -> dict[tuple[int | None, str], Error]:
    """Return the error of E3M0 by block size and scale, over all of `gradients`."""
    errors = {}
    for block in BLOCKS:
        for scale, (bits, top_of) in SCALES.items():
            decoded = [e3m0(values, block, top_of) for values in gradients]
            num_bits = sum(4 * v.numel() + bits * _num_blocks(v, block) for v in gradients)
            errors[block, scale] = _error(gradients, decoded, num_bits)
    return errors


def e3m0(values: Tensor, block: int | None, top_of: Callable[[Tensor], Tensor]) -> Tensor:
    """Round flat fp32 `values` to 0 or to the seven powers of two below the block's top."""
    size = block or values.numel()
    padded = torch.zeros(_num_blocks(values, block) * size)
    padded[: values.numel()] = values
    blocks_BV = padded.view(-1, size)
    return _rounded(blocks_BV, top_of(blocks_BV)).view(-1)[: values.numel()]


def _rounded(blocks_BV: Tensor, top_B1: Tensor) -> Tensor:
    """Round to the nearest of 0 and top * 2^-6 .. top * 2^0, ties away from zero."""
    relative_BV = blocks_BV.abs() / top_B1
    mantissa_BV, exponent_BV = torch.frexp(relative_BV)  # mantissa in [0.5, 1)
    exponent_BV = exponent_BV - 1 + (mantissa_BV >= 0.75).to(torch.int32)
    powers_BV = torch.exp2(exponent_BV.clamp(1 - POWERS, 0).float())
    powers_BV[relative_BV < 2.0**-POWERS] = 0.0
    return torch.where(top_B1 > 0, powers_BV * top_B1, 0.0).copysign(blocks_BV)


def _largest(blocks_BV: Tensor) -> Tensor:
    return blocks_BV.abs().amax(dim=1, keepdim=True)


def _power(blocks_BV: Tensor, threshold: float) -> Tensor:
    """Return the power of two below the largest magnitude, or above if that is >= `threshold`."""
    mantissa_B1, exponent_B1 = torch.frexp(_largest(blocks_BV))
    exponent_B1 = exponent_B1 - 1 + (2 * mantissa_B1 >= threshold).to(torch.int32)
    return torch.where(mantissa_B1 > 0, torch.exp2(exponent_B1.float()), 0.0)


def _best(blocks_BV: Tensor, tops: Sequence[Tensor]) -> Tensor:
    """Return the top with the least squared error for every block."""
    tops_BK = torch.cat(list(tops), dim=1)
    losses_BK = torch.stack(
        [(_rounded(blocks_BV, top) - blocks_BV).square().sum(1) for top in tops], dim=1
    )
    return tops_BK.gather(1, losses_BK.argmin(dim=1, keepdim=True))


SCALES: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "power of two, nearest": (POWER_SCALE_BITS, lambda b: _power(b, 1.5)),
    "power of two, down": (POWER_SCALE_BITS, lambda b: _power(b, 2.0)),
    "power of two, up": (POWER_SCALE_BITS, lambda b: _power(b, 1.0)),
    "power of two, least error": (
        POWER_SCALE_BITS,
        lambda b: _best(b, [_power(b, 1.5) * 2.0**k for k in (-2, -1, 0, 1)]),
    ),
    "fp16 largest": (16, lambda b: _largest(b).half().float()),
    "fp32 largest": (32, _largest),
    "fp32, least error of 24": (
        32,
        lambda b: _best(b, [_largest(b) * 2.0 ** (k / 8) for k in range(-16, 8)]),
    ),
}


def _error(gradients: Sequence[Tensor], decoded: Sequence[Tensor], num_bits: int) -> Error:
    values, back = (torch.cat(list(parts)).double() for parts in (gradients, decoded))
    lost = (back == 0) & (values != 0)
    return Error(
        num_bits / values.numel(),
        float((back - values).norm() / values.norm()),
        float(torch.dot(back, values) / (back.norm() * values.norm())),
        float(lost.sum() / (values != 0).sum()),
    )


def _num_blocks(values: Tensor, block: int | None) -> int:
    return math.ceil(values.numel() / block) if block else 1


def _endless(loader: DataLoader[Tensor]) -> Iterator[Tensor]:
    while True:
        yield from loader
