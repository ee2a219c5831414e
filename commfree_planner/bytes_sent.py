"""How many bytes leave a replica: `diloco.wire`'s formats and `comm.ledger`'s formulas, foretold.

They are written down a second time because those modules import torch; a test compares them.
"""

from __future__ import annotations

_BLOCK = 256  # values that share a scale, in int8 and fp4
GRADIENT_DTYPES = ("fp32", "bf16")
WIRE_DTYPES = ("fp32", "bf16", "int8", "fp4")


def payload_bytes(numel: int, wire_dtype: str) -> int:
    """Return the bytes of `numel` values in a wire format, its scales included.

    Raises:
        ValueError: `wire_dtype` is none of `WIRE_DTYPES`.
    """
    scales = -(-numel // _BLOCK)
    sizes = {
        "fp32": 4 * numel,
        "bf16": 2 * numel,
        "int8": numel + 4 * scales,
        "fp4": 8 * -(-numel // 16) + scales,  # two codes a byte, in whole words
    }
    if wire_dtype not in sizes:
        raise ValueError(
            f"`wire_dtype={wire_dtype!r}` is unknown. Choose one of"
            f" {', '.join(map(repr, WIRE_DTYPES))}."
        )
    return sizes[wire_dtype]


def all_reduce_bytes(num_bytes: int, num_replicas: int) -> float:
    """Return the bytes that a replica sends to all-reduce `num_bytes` in a ring: 2b(M-1)/M."""
    return 2 * num_bytes * (num_replicas - 1) / num_replicas


def all_reduce_rounds(num_replicas: int) -> int:
    """Return how often a ring all-reduce passes the link, one after the other."""
    return 2 * (num_replicas - 1)


def exchange_rounds(num_replicas: int) -> int:
    """Return how often the cheaper way of `exchange_bytes` passes the link."""
    return num_replicas - 1 if num_replicas <= 2 else all_reduce_rounds(num_replicas)


def vote_bytes(numel: int, num_replicas: int) -> float:
    """Return the bytes that a worker sends to vote on `numel` signs by majority.

    The cheaper of two ways, as of `exchange_bytes`: one bit for each to all others; or one bit up
    to the worker that counts, and the result down, one bit, or two where the number of workers is
    even and a tie can come.
    """
    plane = numel / 8
    down_planes = 2 if num_replicas % 2 == 0 else 1
    gathered = plane * (num_replicas - 1)
    return min(gathered, (1 + down_planes) * plane * (num_replicas - 1) / num_replicas)


def power_sgd_floats(numel: int, width: float, rank: int, in_block: bool) -> float:
    """Return how many numbers DDP's PowerSGD hook reduces in place of a layer's gradients.

    A matrix of n x m becomes n + m times the rank. A layer's shapes are not known here: a block is
    taken for one of GPT-2's (12 width^2 parameters whose matrices have 16 width rows and columns),
    what is outside of blocks for a table of embeddings. Vectors are left out.
    """
    sides = 16 / 12 * numel / width if in_block else numel / width + width
    return min(rank * sides, numel)


def exchange_bytes(num_bytes: int, num_replicas: int) -> float:
    """Return the bytes that a replica sends to exchange a payload of `num_bytes`.

    The cheaper of two ways: every replica gathers all payloads, b(M-1); or each averages its share
    of all payloads and the encoded mean is gathered, 2b(M-1)/M. They are equal for M = 2.
    """
    return min(num_bytes * (num_replicas - 1), all_reduce_bytes(num_bytes, num_replicas))
