"""Which architectures does Domino divide? `python -m benchmarks.architectures`."""
