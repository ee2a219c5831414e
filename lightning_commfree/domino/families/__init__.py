"""The architectures of transformers that are scheduled, a file for each.

A new one is a `Family` in a file of its own, and its name in the list below. transformers is not
imported, so that the library does not need it: a model is known by the name of its class.
"""

from torch import nn

from lightning_commfree.domino.families.base import Family
from lightning_commfree.domino.families.gemma import Gemma
from lightning_commfree.domino.families.gemma2 import Gemma2
from lightning_commfree.domino.families.gemma3 import Gemma3
from lightning_commfree.domino.families.gpt2 import GPT2
from lightning_commfree.domino.families.llama import Llama
from lightning_commfree.domino.families.mistral import Mistral
from lightning_commfree.domino.families.qwen2 import Qwen2
from lightning_commfree.domino.families.qwen3 import Qwen3

FAMILIES: dict[str, Family] = {
    family.model_class: family
    for family in (GPT2(), Llama(), Mistral(), Qwen2(), Qwen3(), Gemma(), Gemma2(), Gemma3())
}
"""The families that are scheduled, by the name of their class in transformers."""


def family_of(model: nn.Module) -> Family | None:
    """Return how a model is divided and scheduled; None for an architecture that is not here."""
    return FAMILIES.get(type(model).__name__)


__all__ = ["FAMILIES", "Family", "family_of"]
