"""A new architecture is one entry in the table of families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_commfree.domino.families import FAMILIES, Llama
from tests.domino.models import Case, Outcome, make, reference, worst_error
from tests.domino.ranks import divide, play, with_channel
from tests.world import run_ranks

CASE = Case("olmo", 3)


def with_a_new_family(channel: Any) -> tuple[Outcome, bool, bool]:
    """Results of a step with a new family, and whether it was scheduled with and without it."""
    plain = divide(make("olmo"), channel, CASE).scheduled
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, "OlmoForCausalLM", Llama(raw_embedding=True))
        scheduled = divide(make("olmo"), channel, CASE).scheduled
        return play(channel, CASE), scheduled, plain


def test_a_new_entry_schedules_an_architecture_and_equals_one_process(tmp_path: Path) -> None:
    for outcome, scheduled, plain in run_ranks(with_channel, 2, tmp_path, with_a_new_family):
        assert scheduled
        assert not plain
        assert worst_error(outcome, reference(CASE)) < 1e-12
