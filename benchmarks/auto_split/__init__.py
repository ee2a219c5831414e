"""How well `split="auto"` of Domino chooses: `python -m benchmarks.auto_split`."""
