from __future__ import annotations

import os

import pytest
import torch
from transformers import AutoConfig, GPT2Config, GPT2LMHeadModel

from recipes.training.pretrained import check_packing, find_pretrained, one_block


def test_a_forgotten_position_would_be_found() -> None:
    """As in versions of transformers that do not look at positions for packed rows."""

    class Forgetful(GPT2LMHeadModel):
        def forward(self, input_ids, position_ids, **kwargs):
            mask = torch.ones_like(input_ids)
            return super().forward(
                input_ids, position_ids=position_ids, attention_mask=mask, **kwargs
            )

    config = GPT2Config(vocab_size=9, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    check_packing(GPT2LMHeadModel(config))
    with pytest.raises(ValueError, match=r"`Forgetful` in transformers .* Use `data.packing"):
        check_packing(Forgetful(config))


@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen2"])
def test_one_block_tells_whether_a_class_keeps_examples_apart(kind: str, monkeypatch) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 9}
    more = {} if kind == "gpt2" else {"intermediate_size": 16, "num_key_value_heads": 2}
    config = AutoConfig.for_model(kind, **sizes, **more)
    model = one_block(config)
    assert config.num_hidden_layers == 3
    assert model.config.num_hidden_layers == 1
    check_packing(model)

    forward = model.forward

    def forgetful(input_ids, position_ids, **kwargs):
        mask = torch.ones_like(input_ids)
        return forward(input_ids, position_ids=position_ids, attention_mask=mask, **kwargs)

    monkeypatch.setattr(model, "forward", forgetful)
    with pytest.raises(ValueError, match="does not keep the examples"):
        check_packing(model)


def test_the_newest_of_several_models(tmp_path) -> None:
    for name, seconds in (("b", 3), ("a", 2), ("c", 1)):
        (tmp_path / name / "huggingface").mkdir(parents=True)
        (tmp_path / name / "huggingface" / "config.json").touch()
        os.utime(tmp_path / name / "huggingface" / "config.json", (seconds, seconds))
    assert find_pretrained(f"{tmp_path}/*/huggingface") == str(tmp_path / "b" / "huggingface")
    assert find_pretrained("owner/name") == "owner/name"
    with pytest.raises(FileNotFoundError, match=r"model.name_or_path: '.*/\*/nothing' matches no"):
        find_pretrained(f"{tmp_path}/*/nothing")
