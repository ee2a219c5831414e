from __future__ import annotations

import pytest
from transformers import AutoTokenizer, GPT2Config

from recipes.data.tokenizer import byte_tokenizer, pretrained_tokenizer, train_bpe

ODD = "  HAMLET.\nTo be,\tor -- not?\n\n\n“Sein” ö 🙂 \x00"


@pytest.fixture
def bpe(corpus, tmp_path):
    return train_bpe(corpus, 300, str(tmp_path / "cache"))


@pytest.mark.parametrize("text", ["", "a", ODD])
def test_any_text_comes_back(bpe, text) -> None:
    for tokenizer in (bpe, byte_tokenizer()):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_bpe_learns_from_the_training_text_only(bpe) -> None:
    # "green bottles" is in the training text, "brown" and "standing" only in the validation text
    assert len(bpe) == 300
    assert len(bpe(" green bottles")["input_ids"]) == 2
    assert len(bpe(" standing")["input_ids"]) > 2


def test_bpe_is_trained_once_per_content_and_size(bpe, corpus, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(type(corpus), "documents", lambda *_: pytest.fail("read the text again"))
    again = train_bpe(corpus, 300, str(tmp_path / "cache"))
    assert again.get_vocab() == bpe.get_vocab()
    with pytest.raises(pytest.fail.Exception, match="read the text again"):
        train_bpe(corpus, 310, str(tmp_path / "cache"))


def test_bpe_needs_room_for_the_bytes(corpus, tmp_path) -> None:
    with pytest.raises(ValueError, match="vocab_size=256 must be at least 257.*tokenizer=bytes"):
        train_bpe(corpus, 256, str(tmp_path))


def test_pretrained_loads_a_folder(bpe, tmp_path) -> None:
    bpe.save_pretrained(tmp_path / "saved")
    loaded = pretrained_tokenizer(str(tmp_path / "saved"))
    assert loaded(ODD)["input_ids"] == bpe(ODD)["input_ids"]
    assert loaded.eos_token_id == bpe.eos_token_id


def test_pretrained_says_what_is_missing(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"'nobody/nothing' is neither a folder .*HF_HUB_OFFLINE"):
        pretrained_tokenizer("nobody/nothing")


def test_pretrained_refuses_an_empty_vocabulary(tmp_path, monkeypatch) -> None:
    """transformers 5 makes a tokenizer of length 1 of files it does not know, without an error."""
    GPT2Config().save_pretrained(tmp_path)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda _: ["only one"])
    with pytest.raises(ValueError, match="gave a vocabulary of 1. The folder must hold"):
        pretrained_tokenizer(str(tmp_path))
