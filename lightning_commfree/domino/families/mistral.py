"""Mistral: Llama's modules. Its sliding window is in the mask, which transformers makes."""

from lightning_commfree.domino.families.llama import Llama


class Mistral(Llama):
    """As Llama."""

    model_class = "MistralForCausalLM"
