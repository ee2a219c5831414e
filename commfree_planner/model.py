"""A model as the planner sees it: parameters by layer, and which of them leave together."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from commfree_planner.dag import Exchange, Message

_BLOCKS_PER_FRAGMENT = 3  # as `diloco.fragments` takes them, after section 3.1 of the paper


@dataclass(frozen=True)
class Model:
    """Trainable parameters by block.

    Layer 0 is what stands in no block (embeddings, final norm, head). It comes first in a forward
    and last in a backward, and computes nothing; the blocks, layers 1 ... L, share the step's time
    in proportion to their parameters.

    Args:
        block_params: of each block, in the order of the forward.
        rest_params: of everything else.
        width: of the activations between blocks, numbers a token; None takes that of a GPT-2 with
            blocks of this size.

    Raises:
        ValueError: there is no block, or a number is negative or all are zero.
    """

    block_params: tuple[int, ...]
    rest_params: int = 0
    width: int | None = None

    def __post_init__(self) -> None:
        if not self.block_params or min(self.block_params) < 1 or self.rest_params < 0:
            raise ValueError(
                f"`block_params={self.block_params}`, `rest_params={self.rest_params}`: a model"
                " needs at least one block, and every block at least one parameter. Count the"
                " trainable parameters of each transformer block."
            )

    @property
    def params(self) -> int:
        """All parameters."""
        return sum(self.block_params) + self.rest_params

    @property
    def default_num_fragments(self) -> int:
        """P where the user gives none: 3 blocks per fragment, and one fragment for the rest."""
        return math.ceil(len(self.block_params) / _BLOCKS_PER_FRAGMENT) + bool(self.rest_params)

    @property
    def activation_width(self) -> float:
        """The width; where nobody gave it, from 12 width^2 parameters in a block."""
        mean_block = sum(self.block_params) / len(self.block_params)
        return math.sqrt(mean_block / 12) if self.width is None else self.width

    def layer_params(self, layer: int) -> int:
        """Return the parameters of a layer; 0 is the rest."""
        return self.block_params[layer - 1] if layer else self.rest_params

    def layer_seconds(self, step_seconds: float) -> list[float]:
        """Return how the layers share the compute time of a step, layer 0 first."""
        in_blocks = sum(self.block_params)
        return [0.0, *(step_seconds * params / in_blocks for params in self.block_params)]

    def fragments(self, num_fragments: int) -> list[list[int]]:
        """Return the layers of each fragment, "strided": block i to fragment i mod (P - 1).

        Raises:
            ValueError: there are too few blocks for as many fragments.
        """
        has_rest = bool(self.rest_params)
        layers = range(1, len(self.block_params) + 1)
        if not 1 <= num_fragments <= len(layers) + has_rest:
            raise ValueError(
                f"`num_fragments={num_fragments}` is not between 1 and"
                f" {len(layers) + has_rest}: the model has {len(layers)} blocks"
                f"{' and something besides' if has_rest else ''}. Choose P in that range, or null"
                f" for {self.default_num_fragments}."
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
) -> Exchange:
    """Return what a replica sends; the defaults are those of data parallelism.

    Args:
        model: the model.
        sent_bytes: bytes that a replica sends for so many parameters.
        sync_every: H, inner steps.
        num_fragments: P.
        overlap_steps: tau, inner steps.
        by_layer: True: a layer's share leaves as soon as its parameter gradient is there and is
            waited for by that layer's forward, as in the paper's simulation and, in buckets, in
            DDP. False: a fragment leaves in one piece after the step and is waited for before the
            next one, as `StreamingDiLoCo` does it.
        rounds: times that a message waits for the link's latency.
    """
    fragments = []
    for layers in model.fragments(num_fragments):
        sizes = [model.layer_params(layer) for layer in layers]
        if by_layer:
            messages = [
                Message(i, i, sent_bytes(n), rounds) for i, n in zip(layers, sizes, strict=True)
            ]
        else:
            messages = [Message(0, 0, sent_bytes(sum(sizes)), rounds)]
        fragments.append(tuple(messages))
    return Exchange(sync_every, overlap_steps, tuple(fragments))
