"""A value of a wrong kind or out of range is refused in a sentence, before anything starts.

What is legal is written down here once more, by hand; 300 seeded mutations are compared with it.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from torch import nn

from recipes.configuration.keys import CONF
from recipes.configuration.sentences import sentence
from recipes.configuration.values import check_values
from recipes.data.tokenizer import byte_tokenizer
from recipes.planning import model_from_config
from recipes.training.language_model import LanguageModel, described
from recipes.training.run import factory

Legal = Callable[[Any], bool]
WRITTEN = ["-1", "0", "7", "3.7", "0.5", "-0.5", "1e30", "nan", "inf", "-inf", "true", "null"]
WRITTEN += ["abc", "''", "'7'", "[]", "[1,2,3]", "[true]", "{}", "{a:1}"]


def whole(least: int) -> Legal:
    return lambda value: type(value) is int and value >= least


def number(low: float, high: float = math.inf, open_low: bool = False) -> Legal:
    def legal(value: Any) -> bool:
        if type(value) not in (int, float) or not math.isfinite(value):
            return False
        return (value > low if open_low else value >= low) and value <= high

    return legal


def text(value: Any) -> bool:
    return type(value) is str


def flag(value: Any) -> bool:
    return type(value) is bool


def null(legal: Legal) -> Legal:
    return lambda value: value is None or legal(value)


def one_of(*choices: Any) -> Legal:
    return lambda value: type(value) in map(type, choices) and value in choices


def no(value: Any) -> bool:
    return False


TRAINING: dict[str, Legal] = {
    "seed": whole(0),
    "gradient_checkpointing": flag,
    "compile": null(no),
    "check_memory": flag,
    "ckpt_path": null(text),
    "checkpoint_every_n_steps": whole(0),
    "run_dir": text,
    "cache_dir": text,
    "report": lambda value: type(value) is dict,
    "report.prompt": null(text),
    "report.sample_tokens": whole(0),
    "callbacks": lambda value: value == [],
    "trainer.accelerator": no,
    "trainer.devices": lambda v: v in (-1, "7") or whole(1)(v) or v == [1, 2, 3],
    "trainer.num_nodes": whole(1),
    "trainer.precision": null(no),
    "trainer.max_steps": whole(-99),  # told by the recipe, which says why
    "trainer.max_epochs": null(lambda v: v == -1 or whole(1)(v)),
    "trainer.accumulate_grad_batches": whole(1),
    "trainer.gradient_clip_val": null(number(0)),
    "trainer.val_check_interval": null(lambda v: whole(1)(v) or number(0, 1, open_low=True)(v)),
    "trainer.check_val_every_n_epoch": null(whole(1)),
    "trainer.num_sanity_val_steps": whole(-1),
    "trainer.limit_val_batches": lambda v: whole(0)(v) or number(0, 1)(v),
    "trainer.log_every_n_steps": whole(0),
    "trainer.enable_model_summary": null(flag),
    "data.block_size": whole(1),
    "data.batch_size": whole(1),
    "data.num_workers": whole(0),
    "optimizer.lr": number(0),
    "optimizer.betas": no,
    "optimizer.weight_decay": number(0),
    "optimizer.warmup_steps": null(whole(0)),
    "optimizer.final_lr_fraction": number(0, 1),
    "strategy.sync_every": whole(2),  # `overlap_steps` must be below
    "strategy.num_fragments": null(whole(1)),
    "strategy.fragment_pattern": no,
    "strategy.overlap_steps": whole(0),
    "strategy.mix": number(0, 1),
    "strategy.wire_dtype": no,
    "strategy.outer_optimizer": null(no),
    "strategy.replica_size": whole(1),
    "strategy.check_drift_every": whole(0),
    "strategy.outer_device": null(no),
    "strategy.start_method": no,
    "strategy.timeout.minutes": number(0, 1e6, open_low=True),
    "logger.csv.save_dir": text,
}
PRETRAINING: dict[str, Legal] = {
    **TRAINING,
    "token_budget": null(lambda v: whole(-99)(v) or (number(0)(v) and v <= 1e18)),
    "tokenizer.vocab_size": whole(1),
    "model.n_embd": whole(1),
    "model.n_layer": whole(1),
    "model.n_head": whole(1),
    "model.attn_pdrop": number(0, 1),
    "model.activation_function": text,  # transformers says which there are
}
LINES: dict[str, tuple[list[str], dict[str, Legal]]] = {
    "pretrain": ([], PRETRAINING),
    "finetune": (
        ["model.name_or_path=gpt2", "data=responses", "data.corpus.train=a.jsonl", "lora=default"],
        {
            **TRAINING,
            "data.packing": flag,
            "data.validation_fraction": number(0.1, 0.9),
            "data.corpus.train": lambda v: text(v) or v == [],
            "lora.r": whole(1),
            "lora.lora_alpha": whole(1),
            "lora.lora_dropout": number(0, 0.9),
        },
    ),
    "plan": (
        ["model=llama_tiny", "step_time=1", "bandwidth=1"],
        {
            "step_time": number(0, open_low=True),
            "bandwidth": lambda v: number(0, open_low=True)(v) or v == math.inf,
            "num_replicas": whole(1),
            "replica_size": whole(1),
            "sync_every": whole(1),
            "num_fragments": null(whole(1)),
            "targets": no,
            "advice_target": number(0.1, 0.9),
            "vocab_size": null(whole(1)),
            "data.block_size": whole(1),
            "model.hidden_size": whole(1),
            "model.num_hidden_layers": whole(1),
            "model.num_attention_heads": whole(1),
            "model.tie_word_embeddings": flag,
        },
    ),
    "compare": (
        [],
        {
            **PRETRAINING,
            "strategies": lambda value: value == [],  # told by the recipe
            "bandwidth": null(text),
            "nodes": whole(1),
            "timeout_minutes": null(number(0, open_low=True)),
            "overrides": lambda value: value == {},
            "overrides.ddp": null(lambda value: type(value) is dict),
        },
    ),
}


@pytest.fixture(scope="module")
def composed() -> dict[str, DictConfig]:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return {
            recipe: compose(recipe, ["run_dir=here", *words])
            for recipe, (words, _) in LINES.items()
        }


def _mutations(count: int) -> list[tuple[str, str, str]]:
    draw = random.Random(17)
    return [
        (recipe, draw.choice(list(LINES[recipe][1])), draw.choice(WRITTEN))
        for recipe in draw.choices(list(LINES), k=count)
    ]


def _refusal(check: Callable[[], object]) -> str | None:
    """Return the sentence that a command would end with; None if nothing is refused."""
    try:
        check()
    except Exception as error:
        told = sentence(error)
        if told is None:  # the command would show a traceback
            raise
        return told
    return None


def _read(recipe: str, cfg: DictConfig, key: str) -> None:
    """Let those read the value who fail on one that types and ranges cannot find."""
    group = key.partition(".")[0]
    if group == "optimizer":
        factory(OmegaConf.to_container(cfg.optimizer, resolve=True))(nn.Linear(1, 1))
    if group not in ("model", "data") or recipe == "finetune":
        return
    model = OmegaConf.to_container(cfg.model, resolve=True)
    if recipe == "plan":
        model_from_config(model, cfg.vocab_size)
    else:
        vocabulary = len(byte_tokenizer())
        config = described(lambda: factory(model)(vocab_size=vocabulary))
        with torch.device("meta"):
            LanguageModel(config.to_dict())


def test_of_300_mutations_nonsense_is_refused_and_nothing_else_before_it_is_read(composed) -> None:
    wrong, refused = [], 0
    for recipe, key, written in _mutations(300):
        value = OverridesParser.create().parse_override(f"{key}={written}").value()
        cfg = copy.deepcopy(composed[recipe])
        OmegaConf.update(cfg, key, value, merge=False)
        told = _refusal(lambda cfg=cfg, recipe=recipe: check_values(cfg, recipe))
        plain = OmegaConf.to_container(cfg, resolve=False)
        for part in key.split("."):
            plain = plain[part]
        if (told is None) != LINES[recipe][1][key](plain):
            wrong.append((recipe, f"{key}={written}", told))
        if told is None:
            _refusal(lambda cfg=cfg, recipe=recipe, key=key: _read(recipe, cfg, key))
        refused += told is not None
    assert not wrong
    assert 100 < refused < 290, "both happen"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "data.batch_size=-1",
            "`data.batch_size=-1` is not legal for recipes.data.token_data",
        ),
        ("data.batch_size=3.7", "it should be a valid integer."),
        (
            "tokenizer.vocab_size=3.7",
            "`tokenizer.vocab_size=3.7` is not legal for recipes.data",
        ),
        (
            "model.n_head=0",
            "is not legal for transformers.GPT2Config: it should be greater",
        ),
        ("gradient_checkpointing=-1", "`gradient_checkpointing=-1` is not legal: it should be a"),
        ("strategy.num_fragments=true", "`strategy.num_fragments=true` is not legal for lightning"),
        ("strategy.sync_every=0", "`sync_every=0` must be at least 1: it counts the inner steps"),
        ("strategy.start_method=threads", "it should be 'popen', 'spawn', 'fork' or 'forkserver'."),
        ("trainer.precision=bf17", '`trainer.precision="bf17"` is not legal for lightning.pytorch'),
        ("compile=inducktor", "`compile=inducktor` is no backend of torch. There are: "),
        ("callbacks=[3]", "`callbacks=[3]` is not legal: it should be an object."),
        # the key that was written is told, not the one that refers to it
        ("data.block_size=-1", "`data.block_size=-1` is not legal"),
    ],
)
def test_what_is_told(words, expected) -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("pretrain", ["run_dir=here", words])
    told = _refusal(lambda: check_values(cfg, "pretrain"))
    assert told is not None
    assert expected in told


@pytest.mark.parametrize(
    "choices",
    [
        ("model=llama_1b", "strategy=domino_tp", "trainer=slurm"),
        ("model=gpt2", "strategy=distributed_lion", "optimizer=distributed_lion", "data=hub"),
        ("logger=[csv,tensorboard,wandb]", "strategy=ddp", "data=shards", "trainer=multinode"),
        ("experiment=gpt2_gpu", "+trainer.deterministic=warn", "++logger.wandb.tags=[a,b]"),
        ("trainer.devices='0,1'", "trainer.limit_val_batches=0.5", "optimizer.betas=[0.9,0.95]"),
        ("strategy.overlap_steps=3", "+strategy.timeout.hours=1"),
    ],
)
def test_what_the_files_and_the_docs_say_is_legal(choices) -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("pretrain", ["run_dir=here", *choices])
    assert _refusal(lambda: check_values(cfg, "pretrain")) is None


def test_what_transformers_refuses_is_told() -> None:
    with pytest.raises(ValueError, match="The model cannot be made as `model` describes it") as no:
        model_from_config(
            {"_target_": "transformers.GPT2Config", "n_embd": 64, "n_head": 3, "n_layer": 1}, 99
        )
    assert sentence(no.value) is not None
