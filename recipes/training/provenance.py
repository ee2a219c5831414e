"""Where figures come from: command, commit, hardware and versions."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

import torch


def provenance(command: str) -> list[str]:
    """Return lines of Markdown that say where the figures come from.

    Args:
        command: makes the page again, from the root of the repository.
    """
    packages = ("torch", "lightning", "transformers")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return [
        f"- command: `{command}`",
        f"- commit: `{_commit()}`",
        f"- hardware: {_processor()}, {os.cpu_count()} cores, {gpu}",
        f"- versions: Python {platform.python_version()}, "
        + ", ".join(f"{package} {version(package)}" for package in packages),
    ]


def _commit() -> str:
    try:
        command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "not a git checkout"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
