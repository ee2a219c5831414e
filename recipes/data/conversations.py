"""Render conversations with a chat template and find the assistant's turns in the text."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from recipes.data.corpus import Split
from recipes.data.examples import Example
from recipes.data.json_lines import JsonLines, Record, text_of

Span = tuple[int, int]  # offsets of the first character and of the one after the last
Message = dict[str, Any]

PLAIN_TEMPLATE = Path(__file__).parent / "templates" / "plain.jinja"
_MARKS = {"generation": "\ue000generation\ue000", "endgeneration": "\ue000endgeneration\ue000"}


class Conversations:
    """Conversations rendered with a chat template; the targets are the assistant's turns.

    The template's `{% generation %}` blocks mark the turns, if it has any. Otherwise a turn is the
    text that a message adds to the rendering of the messages before it and the generation prompt.
    This requires that the rendering of a conversation's first messages is a prefix of the whole
    rendering, which is checked for every conversation.

    Args:
        train: files of JSON lines; see `JsonLines`.
        validation: the same; None: some of the training examples are held out for validation.
        messages_key: key of the list of messages, each with the texts `role` and `content`.
        chat_template: a Jinja template or the path of a file with one, which is saved with the
            tuned model's tokenizer. None: the tokenizer's own.

    Raises:
        FileNotFoundError: a path or glob matches no file.
        ValueError: a file is in both splits.
    """

    def __init__(
        self,
        train: str | Sequence[str],
        validation: str | Sequence[str] | None = None,
        messages_key: str = "messages",
        chat_template: str | None = None,
    ) -> None:
        self._lines = JsonLines(train, validation)
        self.has_validation = self._lines.has_validation
        self._messages_key = messages_key
        self._template = None if chat_template is None else _template(chat_template)

    def fingerprint(self) -> str:
        """Return a hash of everything that determines the examples, except the tokenizer."""
        return json.dumps([self._lines.fingerprint(), self._messages_key, self._template])

    def prepare(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Store the chat template in the tokenizer, and check that it can be used.

        Raises:
            ValueError: there is no template, or the tokenizer has no character offsets.
        """
        if self._template is not None:
            tokenizer.chat_template = self._template
        if tokenizer.chat_template is None:
            raise ValueError(
                "The tokenizer has no chat template, so conversations cannot be rendered. Set"
                " `data.corpus.chat_template` to Jinja text or to the path of a file, for example a"
                f" plain one: data.corpus.chat_template={os.path.relpath(PLAIN_TEMPLATE)}"
            )
        if not tokenizer.is_fast:
            raise ValueError(
                f"`{type(tokenizer).__name__}` has no character offsets, which are needed to find"
                " the assistant's turns. Use a fast tokenizer (tokenizer.json)."
            )

    def examples(self, split: Split, tokenizer: PreTrainedTokenizerBase) -> Iterator[Example]:
        """Yield the examples of a split, always in the same order.

        Raises:
            ValueError: a line is malformed, the template refuses a conversation, or a turn cannot
                be found; with file and line number.
        """
        template = tokenizer.get_chat_template()
        marked = _with_marks(template)
        for place, record in self._lines.records(split):
            messages = self._messages(place, record)
            try:
                if marked is not None:
                    text, spans = _read_marks(_render(tokenizer, messages, marked))
                else:
                    text, spans = _turns(tokenizer, messages)
            except (TemplateError, ValueError, TypeError) as error:
                raise ValueError(f"{place}: {error}") from error
            yield _example(tokenizer, text, spans)

    def _messages(self, place: str, record: Record) -> list[Message]:
        key = self._messages_key
        messages = record.get(key)
        if not isinstance(messages, list) or not messages:
            raise ValueError(
                f"{place}: '{key}' must be a list of messages, as"
                ' [{"role": "user", "content": "..."}, ...]; the line has the keys'
                f" {', '.join(record) or 'none'}. Another name is given by"
                " `data.corpus.messages_key`."
            )
        for i, message in enumerate(messages, 1):
            if not isinstance(message, dict):
                raise ValueError(f"{place}: message {i} must be an object with role and content.")
            for part in ("role", "content"):
                text_of(f"{place}, message {i}", message, part, "")
        return messages


def _template(text_or_path: str) -> str:
    if "{%" in text_or_path or "{{" in text_or_path:
        return text_or_path
    path = Path(text_or_path).expanduser()
    if not path.is_file():
        raise FileNotFoundError(
            f"data.corpus.chat_template: '{text_or_path}' is neither a Jinja template (there is no"
            f" {{% or {{{{ in it) nor a file (relative to '{Path.cwd()}')."
        )
    return path.read_text()


def _render(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    template: str | None = None,
    prompt: bool = False,
) -> str:
    return str(
        tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=prompt
        )
    )


def _with_marks(template: str) -> str | None:
    """Return a template that writes marks around its generation blocks; None if there are none.

    transformers' own `return_assistant_tokens_mask` is not reliable (5.23): where the first or last
    character of a block belongs to no token (a space, which many tokenizers strip), it skips the
    turn or marks everything after it as the assistant's.
    """
    marked = template
    for word, mark in _MARKS.items():
        # statements instead of `{{ }}`: line breaks of the template are trimmed after statements
        written = r"{%\1 if true %}{{ '" + mark + r"' }}{% endif \2%}"
        marked = re.sub(r"{%(-?)\s*" + word + r"\s*(-?)%}", written, marked)
    return None if marked == template else marked


def _read_marks(marked: str) -> tuple[str, list[Span]]:
    begin, end = _MARKS.values()
    text, spans = "", []
    for i, part in enumerate(re.split(f"{begin}|{end}", marked)):
        if i % 2:
            spans.append((len(text), len(text) + len(part)))
        text += part
    return text, spans


def _turns(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> tuple[str, list[Span]]:
    whole, spans = _render(tokenizer, messages), []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _render(tokenizer, messages[:i], prompt=True) if i else ""
        upto = _render(tokenizer, messages[: i + 1])
        if not (upto.startswith(before) and whole.startswith(upto)):
            raise ValueError(
                f"message {i + 1}, the assistant's, cannot be found in the text: this chat template"
                " renders earlier messages differently when later ones follow. Set"
                " `data.corpus.chat_template` to a template with {% generation %} blocks around the"
                " assistant's words, or split the conversation."
            )
        spans.append((len(before), len(upto)))
    return whole, spans


def _example(tokenizer: PreTrainedTokenizerBase, text: str, spans: list[Span]) -> Example:
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    is_target, behind = [], 0
    for start, stop in encoded["offset_mapping"]:
        # a token without characters comes from spaces that the tokenizer has stripped
        first = start if start < stop else min(start, behind)
        is_target.append(any(first < end and stop > begin for begin, end in spans))
        behind = stop
    return Example(list(encoded["input_ids"]), is_target)
