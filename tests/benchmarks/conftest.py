"""Fixtures, some of them shared with the tests of the recipes."""

import pytest

from benchmarks.lab import NetLab
from tests.forks import ForkedLab
from tests.recipes.conftest import compose_config, quiet_trainer

__all__ = ["compose_config", "forked_lab", "quiet_trainer"]


@pytest.fixture
def forked_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a benchmark fork its jobs, each of which would import Lightning for some seconds."""
    monkeypatch.setattr(NetLab, "start", ForkedLab.start)
