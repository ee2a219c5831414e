"""Examples for fine-tuning: a prompt and the response to learn.

Two kinds of JSON lines. `Responses`, here::

    {"prompt": "Translate to French: cheese", "response": "fromage"}

and `conversations.Conversations`, which are rendered with the tokenizer's chat template::

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
    """A tokenized text and which of its tokens are targets."""

    tokens: list[int]
    is_target: list[bool]  # one for each token


class ExampleCorpus(Protocol):
    """Examples in one split or two."""

    has_validation: bool

    def examples(self, split: Split, tokenizer: PreTrainedTokenizerBase) -> Iterator[Example]:
        """Yield the examples of a split, always in the same order."""
        ...

    def fingerprint(self) -> str:
        """Return a hash of everything that determines the examples, except the tokenizer."""
        ...

    def prepare(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Check that the tokenizer fits the examples, and store their chat template in it."""
        ...


class Responses:
    """Prompts and responses. The tokenizer's end-of-text token closes each response.

    Prompt and response are tokenized separately, as when the tuned model is used: it then sees the
    tokens of the prompt only, including those that a tokenizer such as Llama's puts in front.

    Args:
        train: files of JSON lines; see `JsonLines`.
        validation: the same; None: some of the training examples are held out for validation.
        prompt_key: key of the prompt, which may be empty.
        response_key: key of the response.

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
        """Return a hash of everything that determines the examples, except the tokenizer."""
        return json.dumps([self._lines.fingerprint(), self._prompt_key, self._response_key])

    def prepare(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Check that the tokenizer has an end-of-text token.

        Raises:
            ValueError: it has none.
        """
        if tokenizer.eos_token_id is None:
            raise ValueError(
                "The tokenizer has no end-of-text token (`eos_token`), so the tuned model could not"
                " learn to stop. Save the tokenizer with one."
            )

    def examples(self, split: Split, tokenizer: PreTrainedTokenizerBase) -> Iterator[Example]:
        """Yield the examples of a split, always in the same order.

        Raises:
            ValueError: a line is malformed; with file and line number.
        """
        for prompt, response in self.pairs(split):
            given = self._given(prompt, tokenizer)
            answer = tokenizer(response, add_special_tokens=False, verbose=False)["input_ids"]
            answer = [*answer, tokenizer.eos_token_id]
            yield Example(given + answer, [False] * len(given) + [True] * len(answer))

    def pairs(self, split: Split) -> Iterator[tuple[str, str]]:
        """Yield the prompt and response of every line; raises as `examples` does."""
        for place, record in self._lines.records(split):
            prompt = text_of(place, record, self._prompt_key, "data.corpus.prompt_key")
            response = text_of(place, record, self._response_key, "data.corpus.response_key")
            yield prompt, response

    def _given(self, prompt: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        tokens = list(tokenizer(prompt, verbose=False)["input_ids"])
        if tokens and tokens[-1] == tokenizer.eos_token_id:
            tokens.pop()  # some tokenizers end every text with it, but the response follows here
        if not tokens and tokenizer.bos_token_id is not None:
            # with nothing before it the response's first token could not be predicted
            return [tokenizer.bos_token_id]
        return tokens
