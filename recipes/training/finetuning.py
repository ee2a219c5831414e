"""Build data and module of a fine-tuning run from its configuration."""

from __future__ import annotations

from typing import Any

from hydra.utils import instantiate
from transformers import PretrainedConfig

from recipes.data.training_data import TrainingData
from recipes.stages import stage
from recipes.training.forked import without_initializing_cuda
from recipes.training.language_model import LanguageModel
from recipes.training.launch import builds_on_meta
from recipes.training.memory import check_memory
from recipes.training.pretrained import check_fit, check_packing, find_pretrained, one_block
from recipes.training.run import Config, factory


def build(config: Config) -> tuple[TrainingData, LanguageModel]:
    """Build data and module from a composed `conf/finetune.yaml`.

    Raises:
        FileNotFoundError: a path or glob matches nothing.
        ValueError: model, data and strategy do not fit together, one of them cannot be read, or the
            model does not fit into memory.
    """
    _check_parts(config)
    config = _with_found_models(config)
    model_config = instantiate(config["model"], _convert_="all")
    data = build_data(config)
    check_fit(model_config, data.tokenizer, data.block_size)
    check_memory(config, lambda: build_module(config, model_config, pretrained=False))
    with stage("loading the model"):
        module = build_module(config, model_config)
    if config["data"].get("packing"):
        on_meta = builds_on_meta(config)
        without_initializing_cuda(
            lambda: check_packing(one_block(model_config) if on_meta else module.model)
        )
    return data, module


def build_data(config: Config) -> TrainingData:
    """Build the data module with its tokenizer."""
    tokenizer = instantiate(_with_found_models(config)["tokenizer"], _convert_="all")
    return factory(config["data"])(tokenizer=tokenizer)


def build_module(
    config: Config, model_config: PretrainedConfig, pretrained: bool = True
) -> LanguageModel:
    """Build the module, with adapters if `lora` is given; `pretrained=False` loads no weights."""
    return LanguageModel(
        model_config.to_dict(),
        factory(config["optimizer"]),
        pretrained=config["model"]["name_or_path"] if pretrained else None,
        lora=config["lora"],
        gradient_checkpointing=config["gradient_checkpointing"],
        compile_backend=config["compile"],
        on_meta=builds_on_meta(config),
    )


def _with_found_models(config: Config) -> Config:
    """Replace globs and folders of pretrained models by absolute paths."""
    found: dict[str, Any] = {}
    for group in ("model", "tokenizer"):
        part = config[group]
        if "name_or_path" in part:
            part = {**part, "name_or_path": find_pretrained(part["name_or_path"])}
        found[group] = part
    return {**config, **found}


def _check_parts(config: Config) -> None:
    if "name_or_path" not in config["model"]:
        raise ValueError(
            f"model._target_={config['model']['_target_']} describes a new model without weights"
            " to fine-tune. Use `model=pretrained model.name_or_path=...`, or pretrain it"
            " (`python -m recipes.pretrain`)."
        )
