"""Resolve `ckpt_path` and check the checkpoint before anything is launched."""

from __future__ import annotations

import os
import shlex
import sys
import warnings
from pathlib import Path

import torch
from hydra.core.hydra_config import HydraConfig

from lightning_commfree.comm.text import counted
from lightning_commfree.resume.folders import REST, is_folder
from recipes.training.launch import launched_outside
from recipes.training.report import CHECKPOINT_FOLDER
from recipes.training.summary import shown

_LIGHTNINGS_WORDS = ("best", "hpc")  # Lightning resolves these itself


def find_checkpoint(
    ckpt_path: str | None, run_dir: str, max_steps: int, nodes: int = 1
) -> str | None:
    """Return the checkpoint to resume from; None to start from scratch.

    "last" is the newest complete checkpoint in the run's own folder, by modification time: the
    `last.ckpt` of an end or a stop, or the `step-N.ckpt` of a killed run. Truncated files are
    skipped with a warning. The other ranks' files in `.commfree/` need no check: a save completes
    them before it replaces the checkpoint.

    Args:
        ckpt_path: a path, "last", or a keyword of Lightning's.
        run_dir: the run's folder.
        max_steps: optimizer steps of the whole run.
        nodes: number of machines. With several, a path that is missing here is returned: if another
            machine has a checkpoint, its ranks send it.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        ValueError: its run has already taken all its steps.
    """
    if ckpt_path is None or ckpt_path in _LIGHTNINGS_WORDS:
        return ckpt_path
    folder = Path(run_dir) / CHECKPOINT_FOLDER
    if ckpt_path == "last" and (nodes == 1 or any(folder.glob("*.ckpt"))):
        path = _newest(folder)
    elif ckpt_path == "last":
        path = folder / "last.ckpt"
    elif nodes > 1 or Path(ckpt_path).exists():
        path = Path(ckpt_path)
    else:
        raise FileNotFoundError(
            f"ckpt_path='{ckpt_path}' does not exist (relative to '{Path.cwd()}'). Give a"
            " checkpoint, such as outputs/pretrain/.../checkpoints/last.ckpt, `last` together"
            " with the `hydra.run.dir=` of the run to resume, or null to start from scratch."
        )
    steps = _steps_taken(path)
    if steps is not None and steps >= max_steps:
        raise ValueError(
            f"'{path}' has already taken {counted(steps, 'step')}, and"
            f" trainer.max_steps={max_steps}: nothing is left to do. Raise"
            " trainer.max_steps (or token_budget) to train longer, or set ckpt_path=null to start"
            " from scratch."
        )
    return str(path)


def resume_command(run_dir: str) -> str:
    """Return a sentence with the command that resumes the run; call it in the launching process."""
    there = [f"hydra.run.dir={shown(run_dir)}", "ckpt_path=last"]
    if launched_outside() or not HydraConfig.initialized():  # torchrun's own words are not known
        return f"To resume, run the same command with {shlex.join(there)}"
    words = sys.argv[1:]
    start = sys.orig_argv[: len(sys.orig_argv) - len(words)]  # such as `python -m recipes.pretrain`
    # not `words`, which in a sweep are those of all jobs
    kept = [word for word in HydraConfig.get().overrides.task if not word.startswith("ckpt_path=")]
    threads = os.environ.get("OMP_NUM_THREADS")
    variables = f"OMP_NUM_THREADS={threads} " if threads else ""
    return f"To resume:\n{variables}{shlex.join([*start, *kept, *there])}"


def _newest(folder: Path) -> Path:
    files = sorted(folder.glob("*.ckpt"), key=lambda file: file.stat().st_mtime_ns, reverse=True)
    for file in files:
        if _steps_taken(file) is not None:
            return file
        warnings.warn(f"'{file}' is truncated and was skipped.", stacklevel=2)
    found = "no whole checkpoint" if files else "no checkpoint"
    raise FileNotFoundError(
        f"ckpt_path=last found {found} in '{folder}'. `last` is the newest checkpoint in the run's"
        f" own folder: name the folder of the earlier run by hydra.run.dir={_example(folder)}, or"
        " set ckpt_path=null to start from scratch."
    )


def _example(folder: Path) -> str:
    """Return the newest run folder next to this one with a checkpoint, or else a pattern."""
    beside = folder.parent.parent.glob(f"*/{CHECKPOINT_FOLDER}/*.ckpt")
    newest = max(beside, key=lambda file: file.stat().st_mtime_ns, default=None)
    return "outputs/pretrain/..." if newest is None else f"'{newest.parent.parent}'"


def _steps_taken(path: Path) -> int | None:
    """Return a checkpoint's optimizer steps without reading its tensors; None if unreadable."""
    file = path / REST if is_folder(path) else path
    try:
        return int(
            torch.load(file, map_location="cpu", mmap=True, weights_only=True)["global_step"]
        )
    except Exception:  # noqa: BLE001 - torch raises many types for a damaged file
        return None
