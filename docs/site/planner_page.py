"""Write docs/planner.html: the planner in a browser, from a grid that is worked out beforehand.

python -m docs.site.planner_page

Without latency a utilization depends on one number alone: bandwidth times step time, over the
parameters. So a curve over that number holds for models of every size.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from commfree_planner import Method, Model, Training, log_grid, methods
from commfree_planner.methods import DOMINO, POWER_SGD

TEMPLATE = Path(__file__).with_name("planner.template.html")
TARGET = Path(__file__).resolve().parents[1] / "planner.html"
PLACE = "/*GRID*/"
BLOCKS, OUTSIDE = 24, 0.1  # of the model; the share of its parameters in no block
REPLICAS = (2, 3, 4, 8, 16)
PARAMETERS = 1_000_000_000  # for which the grid is worked out
LINKS = log_grid(1e-3, 1e6, 181)  # Gbit/s times seconds a step, per billion parameters
# what depends on more than that number: on the width, and on the tokens of a step
LEFT_OUT = (POWER_SGD, DOMINO)


def training(num_replicas: int) -> Training:
    """Return a training of the model that the grid is worked out for, a second a step."""
    block = round(PARAMETERS * (1 - OUTSIDE) / BLOCKS)
    return Training(
        Model((block,) * BLOCKS, PARAMETERS - BLOCKS * block), 1.0, num_replicas=num_replicas
    )


def compared(num_replicas: int) -> list[Method]:
    """Return the methods of the page."""
    return [m for m in methods(training(num_replicas)) if m.name not in LEFT_OUT]


def grid() -> dict[str, Any]:
    """Return all that the page's script reads."""
    found: dict[str, Any] = {
        "blocks": BLOCKS,
        "outside": OUTSIDE,
        "lowest": LINKS[0],
        "highest": LINKS[-1],
        "methods": [[m.name, m.setting] for m in compared(REPLICAS[0])],
        "replicas": {},
    }
    for num_replicas in REPLICAS:
        run = training(num_replicas)
        found["replicas"][num_replicas] = [
            {
                "bytes": round(m.exchange.bytes_per_step / PARAMETERS, 6),
                "reached": [round(run.utilization(m.exchange, link), 4) for link in LINKS],
            }
            for m in compared(num_replicas)
        ]
    return found


def page() -> str:
    """Return the page: one file, which fetches nothing."""
    written = json.dumps(grid(), separators=(",", ":"))
    return TEMPLATE.read_text("utf-8").replace(PLACE, written)


if __name__ == "__main__":
    TARGET.write_text(page(), "utf-8")
    print(TARGET)
