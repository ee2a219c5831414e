"""The tests of `object_cases`, in a process of their own.

obstore runs threads in Rust, and other tests fork: their children would inherit locks that no
thread releases.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("object_cases.py")


@pytest.mark.skipif(
    find_spec("obstore") is None or find_spec("moto") is None,
    reason="needs obstore and moto, which the extra `dev` installs",
)
def test_the_cases_pass() -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    words = ["-m", "tests.bare", str(CASES)]
    found = subprocess.run(
        [sys.executable, *words],
        cwd=CASES.parents[2],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert " passed" in found.stdout
