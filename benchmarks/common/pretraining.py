"""A run of `recipes.pretrain` in processes of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipes.training.report import SUMMARY_FILE


def run(overrides: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run one job of `recipes.pretrain` and return its summary.

    Raises:
        subprocess.CalledProcessError: the job failed; it has printed why.
    """
    command = [sys.executable, "-m", "recipes.pretrain", *overrides, f"hydra.run.dir={folder}"]
    subprocess.run(command, check=True)
    summary: dict[str, Any] = json.loads((folder / SUMMARY_FILE).read_text())
    return summary
