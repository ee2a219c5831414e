"""Run pytest on files that need no Lightning, which takes seconds to import.

    python -m tests.bare FILE

The package is an empty one with our modules, and no `conftest` is loaded.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

WORDS = ["-q", "--noconftest", "-p", "no:cacheprovider", "-p", "no:xdist"]

if __name__ == "__main__":
    sys.modules["lightning_commfree"] = package = ModuleType("lightning_commfree")
    package.__path__ = [str(Path(__file__).parents[1] / "lightning_commfree")]
    sys.exit(pytest.main([*WORDS, *sys.argv[1:]]))
