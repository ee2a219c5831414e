"""Bytes that a replica sends: payloads of the wire formats, and formulas of the collectives.

They repeat formulas of the library, which imports torch; `tests/planner/test_library.py` compares
them.
"""

from __future__ import annotations

BLOCK = 256  # values per scale, in int8, fp4 and int2
GRADIENT_DTYPES = ("fp32", "bf16")
WIRE_DTYPES = ("fp32", "bf16", "int8", "fp4", "int2")


def payload_bytes(numel: int, wire_dtype: str) -> int:
    """Return the bytes of `numel` values in a wire format, including scales.

    Raises:
        ValueError: `wire_dtype` is not in `WIRE_DTYPES`.
    """
    scales = -(-numel // BLOCK)
    sizes = {
        "fp32": 4 * numel,
        "bf16": 2 * numel,
        "int8": numel + 4 * scales,
        "fp4": 8 * -(-numel // 16) + scales,  # two codes per byte, in whole words
        "int2": 8 * -(-numel // 32) + 2 * scales,  # four codes per byte
    }
    if wire_dtype not in sizes:
        raise ValueError(
            f"`wire_dtype={wire_dtype!r}` is not valid. Choose one of"
            f" {', '.join(map(repr, WIRE_DTYPES))}."
        )
    return sizes[wire_dtype]


def all_reduce_bytes(num_bytes: int, num_replicas: int) -> float:
    """Return the bytes that a replica sends to all-reduce `num_bytes` in a ring: 2b(M-1)/M."""
    return 2 * num_bytes * (num_replicas - 1) / num_replicas


def all_reduce_rounds(num_replicas: int) -> int:
    """Return the number of latencies of a ring all-reduce: its consecutive transfers."""
    return 2 * (num_replicas - 1)


def exchange_phases(num_replicas: int) -> int:
    """Return the number of phases of the exchange in `exchange_bytes`: one to gather, or two."""
    return 1 if num_replicas <= 2 else 2


def exchange_rounds(num_replicas: int) -> int:
    """Return the number of latencies of the exchange in `exchange_bytes`.

    In a phase all replicas send to all others at once. It has two latencies: gloo's receiver tells
    the sender that it is ready, then the data comes.
    """
    return 0 if num_replicas == 1 else 2 * exchange_phases(num_replicas)


def vote_bytes(numel: int, num_replicas: int) -> float:
    """Return the bytes that a worker sends to vote on `numel` signs by majority.

    The cheaper of two methods, as in `exchange_bytes`: one bit per sign to all other workers; or
    one bit up to the worker that counts, and the result down, which takes one bit, or two for an
    even number of workers because of ties.
    """
    plane = numel / 8
    down_planes = 2 if num_replicas % 2 == 0 else 1
    gathered = plane * (num_replicas - 1)
    return min(gathered, (1 + down_planes) * plane * (num_replicas - 1) / num_replicas)


def power_sgd_floats(numel: int, width: float, rank: int, in_block: bool) -> float:
    """Return how many values DDP's PowerSGD hook all-reduces instead of a layer's gradients.

    An n x m matrix becomes (n + m) times the rank. As the shapes of a layer are unknown, a block is
    assumed to be GPT-2's (12 width^2 parameters, whose matrices have 16 width rows and columns in
    total), and the parameters outside of blocks to be an embedding. Vectors are ignored.
    """
    sides = 16 / 12 * numel / width if in_block else numel / width + width
    return min(rank * sides, numel)


def exchange_bytes(num_bytes: int, num_replicas: int) -> float:
    """Return the bytes that a replica sends to exchange a payload of `num_bytes`.

    The cheaper of two methods: every replica gathers all payloads, b(M-1); or each replica averages
    its shard of all payloads and the encoded means are gathered, 2b(M-1)/M. They are equal for
    M = 2.
    """
    gathered = num_bytes * (num_replicas - 1)
    return min(gathered, all_reduce_bytes(num_bytes, num_replicas))
