"""Provenance of figures: command, commit, hardware and versions."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

DIRTY = "-dirty"  # after a commit hash: tracked files have changes


def lines_of(command: str, ignore: Sequence[str] = ()) -> list[str]:
    """Return lines of Markdown with the provenance of figures.

    Args:
        command: that reproduces them, run in the root of the repository.
        ignore: git pathspecs of files whose changes do not matter.
    """
    packages = ("torch", "lightning", "transformers")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return [
        f"- command: `{command}`",
        f"- commit: `{_commit(ignore)}`",
        f"- hardware: {_processor()}, {os.cpu_count()} cores, {gpu}",
        f"- versions: Python {platform.python_version()}, "
        + ", ".join(f"{package} {_version(package)}" for package in packages),
    ]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _commit(ignore: Sequence[str]) -> str:
    try:
        commit = _git("describe", "--always", "--exclude", "*")
        changes = _git("status", "--porcelain", "--untracked-files=no", "--", ".", *ignore)
    except (OSError, subprocess.CalledProcessError):
        return "not a git checkout"
    return f"{commit}{DIRTY if changes else ''}"


def _git(*words: str) -> str:
    root = Path(__file__).resolve().parents[2]
    command = ["git", "-C", str(root), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
