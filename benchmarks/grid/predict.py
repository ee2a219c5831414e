"""The planner's utilization of every row in every cell, from inputs measured before the grid."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.grid.cells import (
    BASELINES,
    BLOCK_PARAMETERS,
    BLOCKS,
    NODES,
    OTHER_PARAMETERS,
    OVERLAP,
    SYNC_EVERY,
    TENSORS,
    Cell,
)
from commfree_planner import (
    Exchange,
    Model,
    Training,
    all_reduce_bytes,
    build_exchange,
    payload_bytes,
)
from commfree_planner.bytes_sent import all_reduce_rounds

MODEL = Model((BLOCK_PARAMETERS,) * BLOCKS, OTHER_PARAMETERS)
TORCHFT_THREADS = 2  # gloo runs as many all-reduces at a time, one for each tensor


def training(row: str, cell: Cell, step_s: float, sync_s: float) -> Training:
    """Return the run that the planner gets."""
    return Training(
        MODEL,
        step_s,
        num_replicas=NODES,
        sync_every=SYNC_EVERY,
        overlap_steps=OVERLAP if row == "ours" else 0,
        latency_s=cell.round_trip_ms / 2e3,
        loss=cell.loss,
        bbr=cell.congestion == "bbr",
        sync_seconds=sync_s,
    )


def exchange(row: str, run: Training) -> Exchange:
    """Return the messages of a row."""
    if row == "ours":
        return run.diloco(run.fragment_count, run.overlap_steps, run.wire_dtype)
    if row == "diloco":
        return run.diloco(1, 0, "fp32")
    return build_exchange(
        MODEL,
        lambda numel: all_reduce_bytes(payload_bytes(numel, "fp32"), NODES),
        sync_every=SYNC_EVERY,
        by_layer=False,
        rounds=all_reduce_rounds(NODES) * TENSORS // TORCHFT_THREADS,
        sync_seconds=run.sync_seconds,
    )


def predicted(row: str, cell: Cell, inputs: Mapping[str, Any]) -> float:
    """Return the utilization of a row in a cell.

    Args:
        row: with an exchange.
        cell: the link.
        inputs: `step_s` by baseline, `sync_s` by row, and `mbit` by name of the cell: what every
            node sends on its link while all nodes send.
    """
    step_s = inputs["step_s"][BASELINES[row]]
    run = training(row, cell, step_s, inputs["sync_s"][row])
    return run.utilization(exchange(row, run), inputs["mbit"][cell.name] / 1e3)


def sync_seconds(row: str, cell: Cell, cycle_s: float, step_s: float, mbit: float) -> float:
    """Return the time of a cycle that neither steps nor the planner's exchange account for.

    Args:
        row: with an exchange.
        cell: the link on which the row was measured.
        cycle_s: measured seconds of a cycle.
        step_s: seconds of a step.
        mbit: measured throughput of the link.
    """
    run = training(row, cell, step_s, sync_s=0.0)
    utilization = run.utilization(exchange(row, run), mbit / 1e3)
    return max(0.0, cycle_s - SYNC_EVERY * step_s / utilization)
