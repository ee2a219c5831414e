"""Examples to tune a model on: what it is given, and what it shall answer.

Two kinds of JSON lines. `Responses`, here::

    {"prompt": "Translate to French: cheese", "response": "fromage"}

and `conversations.Conversations`, which the tokenizer's chat template makes a text of::

    {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi!"}]}

The loss is taken on the response, or on the assistant's turns, alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from transformers import PreTrainedTokenizerBase

from recipes.data.corpus import Split
from recipes.data.json_lines import JsonLines, text_of


class Example(NamedTuple):
    """A text as tokens, and which of them a model shall foretell."""

    tokens: list[int]
    is_target: list[bool]  # as many


class ExampleCorpus(Protocol):
    """Examples in one split or two."""

    has_validation: bool

    def examples(self, split: Split, tokenizer: PreTrainedTokenizerBase) -> Iterator[Example]:
        """Yield the examples of a split, always in the same order."""
        ...

    def fingerprint(self) -> str:
        """Return a key of everything that decides the examples, but for the tokenizer."""
        ...

    def prepare(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """See that the tokenizer has what the examples need, and give it what it shall keep."""
        ...


class Responses:
    """Prompts and responses. The tokenizer's end-of-text token closes each response.

    Prompt and response are tokenized apart, as they are when the tuned model is used: it is given
    the tokens of the prompt, those that the tokenizer puts in front of a text (Llama's) included.

    Args:
        train: files of JSON lines; see `JsonLines`.
        validation: likewise; None: some of the training examples are kept for validation.
        prompt_key: of the text that the model is given; it may be empty.
        response_key: of the text that it shall answer.

    Raises:
        FileNotFoundError: a path or glob matches no file.
        ValueError: a file is in both splits.
    """

    def __init__(
        self,
        train: str | Sequence[str],
        validation: str | Sequence[str] | None = None,
        prompt_key: str = "prompt",
        response_key: str = "response",
    ) -> None:
        self._lines = JsonLines(train, validation)
        self.has_validation = self._lines.has_validation
        self._prompt_key, self._response_key = prompt_key, response_key

    def fingerprint(self) -> str:
        """See `ExampleCorpus`."""
        return json.dumps([self._lines.fingerprint(), self._prompt_key, self._response_key])

    def prepare(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """See `ExampleCorpus`.

        Raises:
            ValueError: the tokenizer has no end-of-text token.
        """
        if tokenizer.eos_token_id is None:
            raise ValueError(
                "The tokenizer has no end-of-text token (`eos_token`): nothing would close a"
                " response, and the tuned model would never stop. Save the tokenizer with one."
            )

    def examples(self, split: Split, tokenizer: PreTrainedTokenizerBase) -> Iterator[Example]:
        """See `ExampleCorpus`.

        Raises:
            ValueError: a line is not as it should be; with file and line number.
        """
        for prompt, response in self.pairs(split):
            given = self._given(prompt, tokenizer)
            answer = tokenizer(response, add_special_tokens=False, verbose=False)["input_ids"]
            answer = [*answer, tokenizer.eos_token_id]
            yield Example(given + answer, [False] * len(given) + [True] * len(answer))

    def pairs(self, split: Split) -> Iterator[tuple[str, str]]:
        """Yield prompt and response of every line; errors as in `examples`."""
        for place, record in self._lines.records(split):
            prompt = text_of(place, record, self._prompt_key, "data.corpus.prompt_key")
            response = text_of(place, record, self._response_key, "data.corpus.response_key")
            yield prompt, response

    def _given(self, prompt: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        tokens = list(tokenizer(prompt, verbose=False)["input_ids"])
        if tokens and tokens[-1] == tokenizer.eos_token_id:
            tokens.pop()  # some tokenizers close every text, and this one goes on
        if not tokens and tokenizer.bos_token_id is not None:
            return [tokenizer.bos_token_id]  # or nothing would foretell the response's first token
        return tokens
