"""Made-up records of the bandwidth bench."""

from __future__ import annotations

from typing import Any

SETTINGS = {"sync_every": 100, "cycles": 1, "steps": 40, "leg_steps": 3, "heap": {"A": "1"}}


def record(
    row: str,
    step_ms: float,
    wire: int,
    ledger: int | None = None,
    rate: str = "100mbit",
    round_: int = 0,
) -> dict[str, Any]:
    """One row of one round; node 1 is a tenth faster."""
    node = {
        "row": row,
        "steps": 100,
        "seconds": step_ms / 10,
        "wire_bytes": 100 * wire,
        "ledger_bytes": ledger and 100 * ledger,
        "parameters": 1_000_000,
        "error": None,
    }
    nodes = [node, {**node, "seconds": 0.9 * step_ms / 10}]
    return {"rate": rate, "row": row, "round": round_, "nodes": nodes}


def stepped(row: str, round_: int, *nodes_ms: list[float]) -> dict[str, Any]:
    """One row of one round, in which every node kept its steps."""
    made = record(row, 0, 0, round_=round_)
    for node, steps in zip(made["nodes"], nodes_ms, strict=True):
        node |= {"steps": len(steps), "seconds": sum(steps) / 1e3}
        node["step_s"] = [ms / 1e3 for ms in steps]
    return made
