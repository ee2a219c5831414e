"""Prompts and responses from the bundled Shakespeare, without any file of the user's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise

from pydantic import PositiveInt

from recipes.data.corpus import Shakespeare, Split
from recipes.data.examples import Responses

# a line with a speaker's name and a full stop, then the spoken lines
_SPEECH = re.compile(r"(?P<speaker>[A-Z][A-Za-z' ]{1,20}\.)\n(?P<words>[^\[].*)", re.DOTALL)


class Dialogues(Responses):
    """Pairs of successive short speeches; the second speaker's name belongs to the prompt.

    The plays in the bundled validation text are the validation split.

    Args:
        max_characters: limit for both speeches together.
    """

    has_validation = True

    def __init__(self, max_characters: PositiveInt = 120) -> None:
        self._works = Shakespeare()
        self._max_characters = max_characters

    def fingerprint(self) -> str:
        """Return a hash of everything that determines the examples, except the tokenizer."""
        return json.dumps([self._works.fingerprint(), self._max_characters])

    def pairs(self, split: Split) -> Iterator[tuple[str, str]]:
        """Yield prompts and responses in the order of the plays."""
        for work in self._works.documents(split):
            paragraphs = re.split(r"\n{2,}", work)
            for first, second in pairwise(_SPEECH.fullmatch(text.strip()) for text in paragraphs):
                if first is None or second is None:
                    continue
                prompt, response = f"{first[0]}\n\n{second['speaker']}\n", second["words"]
                if len(prompt) + len(response) <= self._max_characters:
                    yield prompt, response
