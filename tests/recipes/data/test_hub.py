from __future__ import annotations

import json
import sys

import pytest

from recipes.data.hub import HubText
from recipes.data.token_blocks import tokenize
from recipes.data.tokenizer import byte_tokenizer


@pytest.fixture(autouse=True)
def _offline(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


@pytest.fixture
def folder(tmp_path):
    for name, numbers in (("a", range(4)), ("b", range(4, 6)), ("held_out", range(10, 13))):
        lines = [json.dumps({"body": f"number {i}", "id": i}) + "\n" for i in numbers]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    return tmp_path


def _corpus(folder, **kwargs) -> HubText:
    settings = {
        "data_files": {"train": f"{folder}/[ab].jsonl"},
        "text_column": "body",
        "validation_documents": 2,
        **kwargs,
    }
    return HubText("json", **settings)


def _numbers(corpus: HubText, split) -> list[int]:
    return [int(text.removeprefix("number ")) for text in corpus.documents(split)]


def test_local_files_in_their_order_without_what_is_held_out(folder) -> None:
    corpus = _corpus(folder)
    assert _numbers(corpus, "train") == [2, 3, 4, 5]
    assert _numbers(corpus, "validation") == [0, 1]
    assert _numbers(_corpus(folder, max_documents=3), "train") == [2, 3, 4]


def test_a_split_of_its_own(folder) -> None:
    files = {"train": f"{folder}/a.jsonl", "validation": [f"{folder}/held_out.jsonl"]}
    corpus = _corpus(folder, data_files=files, validation="validation")
    assert _numbers(corpus, "train") == [0, 1, 2, 3]
    assert _numbers(corpus, "validation") == [10, 11]


def test_the_fingerprint_follows_content_and_choice(folder) -> None:
    first = _corpus(folder).fingerprint()
    assert _corpus(folder).fingerprint() == first
    assert _corpus(folder, max_documents=3).fingerprint() != first
    (folder / "b.jsonl").write_text('{"body": "number 7", "id": 7}\n')
    assert _corpus(folder).fingerprint() != first


def test_it_becomes_a_file_of_tokens(folder) -> None:
    tokenizer = byte_tokenizer()
    path = tokenize(_corpus(folder), "validation", tokenizer, str(folder / "cache"))
    assert path.stat().st_size == 2 * 2 * (len("number 0") + 1)


def test_unreadable_data_is_refused(folder) -> None:
    with pytest.raises(
        ValueError, match=r"text_column='text'. Its columns: body \(str\), id \(int"
    ):
        list(_corpus(folder, text_column="text").documents("train"))
    with pytest.raises(FileNotFoundError, match=r"data_files.train: '.*/no.jsonl' matches no file"):
        _corpus(folder, data_files={"train": f"{folder}/no.jsonl"})
    with pytest.raises(ValueError, match=r"data.corpus.max_documents=0 must be positive"):
        _corpus(folder, max_documents=0)
    (folder / "a.jsonl").write_text("{")
    with pytest.raises(ValueError, match=r"path='json' could not be read by `datasets`"):
        list(_corpus(folder).documents("train"))


def test_a_hub_id_without_a_network(monkeypatch) -> None:
    corpus = HubText("no-such-owner/no-such-data")
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for read in (lambda: list(corpus.documents("train")), corpus.fingerprint):
        with pytest.raises(ValueError, match=r"no-such-data' could not be read .* needs a network"):
            read()


def test_without_the_library(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match="data=hub needs the library `datasets`: pip install"):
        HubText("any")
