"""The table at the end of a sweep (`-m`): what differed between its jobs, and what came of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

_SUMMARY = "summary.json"  # of `recipes.training.report`, whose libraries are not loaded for this


class SweepTable(Callback):
    """Prints the table when all jobs are done; a callback of Hydra's, from `conf/*.yaml`."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Read what the jobs have left, wherever they ran, and print it."""
        from rich.console import Console

        folder = Path(config.hydra.sweep.dir)
        rows = sweep_rows(folder)
        if any(loss is not None for *_, loss in rows):
            Console().print(sweep_table(rows))
            Console().print(f"Folders of the jobs: {folder}/NUMBER", markup=False, soft_wrap=True)


def sweep_rows(folder: Path) -> list[tuple[str, list[str], float | None]]:
    """Return for every job its number, the overrides that others do not have, and its loss.

    Args:
        folder: of the sweep; a job's is named by its number.
    """
    jobs = sorted((path for path in folder.glob("*") if path.name.isdigit()), key=_number)
    words = {job: _words(job) for job in jobs}
    common = set.intersection(*(set(some) for some in words.values())) if words else set()
    return [
        (job.name, [word for word in words[job] if word not in common], _loss(job)) for job in jobs
    ]


def sweep_table(rows: list[tuple[str, list[str], float | None]]) -> Any:
    """Return the table for a terminal, the job with the lowest loss marked."""
    from rich.table import Table
    from rich.text import Text

    table = Table("job", "overrides")
    table.add_column("validation loss", justify="right")
    losses = [loss for *_, loss in rows if loss is not None]
    for name, words, loss in rows:
        told = "none" if loss is None else f"{loss:.4f}"
        best = loss is not None and loss == min(losses)
        table.add_row(name, Text(" ".join(words)), f"{told} *" if best else f"{told}  ")
    return table


def _number(path: Path) -> int:
    return int(path.name)


def _words(job: Path) -> list[str]:
    file = job / ".hydra" / "overrides.yaml"
    return [str(word) for word in OmegaConf.load(file)] if file.exists() else []


def _loss(job: Path) -> float | None:
    try:
        loss = json.loads((job / _SUMMARY).read_text())["validation_loss"]
    except FileNotFoundError:  # the job has failed, or is another kind of command's
        return None
    return None if loss is None else float(loss)
