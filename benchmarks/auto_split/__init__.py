"""Does Domino choose its split well? `python -m benchmarks.auto_split`."""
