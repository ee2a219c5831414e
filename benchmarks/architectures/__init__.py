"""Architectures that Domino supports: `python -m benchmarks.architectures`."""
