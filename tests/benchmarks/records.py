"""Artificial records of the bandwidth benchmarks."""

from __future__ import annotations

from typing import Any

SETTINGS = {"sync_every": 100, "cycles": 1, "steps": 40, "leg_steps": 3, "heap": {"A": "1"}}


def record(
    row: str,
    step_ms: float,
    wire: int = 0,
    ledger: int | None = None,
    round_: int = 0,
    nodes: int = 2,
) -> dict[str, Any]:
    """One row of one round at 100mbit; all nodes but the first are a tenth faster."""
    node = {
        "row": row,
        "steps": 100,
        "seconds": step_ms / 10,
        "wire_bytes": 100 * wire,
        "ledger_bytes": ledger and 100 * ledger,
        "parameters": 1_000_000,
        "error": None,
    }
    faster = {**node, "seconds": 0.9 * step_ms / 10}
    measured = [node, *[faster] * (nodes - 1)]
    return {"rate": "100mbit", "row": row, "round": round_, "call": 0, "nodes": measured}


def stepped(row: str, round_: int, *nodes_ms: list[float]) -> dict[str, Any]:
    """One row of one round in which every node recorded its steps."""
    made = record(row, 0, round_=round_)
    for i, steps in enumerate(nodes_ms):
        made["nodes"][i] |= {"steps": len(steps), "seconds": sum(steps) / 1e3}
        made["nodes"][i]["step_s"] = [ms / 1e3 for ms in steps]
    return made
