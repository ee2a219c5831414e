"""All architectures are in one file; nothing else in Domino knows the name of a model."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_commfree import domino
from lightning_commfree.domino.families import FAMILIES, Llama, family_of
from tests.domino.models import Case, Outcome, make, reference, worst_error
from tests.domino.ranks import divide, play, with_channel
from tests.world import run_ranks

KINDS = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3")
NAMES = ("gpt2", "llama", "mistral", "qwen", "gemma")
FOLDER = Path(domino.__file__).parent
CASE = Case("olmo", 3)


def names_in_code(path: Path) -> Iterator[str]:
    """Names of models in identifiers and texts; docstrings and comments may use them."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    code = ast.unparse(tree).lower()
    yield from (name for name in NAMES if name in code)


def test_only_the_families_know_models() -> None:
    knowing = {path.name for path in FOLDER.rglob("*.py") if list(names_in_code(path))}
    assert knowing == {"families.py"}


def test_every_family_is_known_by_the_name_of_its_class() -> None:
    for kind in KINDS:
        model = make(kind, attention="eager")
        assert family_of(model) is FAMILIES[type(model).__name__]
    assert family_of(make("olmo")) is None  # it has a plan


def with_a_new_family(channel: Any) -> tuple[Outcome, bool, bool]:
    """Results of a step with a new family, and whether it was scheduled with and without it."""
    plain = divide(make("olmo"), channel, CASE).scheduled
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, "OlmoForCausalLM", Llama(raw_embedding=True))
        scheduled = divide(make("olmo"), channel, CASE).scheduled
        return play(channel, CASE), scheduled, plain


def test_a_new_architecture_is_a_line_in_the_table(tmp_path: Path) -> None:
    for outcome, scheduled, plain in run_ranks(with_channel, 2, tmp_path, with_a_new_family):
        assert scheduled
        assert not plain
        assert worst_error(outcome, reference(CASE)) < 1e-12
