"""Examples against what one would write by hand. A token is a byte here."""

from __future__ import annotations

import json
import lzma

import pytest

from recipes.data.conversations import PLAIN_TEMPLATE, Conversations
from recipes.data.example_data import ExampleDataModule
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


def test_tokens_that_a_tokenizer_adds_stay_in_front_of_the_prompt(write) -> None:
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
        (
            '{"prompt": "a", "response": "b"},',
            r"line 2: this is not JSON \(Extra data, column 33\)",
        ),
        ("[1, 2]", r"line 2: a line must be a JSON object, as \{...\}, but this is \[1, 2\]"),
        ({"prompt": "a"}, r"line 2: there is no key 'response' among the keys 'prompt'. Other"),
        ({"prompt": "a", "response": 3}, r"line 2: 'response' must be text, but it is 3\."),
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


def test_an_error_of_the_template_is_passed_on(write) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match=r"line 1: roles must alternate"):
        _examples(Conversations(write({"messages": TALK}), chat_template=template))


def test_files_that_cannot_be_read(tmp_path, write) -> None:
    with pytest.raises(FileNotFoundError, match=r"data.corpus.train: 'no/such.jsonl' matches no"):
        Responses("no/such.jsonl")
    with pytest.raises(ValueError, match=r"data.corpus.train: there is no line in '.*empty.jsonl'"):
        _examples(Responses(write("", name="empty.jsonl")))
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe4"}\n')
    with pytest.raises(ValueError, match=r"latin.jsonl.*this is not UTF-8 text"):
        _examples(Responses(str(tmp_path / "latin.jsonl")))
    (tmp_path / "not.xz").write_bytes(b"{}\n")
    with pytest.raises(ValueError, match=r"not.xz is named .xz but is not an xz file"):
        _examples(Responses(str(tmp_path / "not.xz")))


def test_a_tokenizer_without_template_or_end_is_refused(write, tmp_path) -> None:
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
