"""Gemma: Llama's modules, and an embedding that is scaled."""

from lightning_commfree.domino.families.llama import Llama


class Gemma(Llama):
    """Its scale stands in the embedding or, in older transformers, behind it."""

    model_class = "GemmaForCausalLM"
    embedding_is_stream = False
