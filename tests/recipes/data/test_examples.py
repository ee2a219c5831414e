"""Examples, rows and batches against what one would write by hand. A token is a byte here."""

from __future__ import annotations

import json
import lzma
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from recipes.data.conversations import PLAIN_TEMPLATE, Conversations
from recipes.data.dialogues import Dialogues
from recipes.data.example_data import ExampleDataModule
from recipes.data.example_rows import Collator, ExampleFile, ExampleRows, pack, write_examples
from recipes.data.examples import Example, Responses
from recipes.data.tokenizer import byte_tokenizer

EOS = byte_tokenizer().eos_token_id
# as small as templates get; the second says by itself where the assistant speaks
SIGNS = (
    "{% for m in messages %}{{ m.role[0] }}>{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}a>{% endif %}"
)
BLOCKS = (
    "{% for m in messages %}\n{{ m.role[0] }}>\n"
    "{%- if m.role == 'assistant' %}\n{% generation %}\n{{ m.content }};{% endgeneration %}\n"
    "{%- else %}\n{{ m.content }};\n{%- endif %}\n{% endfor %}"
)
TALK = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": " hi\n"},
    {"role": "user", "content": "u"},
    {"role": "assistant", "content": "b\u00e4h "},
]


@pytest.fixture
def write(tmp_path):
    def write(*lines, name="train.jsonl"):
        path = tmp_path / name
        path.write_text(
            "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
        )
        return str(path)

    return write


def _examples(corpus, tokenizer=None):
    tokenizer = tokenizer or byte_tokenizer()
    corpus.prepare(tokenizer)
    return list(corpus.examples("train", tokenizer))


def _targets(example, tokenizer=None):
    """The targets as text; a bar for each stretch of what is none."""
    tokenizer = tokenizer or byte_tokenizer()
    stretches, before = [], False
    for token, is_target in zip(example.tokens, example.is_target, strict=True):
        if is_target:
            stretches += [[]] if not before else []
            stretches[-1].append(token)
        before = is_target
    return [tokenizer.decode(stretch) for stretch in stretches]


def test_a_response_and_its_end_are_the_targets(write) -> None:
    path = write({"prompt": "ab", "response": "cde"}, "", {"prompt": "", "response": "f"})
    tokens = byte_tokenizer()("abcdef")["input_ids"]
    first, second = _examples(Responses(path))
    assert first == Example([*tokens[:5], EOS], [False, False, True, True, True, True])
    assert second == Example([EOS, tokens[5], EOS], [False, True, True]), "something foretells f"


def test_what_a_tokenizer_puts_around_a_text_stays_in_front_of_the_prompt(write) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A <|endoftext|>", special_tokens=[("<|endoftext|>", EOS)]
    )
    [example] = _examples(Responses(write({"prompt": "a", "response": "b"})), tokenizer)
    a, b = byte_tokenizer()("ab")["input_ids"]
    assert example == Example([EOS, a, b, EOS], [False, False, True, True])


def test_other_keys_and_compressed_files(tmp_path) -> None:
    path = tmp_path / "train.jsonl.xz"
    path.write_bytes(lzma.compress(b'\xef\xbb\xbf{"q": "ab", "a": "c", "more": [1]}\n'))
    [example] = _examples(Responses(str(path), prompt_key="q", response_key="a"))
    assert _targets(example) == ["c<|endoftext|>"]


@pytest.mark.parametrize("template", [SIGNS, BLOCKS], ids=["prefixes", "generation blocks"])
def test_the_assistants_turns_are_the_targets(write, template) -> None:
    corpus = Conversations(write({"messages": TALK}), chat_template=template)
    [example] = _examples(corpus)
    text = "s>S;u>hello;a> hi\n;u>u;a>b\u00e4h ;"
    assert byte_tokenizer().decode(example.tokens) == text
    assert _targets(example) == [" hi\n;", "b\u00e4h ;"]


@pytest.mark.parametrize("template", [SIGNS, BLOCKS], ids=["prefixes", "generation blocks"])
def test_spaces_that_a_tokenizer_strips_its_tokens_of_are_targets_too(write, template) -> None:
    """transformers 5.23 finds no token for such a space and loses turns, or takes too much."""
    from tokenizers.processors import ByteLevel

    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = ByteLevel(trim_offsets=True)
    corpus = Conversations(write({"messages": TALK}), chat_template=template)
    [example] = _examples(corpus, tokenizer)
    assert _targets(example) == [" hi\n;", "b\u00e4h ;"]


def test_the_plain_template(write) -> None:
    corpus = Conversations(write({"messages": TALK[1:]}), chat_template=str(PLAIN_TEMPLATE))
    tokenizer = byte_tokenizer()
    [example] = _examples(corpus, tokenizer)
    end = tokenizer.eos_token
    assert tokenizer.decode(example.tokens) == (
        f"User:\nhello\n\nAssistant:\n hi\n{end}\n\nUser:\nu\n\nAssistant:\nb\u00e4h {end}\n\n"
    )
    assert _targets(example) == [f" hi\n{end}\n\n", f"b\u00e4h {end}\n\n"]
    assert tokenizer.chat_template == PLAIN_TEMPLATE.read_text(), "exported with the model"


def test_a_template_that_forgets_is_refused(write) -> None:
    # as some do that leave out what was thought before the last turn
    forgets = "{% for m in messages %}{{ m.content if loop.last else m.content[:1] }}{% endfor %}"
    corpus = Conversations(write({"messages": TALK}), chat_template=forgets)
    with pytest.raises(ValueError, match=r"train.jsonl, line 1: message 3, .* cannot be"):
        _examples(corpus)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a", "response": "b"},', r"line 2: this is no JSON \(Extra data, column 33\)"),
        ("[1, 2]", r"line 2: a line must be a JSON object, as \{...\}, and this is \[1, 2\]"),
        ({"prompt": "a"}, r"line 2: there is no key 'response' among the keys 'prompt'. Other"),
        ({"prompt": "a", "response": 3}, r"line 2: 'response' must be text, and it is 3\."),
    ],
)
def test_a_wrong_line_is_named(write, line, message) -> None:
    path = write({"prompt": "a", "response": "b"}, line)
    with pytest.raises(ValueError, match=rf"train\.jsonl, {message}"):
        _examples(Responses(path))


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ({"text": "a"}, r"line 1: 'messages' must be a list of messages.*has the keys text"),
        ({"messages": []}, r"line 1: 'messages' must be a list"),
        ({"messages": ["a"]}, r"line 1: message 1 must be an object"),
        ({"messages": [{"role": "user"}]}, r"line 1, message 1: there is no key 'content'"),
    ],
)
def test_a_wrong_conversation_is_named(write, messages, message) -> None:
    with pytest.raises(ValueError, match=message):
        _examples(Conversations(write(messages), chat_template=SIGNS))


def test_what_a_template_says_itself_is_passed_on(write) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match=r"line 1: roles must alternate"):
        _examples(Conversations(write({"messages": TALK}), chat_template=template))


def test_files_that_cannot_be_read(tmp_path, write) -> None:
    with pytest.raises(FileNotFoundError, match=r"data.corpus.train: 'no/such.jsonl' matches no"):
        Responses("no/such.jsonl")
    with pytest.raises(ValueError, match=r"data.corpus.train: there is no line in '.*empty.jsonl'"):
        _examples(Responses(write("", name="empty.jsonl")))
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe4"}\n')
    with pytest.raises(ValueError, match=r"latin.jsonl.*this is no UTF-8 text"):
        _examples(Responses(str(tmp_path / "latin.jsonl")))
    (tmp_path / "not.xz").write_bytes(b"{}\n")
    with pytest.raises(ValueError, match=r"not.xz is named .xz and is no xz file"):
        _examples(Responses(str(tmp_path / "not.xz")))


def test_what_a_tokenizer_may_lack(write, tmp_path) -> None:
    path = write({"prompt": "a", "response": "b"})
    tokenizer = byte_tokenizer()
    with pytest.raises(ValueError, match=r"no chat template.*=.*templates/plain.jinja"):
        Conversations(path).prepare(tokenizer)
    with pytest.raises(FileNotFoundError, match=r"'no/such.jinja' is neither a Jinja template"):
        Conversations(path, chat_template="no/such.jinja")
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="has no end-of-text token"):
        Responses(path).prepare(tokenizer)
    with pytest.raises(ValueError, match="neither a padding token .* nor an end-of-text token"):
        ExampleDataModule(Conversations(path, chat_template=SIGNS), tokenizer, str(tmp_path))


def test_the_stage_has_speeches_for_both_splits() -> None:
    for split in ("train", "validation"):
        pairs = list(Dialogues().pairs(split))
        assert len(pairs) > 300
        assert max(len(prompt) + len(response) for prompt, response in pairs) == 120
    assert ("Ber.\nWho's there?\n\nFran.\n", "Nay, answer me: stand, and unfold yourself.") in pairs


@settings(deadline=None)
@given(st.lists(st.integers(1, 16), max_size=40))
def test_packing_leaves_nothing_out_and_nothing_half_empty(lengths) -> None:
    rows = pack(lengths, 16)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    filled = [sum(lengths[index] for index in row) for row in rows]
    assert all(total <= 16 for total in filled)
    # else one row's examples would have found room in the other
    assert sum(total <= 8 for total in filled) <= 1


def test_packing_by_hand() -> None:
    assert pack([3, 6, 5, 2, 8, 1], capacity=8) == [[4], [1, 3], [2, 0]] + [[5]]
    assert pack([], capacity=8) == []


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


def test_what_is_cut_and_left_out_is_said(make_data, write) -> None:
    whole, cut, dropped = ("1 ", ""), ("2 ", "ab"), ("33 ", "a")
    lines = [{"prompt": prompt, "response": text} for prompt, text in (whole, cut, dropped)]
    paths = write(*lines), write(lines[0], name="validation.jsonl")
    data = make_data(corpus=Responses(*paths), block_size=3, batch_size=1)
    assert data.describe().endswith(
        "; 1 are cut behind 3 tokens; 1 are left out, with nothing to foretell within them"
    )
    assert _prompts([data.train_dataloader()]) == {1: 1, 2: 1}


def test_too_few_rows_are_said_before_training(make_data) -> None:
    with pytest.raises(ValueError, match=r"train split has \d+ rows of up to 12 .* 198"):
        make_data(size=99).setup("fit")


def test_no_turn_of_the_assistants_anywhere(make_data, write) -> None:
    paths = write({"messages": TALK[:2]}), write({"messages": TALK}, name="validation.jsonl")
    with pytest.raises(ValueError, match=r"None of the 1 train examples has anything to foretell"):
        make_data(corpus=Conversations(*paths, chat_template=SIGNS), block_size=64)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -3])
def test_a_fraction_outside_its_range(make_data, fraction) -> None:
    with pytest.raises(ValueError, match=rf"data.validation_fraction={fraction} must be between"):
        make_data(validation_fraction=fraction)


def test_nothing_is_left_of_a_file_with_a_wrong_line(make_data, write, tmp_path) -> None:
    path = write({"prompt": "a", "response": "b"}, "oops", name="wrong.jsonl")
    with pytest.raises(ValueError, match=r"wrong.jsonl, line 2: this is no JSON"):
        make_data(corpus=Responses(path))
    assert not [file for file in (tmp_path / "cache").iterdir() if file.suffix != ".lock"]
