"""The LightningModule: any causal language model of transformers, trained on blocks of tokens."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.nn.functional import cross_entropy
from torchmetrics import MeanMetric
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from recipes.training.optimizer import OptimizerFactory


class LanguageModel(pl.LightningModule):
    """Next-token prediction with a freshly initialized model.

    A batch is an int64 tensor of shape (batch, block_size + 1): inputs are all columns but the
    last, targets all but the first. Validation logs `val/loss`, the mean over all tokens of all
    ranks in nats, and `val/perplexity`, its exponential.

    Args:
        model_config: a transformers config as `to_dict()` gives it, `model_type` included. Plain
            numbers, strings and lists, so a checkpoint that holds it loads with torch's
            `weights_only=True`.
        optimizer: makes optimizer and schedule from this module; None for a module that is only
            evaluated, as `LanguageModel.load_from_checkpoint(path)` gives it.

    Attributes:
        model: the transformers model.
    """

    def __init__(
        self, model_config: dict[str, Any], optimizer: OptimizerFactory | None = None
    ) -> None:
        super().__init__()
        self.save_hyperparameters(ignore="optimizer")
        config = AutoConfig.for_model(**model_config)
        self.model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
        self._optimizer = optimizer
        self._validation_loss = MeanMetric()

    def loss(self, batch: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats over the targets of a batch, a scalar."""
        logits = self.model(input_ids=batch[:, :-1], use_cache=False).logits
        return cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the loss of a batch; this rank's own goes to progress bar and loggers."""
        loss = self.loss(batch)
        self.log("train/loss", loss.detach(), prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Add a batch to the epoch's mean; ranks exchange sums once, at the end of the epoch."""
        self._validation_loss.update(self.loss(batch), weight=batch[:, 1:].numel())
        self.log("val/loss", self._validation_loss, prog_bar=True)

    def on_validation_epoch_end(self) -> None:
        """Log the perplexity; ranks meet here, and Lightning finds the mean computed."""
        perplexity = torch.exp(self._validation_loss.compute())
        # equal on all ranks already, which Lightning cannot know: without `sync_dist` it would warn
        self.log("val/perplexity", perplexity, sync_dist=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return what the optimizer factory makes.

        Raises:
            ValueError: the module was made without one.
        """
        if self._optimizer is None:
            raise ValueError(
                "This LanguageModel was made without an optimizer and can only be evaluated. To"
                " train it, pass `optimizer=`, a function from the module to what"
                " `configure_optimizers` returns."
            )
        return self._optimizer(self)
