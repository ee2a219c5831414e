"""The table at the end of a sweep (`-m`): overrides and validation loss of each job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

_SUMMARY = "summary.json"  # as in `recipes.training.report`, which would import torch


class SweepTable(Callback):
    """A Hydra callback, set in `conf/*.yaml`, that prints the table when all jobs are done."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Read the summaries of the jobs and print the table."""
        from rich.console import Console

        folder = Path(config.hydra.sweep.dir)
        rows = sweep_rows(folder)
        if any(loss is not None for *_, loss in rows):
            Console().print(sweep_table(rows))
            Console().print(f"Folders of the jobs: {folder}/NUMBER", markup=False, soft_wrap=True)


def sweep_rows(folder: Path) -> list[tuple[str, list[str], float | None]]:
    """Return the number, the overrides that not all jobs share, and the loss of each job.

    Args:
        folder: of the sweep; the folders of its jobs are named by their numbers.
    """
    jobs = sorted((path for path in folder.glob("*") if path.name.isdigit()), key=_number)
    words = {job: _words(job) for job in jobs}
    common = set.intersection(*(set(some) for some in words.values())) if words else set()
    return [
        (job.name, [word for word in words[job] if word not in common], _loss(job)) for job in jobs
    ]


def sweep_table(rows: list[tuple[str, list[str], float | None]]) -> Any:
    """Return a table for a terminal with the lowest loss marked."""
    from rich.table import Table
    from rich.text import Text

    table = Table("job", "overrides")
    table.add_column("validation loss", justify="right")
    losses = [loss for *_, loss in rows if loss is not None]
    for name, words, loss in rows:
        shown = "none" if loss is None else f"{loss:.4f}"
        best = loss is not None and loss == min(losses)
        table.add_row(name, Text(" ".join(words)), f"{shown} *" if best else f"{shown}  ")
    return table


def _number(path: Path) -> int:
    return int(path.name)


def _words(job: Path) -> list[str]:
    file = job / ".hydra" / "overrides.yaml"
    return [str(word) for word in OmegaConf.load(file)] if file.exists() else []


def _loss(job: Path) -> float | None:
    try:
        loss = json.loads((job / _SUMMARY).read_text())["validation_loss"]
    except FileNotFoundError:  # the job has failed, or its command trains nothing
        return None
    return None if loss is None else float(loss)
