"""Records of finished runs: one JSON line each, appended, so that nothing finished is ever lost."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.size_ladder.cells import Cell

RECORDS = Path(__file__).with_name("records.jsonl")


class Records:
    """The finished runs of a file.

    Args:
        path: of the JSON lines; may not exist yet.

    Attributes:
        losses: validation loss by cell, nats per token.
        outer_step: the loss of each DiLoCo run if its fit had ended with an outer step.
        made_by: provenance of each run, without repetitions.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.losses: dict[Cell, float] = {}
        self.outer_step: dict[Cell, float] = {}
        self.made_by: list[list[str]] = []
        for line in path.read_text().splitlines() if path.exists() else ():
            self._take(json.loads(line))

    def add(
        self, cell: Cell, losses: dict[str, float], cpu_seconds: float, made_by: list[str]
    ) -> None:
        """Append a finished run."""
        record = {"cell": asdict(cell), "steps": cell.steps, **losses}
        record |= {"cpu_seconds": round(cpu_seconds), "made_by": made_by}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        self._take(record)

    def _take(self, record: dict[str, Any]) -> None:
        cell = Cell(**record["cell"])
        self.losses[cell] = record["validation_loss"]
        if "outer_step_loss" in record:
            self.outer_step[cell] = record["outer_step_loss"]
        if record["made_by"] not in self.made_by:
            self.made_by.append(record["made_by"])
