"""Parameters of a model by layer, and their division into fragments."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from commfree_planner.simulation import Exchange, Message

_BLOCKS_PER_FRAGMENT = 3  # the default of `diloco.fragments`, after section 3.1 of the paper


@dataclass(frozen=True)
class Model:
    """Trainable parameters by block.

    Layer 0 contains the parameters outside of blocks (embeddings, final norm, head). It is first in
    forward and last in backward, and its compute time is zero; the blocks, layers 1 ... L, share
    the step time in proportion to their parameters.

    Args:
        block_params: parameters of each block, in forward order.
        rest_params: parameters outside of blocks.
        width: activations per token between blocks; None assumes a GPT-2 with blocks of this size.

    Raises:
        ValueError: there is no block, a block has no parameter, or a number is negative.
    """

    block_params: tuple[int, ...]
    rest_params: int = 0
    width: int | None = None

    def __post_init__(self) -> None:
        if not self.block_params or min(self.block_params) < 1 or self.rest_params < 0:
            raise ValueError(
                f"`block_params={self.block_params}`, `rest_params={self.rest_params}`: a model"
                " needs at least one block, and every block at least one parameter. Pass the"
                " number of trainable parameters of each transformer block."
            )

    @property
    def params(self) -> int:
        """Total number of parameters."""
        return sum(self.block_params) + self.rest_params

    @property
    def default_num_fragments(self) -> int:
        """Default P: 3 blocks per fragment, and one fragment for parameters outside of blocks."""
        return math.ceil(len(self.block_params) / _BLOCKS_PER_FRAGMENT) + bool(self.rest_params)

    @property
    def activation_width(self) -> float:
        """The width; by default derived from 12 width^2 parameters per block."""
        mean_block = sum(self.block_params) / len(self.block_params)
        return math.sqrt(mean_block / 12) if self.width is None else self.width

    def layer_params(self, layer: int) -> int:
        """Return the number of parameters of a layer; 0 is outside of blocks."""
        return self.block_params[layer - 1] if layer else self.rest_params

    def layer_seconds(self, step_seconds: float) -> list[float]:
        """Return the compute time of each layer in a step, layer 0 first."""
        in_blocks = sum(self.block_params)
        return [0.0, *(step_seconds * params / in_blocks for params in self.block_params)]

    def fragments(self, num_fragments: int) -> list[list[int]]:
        """Return the layers of each fragment, strided over the blocks.

        Raises:
            ValueError: there are too few blocks for this number of fragments.
        """
        has_rest = bool(self.rest_params)
        layers = range(1, len(self.block_params) + 1)
        if not 1 <= num_fragments <= len(layers) + has_rest:
            raise ValueError(
                f"`num_fragments={num_fragments}` is not between 1 and"
                f" {len(layers) + has_rest}: the model has {len(layers)} blocks"
                f"{' and parameters outside of them' if has_rest else ''}. Choose a number in this"
                f" range, or null for {self.default_num_fragments}."
            )
        if num_fragments == 1:
            return [[0, *layers]]
        groups = num_fragments - has_rest
        strided = [[layer for layer in layers if (layer - 1) % groups == p] for p in range(groups)]
        return [*strided, [0]] if has_rest else strided


def build_exchange(
    model: Model,
    sent_bytes: Callable[[int], float],
    *,
    sync_every: int = 1,
    num_fragments: int = 1,
    overlap_steps: int = 0,
    by_layer: bool,
    rounds: int = 0,
    connections: int = 1,
    phases: int = 1,
    sync_seconds: float = 0.0,
) -> Exchange:
    """Return the messages of a replica; the defaults are those of data parallelism.

    Args:
        model: the model.
        sent_bytes: returns the bytes that a replica sends for a number of parameters.
        sync_every: H, inner steps.
        num_fragments: P.
        overlap_steps: tau, inner steps.
        by_layer: True: a layer's share leaves when its parameter gradient is available, and that
            layer's forward waits for it, as in the paper's simulation and, in buckets, in DDP.
            False: a fragment leaves as a whole after the step, and the next step waits for it, as
            in `StreamingDiLoCo`.
        rounds: number of latencies of a message.
        connections: on which a replica sends a message.
        phases: of a message.
        sync_seconds: time per cycle in which a replica encodes and decodes.
    """
    fragments = []
    for layers in model.fragments(num_fragments):
        sizes = [model.layer_params(layer) for layer in layers]
        if by_layer:
            messages = [
                Message(i, i, sent_bytes(n), rounds, connections, phases)
                for i, n in zip(layers, sizes, strict=True)
            ]
        else:
            messages = [Message(0, 0, sent_bytes(sum(sizes)), rounds, connections, phases)]
        fragments.append(tuple(messages))
    return Exchange(sync_every, overlap_steps, tuple(fragments), sync_seconds)
