"""Build data and module of a pretraining run from its configuration."""

from __future__ import annotations

from hydra.utils import instantiate

from recipes.data.token_data import TokenDataModule
from recipes.stages import stage
from recipes.training.language_model import LanguageModel, built_from_config
from recipes.training.launch import builds_on_meta
from recipes.training.memory import check_memory
from recipes.training.run import Config, factory


def build(config: Config) -> tuple[TokenDataModule, LanguageModel]:
    """Build data and module from a composed `conf/pretrain.yaml`.

    Raises:
        ValueError: the model does not fit into memory, or a constructor refuses a value.
    """
    data = build_data(config)
    check_memory(config, lambda: build_module(config, data))
    with stage("making the model"):
        return data, build_module(config, data)


def build_data(config: Config) -> TokenDataModule:
    """Build the data module with its tokenizer, training the tokenizer if necessary."""
    tokenizer = instantiate(config["tokenizer"], _convert_="all")
    return factory(config["data"])(tokenizer=tokenizer)


def build_module(config: Config, data: TokenDataModule) -> LanguageModel:
    """Build the module; the tokenizer completes the transformers config in `conf/model/`."""
    tokenizer = data.tokenizer
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    make = factory(config["model"])
    model_config = built_from_config(lambda: make(vocab_size=len(tokenizer), **ends))
    return LanguageModel(
        model_config.to_dict(),
        factory(config["optimizer"]),
        gradient_checkpointing=config["gradient_checkpointing"],
        compile_backend=config["compile"],
        on_meta=builds_on_meta(config),
    )
