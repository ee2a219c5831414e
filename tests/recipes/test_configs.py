"""Every file in `conf/` builds what it describes; strategy files mirror their constructors."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra.utils import get_class, instantiate
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM

from lightning_commfree import ElasticDiLoCoStrategy
from lightning_commfree.strategies import ReplicaStrategy
from recipes.configuration.checking import targets
from recipes.configuration.signatures import parameters
from recipes.data.tokenizer import byte_tokenizer
from recipes.training.pretraining import build_data, build_module
from recipes.training.run import build_trainer

CONF = Path(__file__).parents[2] / "conf"
FILES = sorted(str(path.relative_to(CONF)) for path in CONF.rglob("*.yaml"))
# composed and built in test_finetune.py
FOR_FINETUNE = {"finetune_demo", "adamw_finetune", "distributed_lion_finetune", "model"}


def _names(group: str) -> list[str]:
    found = {path.stem for path in (CONF / group).glob("*.yaml")}
    return sorted(found - FOR_FINETUNE)


# what a machine without a GPU can build of a Trainer for GPUs: everything but the accelerator
ON_CPU = ["trainer.accelerator=cpu", "trainer.devices=2", "trainer.num_nodes=1"]


def _assert_mirrors_the_constructor(config: dict[str, Any]) -> None:
    target = get_class(config["_target_"])
    inherited = inspect.signature(DDPStrategy.__init__).parameters
    own: dict[str, inspect.Parameter] = {}
    for kind in target.__mro__[: target.__mro__.index(DDPStrategy)]:
        if kind is not ReplicaStrategy:  # the abstract base, whose own argument is a layout
            taken = inspect.signature(kind.__init__).parameters
            own |= {n: p for n, p in taken.items() if n != "self" and p.kind is not p.VAR_KEYWORD}

    keys = [key for key in config if key != "_target_"]
    assert keys[: len(own)] == list(own), "all of the constructor's own parameters, in its order"
    rest = keys[len(own) :]
    assert rest == [n for n in inherited if n in rest], "then DDP's, in DDP's order"
    assert rest == ["process_group_backend", "timeout", "start_method"]

    defaults = {key: parameter.default for key, parameter in {**inherited, **own}.items()}
    if target is ElasticDiLoCoStrategy:  # it changes two defaults of its base class
        settings = target("file:///store").settings
        defaults |= {"sync_every": settings.sync_every, "evaluate": settings.evaluate}
    values = instantiate({key: config[key] for key in keys}, _convert_="all")
    assert values.pop("start_method") == "fork", "popen, DDP's default, does not go with -m"
    assert values == {key: defaults[key] for key in values}


@pytest.mark.parametrize("name", _names("strategy"))
def test_strategy_keys_and_defaults_are_the_constructors(name) -> None:
    _assert_mirrors_the_constructor(_strategy_file(name))


def test_a_file_that_left_its_constructor_would_be_found() -> None:
    config = _strategy_file("streaming_diloco")
    for wrong in (
        {key: value for key, value in config.items() if key != "mix"},
        {"_target_": config["_target_"], "num_fragments": None, **config},
        {**config, "overlap_steps": 2},
        {**config, "more": 1},
    ):
        with pytest.raises(AssertionError):
            _assert_mirrors_the_constructor(wrong)


@pytest.mark.parametrize("name", FILES)
def test_every_key_is_one_that_its_target_takes(name) -> None:
    for place, node in targets(OmegaConf.to_container(OmegaConf.load(CONF / name))):
        taken, accepts_any = parameters(node["_target_"])
        assert accepts_any or {key for key in node if key[0] != "_"} <= {*taken}, place


def _strategy_file(name: str) -> dict[str, Any]:
    return OmegaConf.to_container(OmegaConf.load(CONF / "strategy" / f"{name}.yaml"))


@pytest.mark.parametrize(
    ("name", "vocab_size", "block_size", "millions"),
    [
        ("gpt2", 50257, 1024, 124.44),  # what `GPT2LMHeadModel.from_pretrained("gpt2")` has
        ("gpt2_tiny", 1024, 64, 0.22),
        ("llama_1b", 128256, 2048, 1235.81),  # what the model card of Llama 3.2 1B says: 1.23 B
        ("llama_tiny", 2048, 128, 1.00),
    ],
)
def test_model(name, vocab_size, block_size, millions, compose_config) -> None:
    config = compose_config(f"model={name}", f"data.block_size={block_size}")["model"]
    model_config = instantiate(config, vocab_size=vocab_size, _convert_="all")
    with torch.device("meta"):  # shapes only: a billion parameters would not fit into a test
        model = AutoModelForCausalLM.from_config(model_config)
    assert model_config.max_position_embeddings == block_size
    assert model_config.vocab_size == vocab_size
    found = sum(p.numel() for p in model.parameters()) / 1e6
    assert found == pytest.approx(millions, abs=0.01)


@pytest.mark.parametrize("name", _names("tokenizer"))
def test_tokenizer(name, compose_config, tmp_path) -> None:
    overrides = ["data=synthetic", "data.corpus.train_characters=2000", f"tokenizer={name}"]
    if name == "pretrained":
        byte_tokenizer().save_pretrained(tmp_path / "saved")
        overrides.append(f"tokenizer.name_or_path={tmp_path}/saved")
    tokenizer = instantiate(compose_config(*overrides)["tokenizer"], _convert_="all")
    assert tokenizer.decode(tokenizer("abba")["input_ids"]) == "abba"


@pytest.mark.parametrize("name", ["hub", "shakespeare", "synthetic", "text"])
def test_data(name, compose_config, corpus) -> None:
    (train,), (validation,) = corpus.files.values()
    overrides = {
        "text": [f"data.corpus.train={train}", f"data.corpus.validation={validation}"],
        "hub": [
            "data.corpus.path=text",
            f"data.corpus.data_files={{train: {train}, validation: {validation}}}",
            "data.corpus.validation=validation",
        ],
    }
    config = compose_config(f"data={name}", "tokenizer=bytes", *overrides.get(name, []))
    data = build_data(config)
    assert next(data.corpus.documents("train"))
    assert next(data.corpus.documents("validation"))
    assert (data.block_size, data.batch_size) == (64, 16)


def test_data_of_ready_made_tokens(compose_config, tmp_path) -> None:
    for name in ("a", "b"):
        np.arange(70, dtype="<u2").tofile(tmp_path / f"{name}.bin")
    files = [f"data.train={tmp_path}/a.bin", f"data.validation={tmp_path}/b.bin"]
    data = build_data(compose_config("data=shards", "tokenizer=bytes", *files))
    assert data.blocks("train")[0].tolist() == list(range(65))
    assert (data.block_size, data.batch_size) == (64, 16)


@pytest.mark.parametrize("kind", ["chat", "responses"])
def test_values_of_the_data_are_the_constructors(kind) -> None:
    config = OmegaConf.to_container(OmegaConf.load(CONF / "data" / f"{kind}.yaml"))
    for node in (config, config["corpus"]):
        parameters = inspect.signature(get_class(node["_target_"])).parameters
        keys = [key for key in node if key != "_target_"]
        assert keys == [name for name in parameters if name != "tokenizer"]
        for key in keys:
            if not isinstance(node[key], dict) and node[key] not in ("???", f"${{{key}}}"):
                assert node[key] == parameters[key].default, key


@pytest.mark.parametrize("name", _names("trainer"))
def test_trainer(name, compose_config) -> None:
    config = compose_config(f"trainer={name}", "tokenizer=bytes", "strategy=ddp")
    inspect.signature(Trainer).bind(**{k: v for k, v in config["trainer"].items() if k[0] != "_"})
    expected = {
        "cpu": ("cpu", 2, 1),
        "gpu": ("gpu", -1, 1),
        "multinode": ("gpu", 8, 2),
        "slurm": ("gpu", 8, 2),
    }[name]
    found = tuple(config["trainer"][key] for key in ("accelerator", "devices", "num_nodes"))
    assert found == expected

    config = compose_config(f"trainer={name}", "tokenizer=bytes", "strategy=ddp", *ON_CPU)
    trainer = build_trainer(config, build_data(config))
    assert trainer.max_steps == config["trainer"]["max_steps"]
    assert trainer.max_epochs == -1


def test_a_run_that_ends_with_its_first_checkpoint(compose_config) -> None:
    settings = ["trainer.max_steps=200", "checkpoint_every_n_steps=200"]
    config = compose_config(*settings, "tokenizer=bytes", "strategy=ddp")
    [last] = build_trainer(config, build_data(config)).checkpoint_callbacks
    assert last.save_last


@pytest.mark.parametrize("suffix", ["", "_finetune"])
def test_lions_rate_and_decay_follow_adamws(suffix, compose_config) -> None:
    """As `docs/distributed_lion.md` says; a tenth of the rate undertrained a small model by far."""
    names = (f"distributed_lion{suffix}", f"adamw{suffix}")
    ours, theirs = (compose_config(f"optimizer={name}")["optimizer"] for name in names)
    assert ours["lr"] == pytest.approx(theirs["lr"] / 4)
    products = [found["lr"] * found["weight_decay"] for found in (ours, theirs)]
    assert products[0] == pytest.approx(products[1], rel=0.01)


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """Tokenizers, of which several experiments train the same one."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("name", _names("experiment"))
def test_experiment(name, compose_config, corpus, cache, tmp_path) -> None:
    overrides = [f"experiment={name}", f"cache_dir={cache}"]
    if name not in ("demo", "domino_gpt2", "domino_llama", "lion", "llama"):  # bundled text, a CPU
        overrides += [f"data.corpus.{split}={paths[0]}" for split, paths in corpus.files.items()]
        overrides += ON_CPU
    if name == "llama_1b_multinode":
        byte_tokenizer().save_pretrained(tmp_path / "saved")
        overrides.append(f"tokenizer.name_or_path={tmp_path}/saved")
    config = compose_config(*overrides)
    data = build_data(config)
    with torch.device("meta"):
        module = build_module(config, data)
    assert module.model.config.vocab_size == len(data.tokenizer)
    assert build_trainer(config, data).max_steps == config["trainer"]["max_steps"]


def test_every_experiment_says_how_to_run_it() -> None:
    for name in _names("experiment"):
        lines = (CONF / "experiment" / f"{name}.yaml").read_text().splitlines()
        assert lines[0] == "# @package _global_", "Hydra reads no header further down"
        assert f"-m recipes.pretrain experiment={name}" in lines[1]
    lines = (CONF / "experiment" / "finetune_demo.yaml").read_text().splitlines()
    assert lines[:2] == [
        "# @package _global_",
        "# python -m recipes.finetune experiment=finetune_demo",
    ]


def test_all_runs_but_the_demos_print_their_configuration() -> None:
    for name, printed in {
        "pretrain": True,
        "finetune": True,
        "experiment/demo": False,
        "experiment/finetune_demo": False,
    }.items():
        assert OmegaConf.load(CONF / f"{name}.yaml").print_config is printed, name
