"""Qwen2: Llama's modules, with biases on query, key and value, which go with their rows."""

from lightning_commfree.domino.families.llama import Llama


class Qwen2(Llama):
    """As Llama."""

    model_class = "Qwen2ForCausalLM"
