"""A model on `meta` gets the values of a Hugging Face folder, unit by unit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from lightning_commfree import from_pretrained_on_meta
from lightning_commfree.model.meta_init import Materializer, meta_fingerprint, on_meta
from tests.domino.models import make


def filled(folder: Path, model_class: Any = AutoModelForCausalLM, **changes: Any) -> Any:
    model = from_pretrained_on_meta(model_class, folder, **changes)
    assert len(on_meta(model)) >= len(list(model.parameters()))
    fill = Materializer(model, seed=0)
    fill.materialize(next(model.base_model.children()))
    fill.materialize_rest()
    return model.eval()


def assert_same_values(model: Any, saved: Any) -> None:
    loaded = dict(saved.named_buffers()) | saved.state_dict()
    found = dict(model.named_buffers()) | model.state_dict()
    assert found.keys() == loaded.keys()
    for name, tensor in loaded.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(
    ("kind", "size"), [("gpt2", "5GB"), ("gpt2 untied", "20KB"), ("llama", "20KB")]
)
def test_values_are_those_of_from_pretrained(kind: str, size: str, tmp_path: Path) -> None:
    """Big ones, unlike those that are drawn."""
    model = make(kind)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path, max_shard_size=size)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1 or size == "20KB"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same_values(filled(tmp_path), loaded)
    assert_same_values(filled(tmp_path, type(model)), loaded)


def test_a_folder_of_the_model_without_its_head_does_where_the_head_is_tied(tmp_path: Path) -> None:
    model = make("gpt2")
    model.base_model.save_pretrained(tmp_path / "base")
    assert_same_values(filled(tmp_path / "base"), model.eval())
    model.save_pretrained(tmp_path / "all")
    assert_same_values(filled(tmp_path / "all", AutoModel), model.base_model)


def test_values_are_of_the_dtype_that_is_asked_for(tmp_path: Path) -> None:
    make("llama").bfloat16().save_pretrained(tmp_path)
    assert filled(tmp_path).dtype == torch.bfloat16
    wide = filled(tmp_path, dtype=torch.float32)
    assert_same_values(wide, AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))


def test_a_config_takes_the_place_of_the_folders(tmp_path: Path) -> None:
    model = make("llama")
    model.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, attention_dropout=0.5)
    found = filled(tmp_path, config=config)
    assert found.config.attention_dropout == 0.5
    assert_same_values(found, model)
    with pytest.raises(TypeError, match=r"Got both `config` and overrides.*\(rope_theta\)"):
        from_pretrained_on_meta(AutoModelForCausalLM, tmp_path, config, rope_theta=1.0)


def test_missing_weights_in_the_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has neither 'model.safetensors' nor"):
        from_pretrained_on_meta(AutoModelForCausalLM, tmp_path)
    make("llama").base_model.save_pretrained(tmp_path)
    text = "has no tensor named 'lm_head.weight' for `LlamaForCausalLM`. Either the folder"
    with pytest.raises(ValueError, match=text):
        from_pretrained_on_meta(AutoModelForCausalLM, tmp_path)


def test_ranks_with_other_folders_are_told_apart(tmp_path: Path) -> None:
    model = make("llama")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    before = meta_fingerprint(from_pretrained_on_meta(type(model), tmp_path))
    assert before == meta_fingerprint(from_pretrained_on_meta(type(model), tmp_path))
    tensors = load_file(file)
    tensors["model.norm.weight"] += 1
    save_file(tensors, file, {"format": "pt"})
    after = meta_fingerprint(from_pretrained_on_meta(type(model), tmp_path))
    assert after != before
    assert meta_fingerprint(model) == {"a model on the meta device": "False"}
