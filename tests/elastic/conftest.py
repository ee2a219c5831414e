"""What several files of tests share."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.elastic.turns import Turns


@pytest.fixture
def store(tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    folder.mkdir()
    return folder


@pytest.fixture
def turns(request: pytest.FixtureRequest) -> Iterator[Turns]:
    """Let all threads of a test take turns on a clock of their own, here and in what it tests.

    The variable TURNS chooses another order of events.
    """
    with Turns(int(os.environ.get("TURNS", "0"))) as one:
        one.replace_in(sys.modules[request.module.__name__])
        yield one
