"""Illegal values are refused in a sentence before anything starts; nothing ends in a traceback."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from torch import nn

from recipes.configuration.checking import check_config
from recipes.configuration.help import CONF
from recipes.configuration.sentences import sentence
from recipes.data.tokenizer import byte_tokenizer
from recipes.planning import model_from_config
from recipes.training.language_model import LanguageModel, built_from_config
from recipes.training.run import factory

WRITTEN = ["-1", "0", "7", "3.7", "0.5", "-0.5", "1e30", "nan", "inf", "-inf", "true", "null"]
WRITTEN += ["abc", "''", "'7'", "[]", "[1,2,3]", "[true]", "{}", "{a:1}"]
COMMANDS = {
    "pretrain": [],
    "finetune": [
        "model.name_or_path=gpt2",
        "data=responses",
        "data.corpus.train=a.jsonl",
        "lora=default",
    ],
    "plan": ["model=llama_tiny", "step_time=1", "bandwidth=1"],
    "compare": [],
}


@pytest.fixture(scope="module")
def composed() -> dict[str, DictConfig]:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return {
            recipe: compose(recipe, ["run_dir=here", *words]) for recipe, words in COMMANDS.items()
        }


def _keys(node: Any, before: str = "") -> Iterator[str]:
    """Yield the paths of all values that are written in a configuration."""
    for key, value in node.items():
        if not key.startswith("_") and not (isinstance(value, str) and "${" in value):
            yield f"{before}{key}"
            if isinstance(value, dict):
                yield from _keys(value, f"{before}{key}.")


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
    """Build the part of a run that fails on values that types and ranges cannot exclude."""
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
        config = built_from_config(lambda: factory(model)(vocab_size=vocabulary))
        with torch.device("meta"):
            LanguageModel(config.to_dict())


def test_none_of_300_mutations_ends_in_a_traceback(composed) -> None:
    draw, refused = random.Random(17), 0
    keys = {
        recipe: list(_keys(OmegaConf.to_container(cfg, resolve=False)))
        for recipe, cfg in composed.items()
    }
    for recipe in draw.choices(list(COMMANDS), k=300):
        key, written = draw.choice(keys[recipe]), draw.choice(WRITTEN)
        value = OverridesParser.create().parse_override(f"{key}={written}").value()
        cfg = copy.deepcopy(composed[recipe])
        OmegaConf.update(cfg, key, value, merge=False)
        told = _refusal(lambda cfg=cfg, recipe=recipe: check_config(cfg, recipe))
        if told is None:
            _refusal(lambda cfg=cfg, recipe=recipe, key=key: _read(recipe, cfg, key))
        refused += told is not None
    assert 100 < refused < 290, "both happen"


# by group, with values at the limits of its ranges
LEGAL = {
    "token_budget": "null 1e18 7",
    "ckpt_path": "null last",
    "checkpoint_every_n_steps": "0 7",
    "trainer.devices": "-1 auto '0,1' [1,2]",
    "trainer.max_epochs": "null -1 1",
    "trainer.val_check_interval": "null 7 0.5",
    "trainer.limit_val_batches": "0 7 0.5",
    "optimizer.warmup_steps": "null 0",
    "optimizer.final_lr_fraction": "0 1",
    "optimizer.betas": "[0,0.9]",
    "strategy.mix": "0 1",
    "strategy.wire_dtype": "int2 {_target_:lightning_commfree.diloco.Int2Codec,error_feedback:0.9}",
    "strategy.timeout.minutes": "0.5",
    "model.attn_pdrop": "0 1",
}
ILLEGAL = {
    "seed": "-1 3.7 true null '7' 4294967296",
    "token_budget": "-0.5 nan abc",
    "checkpoint_every_n_steps": "-1 null",
    "report": "{} {a:1} 7",
    "callbacks": "null [3] {a:1} {a:{b:1}}",
    "trainer.accelerator": "abc null",
    "trainer.devices": "0 0.5 [] abc",
    "trainer.gradient_clip_val": "-1 nan inf",
    "trainer.val_check_interval": "0 3.7",
    "trainer.limit_val_batches": "-1 1.5 true",
    "data.block_size": "0 3.7 true",
    "optimizer.lr": "-0.5 nan abc",
    "optimizer.betas": "[] [true] [0,1] 0.9",
    "strategy.sync_every": "0 true null",
    "strategy.mix": "-0.5 1.5",
    "strategy.wire_dtype": "abc 7",
    "strategy.timeout.minutes": "0 1e30",
    "model.n_layer": "0 -1 3.7 true",
    "model.attn_pdrop": "1.5 -0.5 abc",
}


@pytest.mark.parametrize(("cases", "is_legal"), [(LEGAL, True), (ILLEGAL, False)])
def test_limits_of_the_ranges(cases, is_legal, composed) -> None:
    for key, values in cases.items():
        for written in values.split():
            cfg = copy.deepcopy(composed["pretrain"])
            value = OverridesParser.create().parse_override(f"{key}={written}").value()
            OmegaConf.update(cfg, key, value, merge=False)
            told = _refusal(lambda cfg=cfg: check_config(cfg, "pretrain"))
            assert (told is None) == is_legal, (key, written, told)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "data.batch_size=-1",
            "`data.batch_size=-1` is not legal for recipes.data.token_data",
        ),
        ("data.batch_size=3.7", "it should be a valid integer."),
        ("model.n_head=0", "is not legal for transformers.GPT2Config: it should be greater"),
        ("gradient_checkpointing=-1", "`gradient_checkpointing=-1` is not legal: it should be a"),
        ("strategy.num_fragments=true", "`strategy.num_fragments=true` is not legal for lightning"),
        ("strategy.sync_every=0", "`sync_every=0` must be at least 1: it counts the inner steps"),
        ("strategy.start_method=threads", "it should be 'popen', 'spawn', 'fork' or 'forkserver'."),
        ("trainer.precision=bf17", '`trainer.precision="bf17"` is not legal for lightning.pytorch'),
        ("compile=inducktor", "it should be a backend of torch: "),
        ("+callbacks.mine=3", "`callbacks.mine=3` is not legal: it should be an object."),
        (
            "+callbacks.mine={_target_:lightning.pytorch.callbacks.Tymer}",
            "`callbacks.mine._target_=lightning.pytorch.callbacks.Tymer` cannot be imported.",
        ),
        (
            "~optimizer +optimizer={lr:0.1}",
            '`optimizer={"lr": 0.1}` is not legal: it should name a class or function in',
        ),
    ],
)
def test_an_illegal_value_gets_its_sentence(words, expected) -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("pretrain", ["run_dir=here", *words.split()])
    told = _refusal(lambda: check_config(cfg, "pretrain"))
    assert told is not None
    assert expected in told


def test_every_written_value_has_its_sentence_and_references_have_none() -> None:
    """The vocabulary and the context of the model refer to the data's block size."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("pretrain", ["run_dir=here", "data.block_size=-1", "seed=abc"])
    told = _refusal(lambda: check_config(cfg, "pretrain"))
    assert told is not None
    assert [line.partition(" ")[0] for line in sorted(told.splitlines())] == [
        "`data.block_size=-1`",
        '`seed="abc"`',
    ]


@pytest.mark.parametrize(
    "choices",
    [
        ("model=llama_1b", "strategy=domino_tp", "trainer=slurm"),
        (
            "model=gpt2",
            "strategy=distributed_lion",
            "optimizer=distributed_lion",
            "data=hub",
            "data.corpus.path=a",
        ),
        ("callbacks=[early_stopping,ema,lr_monitor]", "debug=overfit", "strategy=ddp"),
        ("logger=[csv,tensorboard,wandb]", "strategy=ddp", "trainer=multinode"),
        ("experiment=gpt2_gpu", "data=shakespeare", "+trainer.deterministic=warn"),
        ("logger=wandb", "++logger.wandb.tags=[a,b]", "+strategy.timeout.hours=1"),
    ],
)
def test_documented_combinations_are_legal(choices) -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("pretrain", ["run_dir=here", *choices])
    assert _refusal(lambda: check_config(cfg, "pretrain")) is None
