"""Small GPT-2 fits on random tokens, used to measure time, memory and traffic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel, PreTrainedModel


def gpt2(vocabulary: int, positions: int, layers: int, width: int) -> GPT2LMHeadModel:
    """Return a GPT-2 with four heads and random weights, the same at every call."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=vocabulary,
            n_positions=positions,
            n_layer=layers,
            n_embd=width,
            n_head=4,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


class Tokens(Dataset[Tensor]):
    """Uniformly random tokens, int64 of shape (length,), generated on access."""

    def __init__(self, vocabulary: int, length: int) -> None:
        self._vocabulary, self._length = vocabulary, length

    def __len__(self) -> int:
        return 100_000

    @override
    def __getitem__(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(self._vocabulary, (self._length,), generator=generator)


class Module(pl.LightningModule):
    """Train a model without logging.

    Args:
        model: None if a subclass creates it in `configure_model`.
        optimizer: creates the optimizer from the parameters.
        zeros: leave the last position without a target, as transformers' own loss does: the
            gradient of its embedding is then exactly zero. Otherwise its target is the first token.
    """

    def __init__(
        self,
        model: PreTrainedModel | None,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        zeros: bool = False,
    ) -> None:
        super().__init__()
        self.model: Any = model
        self._optimizer, self._zeros = optimizer, zeros

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self.model(input_ids=batch, use_cache=False).logits
        targets = batch.roll(-1, dims=1)
        if self._zeros:
            logits, targets = logits[:, :-1], targets[:, :-1]
        return cross_entropy(logits.flatten(0, 1), targets.flatten())

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._optimizer(self.parameters(), lr=1e-4)


def quiet_trainer(
    strategy: Strategy | str,
    nodes: int,
    max_steps: int,
    callbacks: Sequence[pl.Callback],
    devices: int = 1,
    precision: Any = "32-true",
    accelerator: str = "cpu",
) -> pl.Trainer:
    """Return a Trainer that writes and prints nothing."""
    return pl.Trainer(
        accelerator=accelerator,
        devices=devices,
        precision=precision,
        num_nodes=nodes,
        strategy=strategy,
        max_steps=max_steps,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def loader(tokens: Tokens, batch_size: int) -> DataLoader[Tensor]:
    """Return a loader of batches of tokens, in order."""
    return DataLoader(tokens, batch_size=batch_size)
