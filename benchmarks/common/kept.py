"""What a bench of many runs keeps between calls, and how a page says their mean.

A *run* is a frozen dataclass of plain values that says all that distinguishes it from the others.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

R = TypeVar("R")

MISSING = "missing"


@dataclass
class Results(Generic[R]):
    """The runs so far.

    Attributes:
        setting: of all runs; results of two settings do not share a file.
        losses: validation loss by run, nats per token.
        made_by: the provenance of each call that made runs, one block of lines each.
    """

    setting: dict[str, Any]
    losses: dict[R, float] = field(default_factory=dict)
    made_by: list[list[str]] = field(default_factory=list)

    def add(self, run: R, loss: float, block: list[str]) -> None:
        """Add a run and who made it."""
        self.losses[run] = loss
        if block not in self.made_by:
            self.made_by.append(block)


def load(path: Path, setting: dict[str, Any], kind: type[R]) -> Results[R]:
    """Return the results so far.

    Args:
        path: of the file, which need not exist yet.
        setting: of plain values, as `json` gives them back.
        kind: the dataclass of the runs.

    Raises:
        ValueError: they were made with another setting.
    """
    if not path.exists():
        return Results(setting)
    stored = json.loads(path.read_text())
    if stored["setting"] != setting:
        raise ValueError(
            f"{path} holds results of the setting {stored['setting']}, and this call asks for"
            f" {setting}. Ask for that setting, or name another file with `--results`."
        )
    losses = {kind(**entry["run"]): entry["validation_loss"] for entry in stored["runs"]}
    return Results(setting, losses, stored["made_by"])


def save(path: Path, results: Results[Any]) -> None:
    """Write all results; a reader never sees half a file."""
    runs = [{"run": asdict(run), "validation_loss": loss} for run, loss in results.losses.items()]
    stored = {"setting": results.setting, "made_by": results.made_by, "runs": runs}
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_suffix(".tmp")
    half.write_text(json.dumps(stored, indent=1) + "\n")
    half.replace(path)


def mean_text(values: Sequence[float], form: str, unit: str = "") -> str:
    """Return the mean, where there are several values with its standard deviation."""
    if not values:
        return MISSING
    spread = f" ± {statistics.stdev(values):{form.lstrip('+')}}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{form}}{spread}{unit}"
