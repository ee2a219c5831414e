"""Rows and batches of examples against what one would write by hand, and who reads what."""

from __future__ import annotations

import json
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from recipes.data.conversations import PLAIN_TEMPLATE, Conversations
from recipes.data.example_data import ExampleDataModule
from recipes.data.example_rows import Collator, ExampleFile, ExampleRows, pack, write_examples
from recipes.data.examples import Example, Responses
from recipes.data.tokenizer import byte_tokenizer


@pytest.fixture
def write(tmp_path):
    def write(*lines, name="train.jsonl"):
        path = tmp_path / name
        path.write_text("\n".join(json.dumps(line) for line in lines))
        return str(path)

    return write


@settings(deadline=None)
@given(st.lists(st.integers(1, 16), max_size=40))
def test_packing_leaves_nothing_out_and_nothing_half_empty(lengths) -> None:
    rows = pack(lengths, 16)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    filled = [sum(lengths[index] for index in row) for row in rows]
    assert all(total <= 16 for total in filled)
    # else one row's examples would have found room in the other
    assert sum(total <= 8 for total in filled) <= 1


EXAMPLES = [
    Example([1, 2, 3, 4, 5, 6], [False, False, True, True, True, True]),
    Example([7, 8, 9], [False, False, True]),
    Example([10, 11], [True, False]),  # nothing foretells the first token
    Example([12, 13, 14, 15, 16], [False, False, False, False, True]),
]


@pytest.fixture
def example_file(tmp_path):
    write_examples(tmp_path / "examples", iter(EXAMPLES))
    return ExampleFile(tmp_path / "examples")


def test_examples_come_back_from_their_files(example_file) -> None:
    assert [example_file.example(i, 10) for i in range(len(example_file))] == EXAMPLES
    assert example_file.example(0, 4) == Example([1, 2, 3, 4], [False, False, True, True])
    fitted = example_file.fit(np.arange(4), 4)
    assert fitted.kept.tolist() == [0, 1], "the last one's target lies behind the cut"
    assert (fitted.num_cut, fitted.num_dropped) == (1, 2)


def test_a_packed_batch_by_hand(example_file) -> None:
    rows = ExampleRows(example_file, np.array([0, 1, 3]), block_size=9, packing=True)
    assert (len(rows), rows.num_examples, rows.num_tokens) == (2, 3, 14)
    batch = Collator(packing=True, filler=99)([rows[0], rows[1]])
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "input_ids": [[1, 2, 3, 4, 5, 6, 7, 8, 9], [12, 13, 14, 15, 16, 99, 99, 99, 99]],
        "labels": [
            [-100, -100, 3, 4, 5, 6, -100, -100, 9],
            [-100, -100, -100, -100, 16, -100, -100, -100, -100],
        ],
        "position_ids": [[0, 1, 2, 3, 4, 5, 0, 1, 2], [0, 1, 2, 3, 4, 0, 1, 2, 3]],
    }


def test_a_padded_batch_by_hand(example_file) -> None:
    rows = ExampleRows(example_file, np.array([1, 3]), block_size=9, packing=False)
    batch = Collator(packing=False, filler=99)([rows[0], rows[1]])
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "input_ids": [[7, 8, 9, 99, 99], [12, 13, 14, 15, 16]],
        "labels": [[-100, -100, 9, -100, -100], [-100, -100, -100, -100, 16]],
        "attention_mask": [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]],
    }


SIZES = {"vocab_size": 257, "initializer_range": 0.5}
GPT2 = GPT2Config(n_positions=16, n_embd=8, n_layer=2, n_head=2, **SIZES)
LLAMA = LlamaConfig(
    hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, **SIZES
)


@pytest.fixture(params=["gpt2", "llama"])
def model(request):
    torch.manual_seed(0)
    return (GPT2LMHeadModel(GPT2) if request.param == "gpt2" else LlamaForCausalLM(LLAMA)).eval()


def _losses(model, batch):
    """The loss of each target, in order."""
    labels = batch["labels"][:, 1:]
    with torch.no_grad():
        # with a cache transformers would not look for examples that begin again
        logits = model(**batch, use_cache=False).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(logits.mT, labels, reduction="none")
    return losses[labels != -100]


def test_neighbours_in_a_row_do_not_see_each_other(model) -> None:
    alone = torch.cat([_losses(model, Collator(False, 0)([[e]])) for e in EXAMPLES])
    packed = _losses(model, Collator(True, 0)([EXAMPLES]))
    # attention over a longer row adds its sums in another order
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5)
    other = [EXAMPLES[0]._replace(tokens=[99] * 6), *EXAMPLES[1:]]
    changed = _losses(model, Collator(True, 0)([other]))
    torch.testing.assert_close(changed[4:], alone[4:], rtol=1e-5, atol=1e-5)
    assert (changed[:4] - alone[:4]).abs().min() > 1e-2
    # and without positions that begin again they would
    batch = Collator(True, 0)([EXAMPLES])
    del batch["position_ids"]
    assert (_losses(model, batch)[4:] - alone[4:]).abs().max() > 1e-2


def test_padding_changes_no_loss(model) -> None:
    alone = torch.cat([_losses(model, Collator(False, 0)([[e]])) for e in EXAMPLES])
    padded = _losses(model, Collator(False, 99)([[e] for e in EXAMPLES]))
    torch.testing.assert_close(padded, alone, rtol=1e-5, atol=1e-5)


@pytest.fixture
def make_data(write, tmp_path):
    path = write(*({"prompt": f"{i} ", "response": "ab" * (i % 5)} for i in range(60)))

    def make(size=1, rank=0, corpus=None, **kwargs):
        settings = {"block_size": 12, "batch_size": 2, **kwargs}
        corpus = corpus or Responses(path)
        data = ExampleDataModule(corpus, byte_tokenizer(), str(tmp_path / "cache"), **settings)
        shares = {"num_replicas": size, "rank": rank}
        data.trainer = SimpleNamespace(distributed_sampler_kwargs=shares if size > 1 else None)
        data.prepare_data()
        return data

    return make


def _prompts(loaders):
    """How often each example of `make_data` was read, by the numbers in their prompts."""
    read = Counter()
    for loader in loaders:
        for batch in loader:
            tokens = byte_tokenizer().batch_decode(batch["input_ids"])
            read.update(
                int(part.split()[0])
                for row in tokens
                for part in row.split("<|endoftext|>")
                if part
            )
    return read


@pytest.mark.parametrize("packing", [True, False])
def test_ranks_share_the_examples(make_data, packing) -> None:
    ranks = [make_data(2, rank, packing=packing, validation_fraction=0.3) for rank in range(2)]
    validated = _prompts(data.val_dataloader() for data in ranks)
    assert set(validated.values()) == {1}
    assert len(validated) == 18
    trained = _prompts(data.train_dataloader() for data in ranks)
    assert set(trained.values()) == {1}
    assert not set(trained) & set(validated)
    if not packing:
        assert len(trained) == 40, "of 42, of which two make no batch for both"


def test_the_order_is_the_seeds_and_is_taken_up_again(make_data) -> None:
    orders = [
        [batch["input_ids"].tolist() for batch in make_data(seed=seed).train_dataloader()]
        for seed in (1, 1, 2)
    ]
    assert orders[0] == orders[1] != orders[2]
    half = make_data(seed=1).train_dataloader()
    batches = iter(half)
    read = [next(batches)["input_ids"].tolist() for _ in range(3)]
    resumed = make_data(seed=1).train_dataloader()
    resumed.load_state_dict(half.state_dict())
    assert read + [batch["input_ids"].tolist() for batch in resumed] == orders[0]


def test_a_file_of_its_own_is_the_validation(make_data, write) -> None:
    paths = (
        write({"prompt": "1 ", "response": "a"}),
        write({"prompt": "2 ", "response": "b"}, name="validation.jsonl"),
    )
    data = make_data(corpus=Responses(*paths), batch_size=1)
    assert _prompts([data.train_dataloader()]) == {1: 1}
    assert _prompts([data.val_dataloader()]) == {2: 1}
    assert data.prompt() == "2 "
    assert data.describe() == (
        "1 training, 1 validation examples in 1 and 1 rows, which are 33% full"
    )


def test_truncated_and_dropped_examples_are_reported(make_data, write) -> None:
    whole, cut, dropped = ("1 ", ""), ("2 ", "ab"), ("33 ", "a")
    lines = [{"prompt": prompt, "response": text} for prompt, text in (whole, cut, dropped)]
    paths = write(*lines), write(lines[0], name="validation.jsonl")
    data = make_data(corpus=Responses(*paths), block_size=3, batch_size=1)
    assert data.describe().endswith(
        "; 1 are truncated to 3 tokens; 1 are dropped, because no target is left"
    )
    assert _prompts([data.train_dataloader()]) == {1: 1, 2: 1}


def test_too_few_rows_are_said_before_training(make_data) -> None:
    with pytest.raises(ValueError, match=r"train split has \d+ rows of up to 12 .* 198"):
        make_data(size=99).setup("fit")


def test_no_turn_of_the_assistants_anywhere(make_data, write) -> None:
    asked = [{"role": "user", "content": "a"}]
    answered = [*asked, {"role": "assistant", "content": "b"}]
    paths = write({"messages": asked}), write({"messages": answered}, name="validation.jsonl")
    with pytest.raises(ValueError, match=r"None of the 1 train examples has a target within"):
        make_data(corpus=Conversations(*paths, chat_template=str(PLAIN_TEMPLATE)), block_size=64)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -3])
def test_a_fraction_outside_its_range(make_data, fraction) -> None:
    with pytest.raises(ValueError, match=rf"data.validation_fraction={fraction} must be between"):
        make_data(validation_fraction=fraction)
