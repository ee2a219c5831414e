"""The LightningModule: next-token prediction with any causal language model of transformers."""

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
# targets all but the first. Or the arguments of a transformers model including `labels`, int64 of
# shape (batch, tokens): the label of a position is its own token, -100 where it is not a target.
Batch = Tensor | dict[str, Tensor]

T = TypeVar("T")

NO_TARGET = -100  # transformers' label of a position that is not a target


def num_targets(batch: Batch) -> int:
    """Return the number of targets in a batch."""
    if isinstance(batch, Tensor):
        return batch[:, 1:].numel()
    return int((batch["labels"][:, 1:] != NO_TARGET).sum())


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Move a batch to a device."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    return {name: tensor.to(device) for name, tensor in batch.items()}


def built_from_config(make: Callable[[], T], group: str = "model") -> T:
    """Call `make`; raise its errors as errors of the configuration.

    Args:
        make: builds a config or model of transformers.
        group: of the configuration, for the message.

    Raises:
        ValueError: transformers, peft or torch cannot build it.
    """
    try:
        return make()
    except Exception as error:
        raise ValueError(
            f"The model cannot be built from the settings in `{group}`."
            f" {type(error).__name__}: {error}"
        ) from error


def load_pretrained(kind: Any, name_or_path: str, **kwargs: Any) -> Any:
    """Load with one of transformers' Auto classes, from the hub or a folder.

    Args:
        kind: the Auto class.
        name_or_path: hub id or folder.
        **kwargs: for its `from_pretrained`.

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
            f" transformers reports: {error}"
        ) from error
    except RuntimeError as error:
        raise ValueError(
            f"The weights in '{name_or_path}' do not fit the model: leave out keys of `model` that"
            f" change its shape. transformers reports: {error}"
        ) from error


def load_on_meta(kind: Any, name_or_path: str, config: PretrainedConfig) -> Any:
    """Build a pretrained model without values, which a strategy later reads shard by shard.

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
        raise ValueError(f"'{name_or_path}' cannot be read shard by shard: {error}") from error


class LanguageModel(pl.LightningModule):
    """Next-token prediction with a causal language model of transformers.

    Validation logs `val/loss`, the mean over all targets of all ranks in nats, and
    `val/perplexity`, its exponential.

    Args:
        model_config: a transformers config as `to_dict()` gives it, `model_type` included. Plain
            numbers, strings and lists, so a checkpoint that holds it loads with torch's
            `weights_only=True`.
        optimizer: creates optimizer and schedule from this module; None for a module that is only
            evaluated, as `LanguageModel.load_from_checkpoint(path)` gives it.
        pretrained: hub id or folder with the initial weights, loaded in fp32; None: random ones.
            Not a hyperparameter, because a checkpoint of this module has its own weights.
        lora: arguments of `peft.LoraConfig` to train only adapters; None: train all parameters.
        gradient_checkpointing: recompute activations in backward instead of keeping them.
        on_meta: leave the model without values; a sharding strategy gives each rank its shard,
            reading a pretrained model from its folder or the hub's cache.
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
        config = built_from_config(lambda: AutoConfig.for_model(**model_config))
        if pretrained is None:
            with torch.device("meta") if on_meta else nullcontext():
                self.model = built_from_config(lambda: AutoModelForCausalLM.from_config(config))
        else:
            load = load_on_meta if on_meta else load_pretrained
            loaded = load(AutoModelForCausalLM, pretrained, config=config)
            self.model = loaded.float().train()  # loaded in eval mode, without dropout
        if getattr(self.model, "loss_type", "") is None:
            # transformers derives the loss from the class's name; otherwise it uses this one,
            # with a warning in every rank
            self.model.loss_type = "ForCausalLM"
        if lora is not None:
            # here: importing it takes a third of a second, which only LoRA needs
            try:
                from peft import LoraConfig, get_peft_model
            except ImportError as error:
                raise ValueError(
                    "`lora` needs the library `peft`: pip install 'peft>=0.14', or this project's"
                    " extra `recipes`."
                ) from error

            lora_config = built_from_config(
                lambda: LoraConfig(task_type="CAUSAL_LM", **lora), "lora"
            )
            with warnings.catch_warnings():
                # it detects GPT-2's transposed weights by itself, with this warning
                warnings.filterwarnings("ignore", "fan_in_fan_out is set to False")
                warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
                model = self.model
                self.model = built_from_config(lambda: get_peft_model(model, lora_config), "lora")
        if gradient_checkpointing:
            # the name before transformers 5.22, to be removed in 6
            old = getattr(self.model, "gradient_checkpointing_enable", None)
            enable: Any = getattr(self.model, "activation_checkpointing_enable", old)
            enable({"use_reentrant": False})  # the reentrant variant needs inputs with gradients
        self._compile_backend = compile_backend
        self._optimizer = optimizer
        self._validation_loss = MeanMetric()

    def configure_model(self) -> None:
        """Compile the model if requested; here, because a compiled model cannot be pickled."""
        if self._compile_backend is not None:
            self.model.compile(backend=self._compile_backend)
            self._compile_backend = None

    def loss(self, batch: Batch) -> Tensor:
        """Return the mean cross-entropy in nats over the targets of a batch, a scalar.

        Uses the model's own loss, so that a strategy that shards the model need not gather logits.
        """
        if isinstance(batch, Tensor):
            targets = batch[:, 1:].contiguous()  # transformers flattens them by `view`
            # `labels` requests a loss; `shift_labels` are the targets, including the last column
            batch = {"input_ids": batch[:, :-1], "labels": targets, "shift_labels": targets}
        loss: Tensor = self.model(**batch, use_cache=False).loss
        return loss

    def test_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the loss of a batch.

        Evaluation must call this instead of `loss`: FSDP gathers parameters only for the steps that
        Lightning knows.
        """
        return self.loss(batch)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the loss of a batch; log this rank's loss."""
        loss = self.loss(batch)
        self.log("train/loss", loss.detach(), prog_bar=True)
        return loss

    def on_validation_epoch_start(self) -> None:
        """Keep sums in fp32: `precision=bf16-true` would cast them, and bf16 cannot count past 256.

        torchmetrics protects its sums from `Module.bfloat16` but not from `Module.to`, which
        Lightning calls.
        """
        self._validation_loss.set_dtype(torch.float32)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Add a batch to the epoch's mean; ranks exchange their sums at the end of the epoch."""
        self._validation_loss.update(self.loss(batch), weight=num_targets(batch))
        self.log("val/loss", self._validation_loss, prog_bar=True)

    def on_validation_epoch_end(self) -> None:
        """Log the perplexity; computing the mean communicates, and Lightning reuses the result."""
        perplexity = torch.exp(self._validation_loss.compute())
        # already equal on all ranks, but without `sync_dist` Lightning would warn
        self.log("val/perplexity", perplexity, sync_dist=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Create optimizer and schedule with the factory.

        Raises:
            ValueError: the module has no factory.
        """
        if self._optimizer is None:
            raise ValueError(
                "This LanguageModel was created without an optimizer and can only be evaluated. To"
                " train it, pass `optimizer=`, a function that receives the module and returns what"
                " `configure_optimizers` should return."
            )
        return self._optimizer(self)
