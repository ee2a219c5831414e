"""Format numbers for messages."""

from __future__ import annotations

from decimal import Decimal


def plain(number: float) -> str:
    """Format a number with three significant digits and no exponent: 0.0123, 1.23, 1,230."""
    return f"{Decimal(f'{number:.3g}'):,f}"


def counted(number: int, noun: str) -> str:
    """Format a count with its noun: 1 step, 1,200 steps."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def traffic_sentences(
    steps: int, sent_bytes: int, ddp_bytes: float, waited_s: float, to: str = ""
) -> str:
    """Describe what rank 0 sent in a fit, beside what fp32 DDP would have sent.

    `to` is inserted after the number of bytes sent, for example " to other replicas".
    """
    times = f", {plain(ddp_bytes / sent_bytes)} times as much" if sent_bytes else ""
    return (
        f"Trained {counted(steps, 'step')}. Rank 0 sent {human_bytes(sent_bytes)}{to} (fp32 DDP"
        f" would have sent {human_bytes(ddp_bytes)}{times}) and waited {waited_s:.2f} s for"
        " communication."
    )


def human_bytes(num_bytes: float) -> str:
    """Format a number of bytes with three significant digits and a decimal unit: 1.23 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 999.5:
            return f"{plain(num_bytes)} {unit}"
        num_bytes /= 1000
    return f"{plain(num_bytes)} TB"
