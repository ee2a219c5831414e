"""The LightningModule: any causal language model of transformers, trained to foretell tokens."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from huggingface_hub import snapshot_download
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from safetensors import SafetensorError
from torch import Tensor
from torchmetrics import MeanMetric
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from lightning_commfree import from_pretrained_on_meta
from recipes.training.optimizer import OptimizerFactory

# A block of tokens, int64, shape (batch, block_size + 1): inputs are all columns but the last,
# targets all but the first. Or what a transformers model takes, `labels` among it, int64 of shape
# (batch, tokens): a position's label is its own token, -100 where it is no target.
Batch = Tensor | dict[str, Tensor]

T = TypeVar("T")

NO_TARGET = -100  # transformers' label of a position that is not to be foretold


def num_targets(batch: Batch) -> int:
    """Return how many tokens are foretold in a batch."""
    if isinstance(batch, Tensor):
        return batch[:, 1:].numel()
    return int((batch["labels"][:, 1:] != NO_TARGET).sum())


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Return a batch on a device."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    return {name: tensor.to(device) for name, tensor in batch.items()}


def described(make: Callable[[], T], group: str = "model") -> T:
    """Return what `make` does of a description: transformers' config, or a model of it.

    Args:
        make: the maker.
        group: of the configuration, which has the description.

    Raises:
        ValueError: transformers, peft or torch cannot make it, whatever they say of it.
    """
    try:
        return make()
    except Exception as error:
        raise ValueError(
            f"The model cannot be made as `{group}` describes it. {type(error).__name__}: {error}"
        ) from error


def load_pretrained(kind: Any, name_or_path: str, **kwargs: Any) -> Any:
    """Return what one of transformers' Auto classes loads by hub id or from a folder.

    Args:
        kind: the Auto class.
        name_or_path: hub id or folder.
        **kwargs: of its `from_pretrained`.

    Raises:
        ValueError: it cannot be found or read, or its weights have other shapes.
    """
    try:
        return kind.from_pretrained(name_or_path, **kwargs)
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(
            f"'{name_or_path}' is neither a folder that `save_pretrained` has written nor an id"
            " that could be loaded from the Hugging Face hub or its local cache (without a"
            " network, or with HF_HUB_OFFLINE=1, only folders and ids loaded before are found)."
            f" What transformers says: {error}"
        ) from error
    except RuntimeError as error:
        raise ValueError(
            f"The weights in '{name_or_path}' do not fit the model: leave out keys of `model` that"
            f" change its shape. What transformers says: {error}"
        ) from error


def load_on_meta(kind: Any, name_or_path: str, config: PretrainedConfig) -> Any:
    """Return what `load_pretrained` does, without values: a strategy reads them part by part.

    Args:
        kind: the Auto class.
        name_or_path: hub id or folder.
        config: of the model.

    Raises:
        ValueError: it cannot be found or read, or lacks tensors.
    """
    folder = name_or_path
    try:
        if not os.path.isdir(folder):
            folder = snapshot_download(folder, allow_patterns=["*.json", "*.safetensors"])
        return from_pretrained_on_meta(kind, folder, config=config)
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"'{name_or_path}' cannot be read part by part: {error}") from error


class LanguageModel(pl.LightningModule):
    """Next-token prediction.

    Validation logs `val/loss`, the mean over all targets of all ranks in nats, and
    `val/perplexity`, its exponential.

    Args:
        model_config: a transformers config as `to_dict()` gives it, `model_type` included. Plain
            numbers, strings and lists, so a checkpoint that holds it loads with torch's
            `weights_only=True`.
        optimizer: makes optimizer and schedule from this module; None for a module that is only
            evaluated, as `LanguageModel.load_from_checkpoint(path)` gives it.
        pretrained: hub id or folder whose weights the model begins with, in fp32; None: fresh ones.
            Not remembered: a checkpoint of this module has weights of its own.
        lora: arguments of `peft.LoraConfig`: only adapters are trained; None: all parameters.
        gradient_checkpointing: compute activations again in backward instead of keeping them.
        on_meta: give the model no values yet: a strategy that divides it gives each rank its part,
            from the folder or the hub's cache where it is pretrained.
        compile_backend: of `torch.compile`, such as "inductor", for the transformers model alone
            (torch 2.13 cannot compile a LightningModule as a whole); None: not compiled.

    Attributes:
        model: the transformers model, in peft's wrapper under `lora`.

    Raises:
        ValueError: `pretrained` cannot be loaded.
    """

    def __init__(
        self,
        model_config: dict[str, Any],
        optimizer: OptimizerFactory | None = None,
        pretrained: str | None = None,
        lora: dict[str, Any] | None = None,
        gradient_checkpointing: bool = False,
        compile_backend: str | None = None,
        on_meta: bool = False,
    ) -> None:
        super().__init__()
        self.save_hyperparameters("model_config", "lora")
        config = described(lambda: AutoConfig.for_model(**model_config))
        if pretrained is None:
            with torch.device("meta") if on_meta else nullcontext():
                self.model = described(lambda: AutoModelForCausalLM.from_config(config))
        else:
            load = load_on_meta if on_meta else load_pretrained
            loaded = load(AutoModelForCausalLM, pretrained, config=config)
            self.model = loaded.float().train()  # it comes for evaluation, without dropout
        if getattr(self.model, "loss_type", "") is None:
            # transformers finds the loss by the class's name; where that says nothing it takes
            # this one and warns of it, in every rank
            self.model.loss_type = "ForCausalLM"
        if lora is not None:
            # in here: a third of a second that only those who use it shall wait for
            from peft import LoraConfig, get_peft_model

            lora_config = LoraConfig(task_type="CAUSAL_LM", **lora)
            with warnings.catch_warnings():
                # it sees by itself that GPT-2's layers keep their weights transposed, and says so
                warnings.filterwarnings("ignore", "fan_in_fan_out is set to False")
                warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
                model = self.model
                self.model = described(lambda: get_peft_model(model, lora_config), "lora")
        if gradient_checkpointing:
            # its name until transformers 5.22, which goes in 6
            old = getattr(self.model, "gradient_checkpointing_enable", None)
            enable: Any = getattr(self.model, "activation_checkpointing_enable", old)
            enable({"use_reentrant": False})  # the reentrant kind needs inputs with gradients
        self._compile_backend = compile_backend
        self._optimizer = optimizer
        self._validation_loss = MeanMetric()

    def configure_model(self) -> None:
        """Compile the model, if so asked; here, because a compiled model cannot be pickled."""
        if self._compile_backend is not None:
            self.model.compile(backend=self._compile_backend)
            self._compile_backend = None

    def loss(self, batch: Batch) -> Tensor:
        """Return the mean cross-entropy in nats over the targets of a batch, a scalar.

        The model's own: a strategy that divides the model then never puts its logits together.
        """
        if isinstance(batch, Tensor):
            targets = batch[:, 1:].contiguous()  # transformers views them as one row
            # `labels` asks for a loss, and `shift_labels` says of what: the last column too
            batch = {"input_ids": batch[:, :-1], "labels": targets, "shift_labels": targets}
        loss: Tensor = self.model(**batch, use_cache=False).loss
        return loss

    def test_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the loss of a batch.

        Whoever evaluates calls this and not `loss`: FSDP gathers a model's parameters for the steps
        that Lightning knows.
        """
        return self.loss(batch)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the loss of a batch; this rank's own goes to progress bar and loggers."""
        loss = self.loss(batch)
        self.log("train/loss", loss.detach(), prog_bar=True)
        return loss

    def on_validation_epoch_start(self) -> None:
        """Sum in fp32: `precision=bf16-true` casts the metric too, and counts of bf16 stop at 256.

        torchmetrics guards its sums against `Module.bfloat16`, not against the `Module.to` that
        Lightning calls.
        """
        self._validation_loss.set_dtype(torch.float32)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Add a batch to the epoch's mean; ranks exchange sums once, at the end of the epoch."""
        self._validation_loss.update(self.loss(batch), weight=num_targets(batch))
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
