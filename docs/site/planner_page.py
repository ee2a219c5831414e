"""The page with the planner in the browser, which interpolates in a grid computed in advance.

Without latency, utilization depends on a single number: bandwidth times step time, divided by the
number of parameters. So one curve over that number is valid for models of every size.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from commfree_planner import Method, Model, Training, log_grid, methods
from commfree_planner.methods import DOMINO, POWER_SGD
from commfree_planner.pace import auto_pace

TEMPLATE = Path(__file__).with_name("planner.template.md")
PLACE = "/*GRID*/"
BLOCKS, OUTSIDE = 24, 0.1  # of the model; the share of its parameters outside any block
REPLICAS = (2, 3, 4, 8, 16)
PARAMETERS = 1_000_000_000  # of the model that the grid is computed for
LINKS = log_grid(1e-3, 1e6, 181)  # Gbit/s times seconds a step, per billion parameters
# these depend on more than that number: on the width, and on the tokens per step
LEFT_OUT = (POWER_SGD, DOMINO)


def training(num_replicas: int) -> Training:
    """Return the training that the grid is computed for: one second per step."""
    block = round(PARAMETERS * (1 - OUTSIDE) / BLOCKS)
    return Training(
        Model((block,) * BLOCKS, PARAMETERS - BLOCKS * block), 1.0, num_replicas=num_replicas
    )


def compared(num_replicas: int) -> list[Method]:
    """Return the methods that the page compares."""
    return [m for m in methods(training(num_replicas)) if m.name not in LEFT_OUT]


def grid() -> dict[str, Any]:
    """Return the data that the page's script reads."""
    found: dict[str, Any] = {
        "blocks": BLOCKS,
        "outside": OUTSIDE,
        "lowest": LINKS[0],
        "highest": LINKS[-1],
        "methods": [[m.name, m.setting] for m in compared(REPLICAS[0])],
        "replicas": {},
        "paces": {},  # of `sync_every="auto"`: H and tau
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
        found["paces"][num_replicas] = [auto_pace(run, link) for link in LINKS]
    return found


def page() -> str:
    """Return the page as Markdown with HTML in it; it fetches nothing."""
    written = json.dumps(grid(), separators=(",", ":"))
    return TEMPLATE.read_text("utf-8").replace(PLACE, written)
