"""Tensors and modules: shards, weight swap, meta initialization, transformer blocks."""
