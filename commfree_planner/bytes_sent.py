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


def exchange_bytes(num_bytes: int, num_replicas: int) -> float:
    """Return the bytes that a replica sends to exchange a payload of `num_bytes`.

    The cheaper of two ways: every replica gathers all payloads, b(M-1); or each averages its share
    of all payloads and the encoded mean is gathered, 2b(M-1)/M. They are equal for M = 2.
    """
    return min(num_bytes * (num_replicas - 1), all_reduce_bytes(num_bytes, num_replicas))
