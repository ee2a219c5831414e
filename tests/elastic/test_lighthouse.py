"""The tests of `lighthouse_cases`, in a process of their own.

torchft runs threads in Rust. Ranks that were forked from a process with such threads crashed now
and then, also in tests of other modules that ran later in the same process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("lighthouse_cases.py")


@pytest.mark.skipif(
    find_spec("torchft") is None, reason="needs torchft: `pip install -e '.[elastic]'`"
)
def test_the_cases_pass() -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(CASES)]
    found = subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert " passed" in found.stdout
