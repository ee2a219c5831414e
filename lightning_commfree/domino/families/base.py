"""What an architecture has to say of itself, so that its models are divided and scheduled."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import nn

from lightning_commfree.domino.sharding import Sharding, vocabulary
from lightning_commfree.domino.sublayers import Sublayer


class Family(ABC):
    """An architecture: a causal language model of equal blocks, each attention and then an MLP.

    Attributes:
        model_class: name of the class in transformers.
        embedding_is_stream: the first block gets the embedding as it is.
    """

    model_class: ClassVar[str]
    embedding_is_stream: ClassVar[bool] = False

    @abstractmethod
    def check(self, model: Any, ranks: int) -> None:
        """See that a model can be divided; it is not changed.

        Raises:
            ValueError: heads or widths do not fit the ranks.
        """

    def can_be_scheduled(self, model: Any) -> bool:
        """Return whether its blocks do nothing but what their sublayers do."""
        del model
        return True

    def returns_tensor(self, block: nn.Module) -> bool:
        """Return whether a block returns its output as it is, and not in a tuple."""
        returned = inspect.signature(type(block).forward).return_annotation
        return "tuple" not in str(returned).lower()

    @abstractmethod
    def blocks(self, model: Any) -> nn.ModuleList:
        """Return the blocks, in order."""

    @abstractmethod
    def embedding(self, model: Any) -> tuple[nn.Module, str]:
        """Return the owner of the words' embedding, and its name there."""

    @abstractmethod
    def shard_block(self, sharding: Sharding, block: Any) -> None:
        """Divide one block."""

    @abstractmethod
    def sublayers(self, name: str, block: Any) -> Sequence[Sublayer]:
        """Return the sublayers of a divided block, in order.

        Args:
            name: of the block.
            block: divided.
        """

    def vocabulary(self, model: Any) -> tuple[nn.Module, nn.Module]:
        """Return embedding and head."""
        return getattr(*self.embedding(model)), model.lm_head

    def shard(self, sharding: Sharding) -> None:
        """Divide a model, block by block."""
        model = sharding.model
        blocks = self.blocks(model)
        for block in blocks:
            sharding.materializer.materialize(block)
            self.shard_block(sharding, block)
        vocabulary(sharding, self.embedding(model), (model, "lm_head"))

        if not self.can_be_scheduled(model):
            return
        sharding.blocks = blocks
        sharding.sublayers = [
            sublayer
            for i, block in enumerate(blocks)
            for sublayer in self.sublayers(f"layer {i}", block)
        ]
        sharding.embedding_is_stream = self.embedding_is_stream
