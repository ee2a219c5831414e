"""Our value for each cell of the papers' tables, under explicit assumptions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from benchmarks.planner.tables import DILOCO_BY_SYNC_EVERY, SIZES, TABLE_4, TARGETS, Size
from commfree_planner import (
    Exchange,
    Model,
    all_reduce_bytes,
    build_exchange,
    exchange_bytes,
    log_grid,
    needed_bandwidth,
    payload_bytes,
)

GRID = log_grid(0.1, 1000, 50)  # Gbit/s; the paper's grid, inferred from its values
_FINE_GRID = log_grid(0.01, 10_000, 6001)  # points are 0.23 % apart


@dataclass(frozen=True)
class Assumptions:
    """Values that the paper does not give; the same for all cells."""

    reading: str = "below"  # printed grid point: last "below" the target, or first "reaching" it
    gradient_dtype: str = "bf16"
    outer_dtype: str = "bf16"
    num_replicas: int = 2
    by_layer: bool = True
    overlap_steps: int = 1
    rest_share: float = 0.0  # parameters outside of blocks, in a separate fragment
    params_scale: float = 1.0  # number of parameters over the nominal number


PAPER = Assumptions()
VARIATIONS = {
    "as above": PAPER,
    "printed: the first grid point that reaches the target": replace(PAPER, reading="reaching"),
    "fp32 gradients": replace(PAPER, gradient_dtype="fp32"),
    "fp32 outer gradients instead of bf16": replace(PAPER, outer_dtype="fp32"),
    "4 replicas": replace(PAPER, num_replicas=4),
    "fragments leave and land as a whole, as in our strategy": replace(PAPER, by_layer=False),
    "overlap_steps=2": replace(PAPER, overlap_steps=2),
    "2 % of the parameters in a separate fragment": replace(PAPER, rest_share=0.02),
    "1.4 % more parameters, as suggested by Table 1": replace(PAPER, params_scale=1.014),
}


class Cell(NamedTuple):
    """One value of a table and our value, both as indices into `GRID`."""

    method: str
    size: str
    target: float
    printed: float  # Gbit/s in the paper
    paper: int
    ours: int
    miss: float  # relative change of our bandwidth that would make both equal

    @property
    def ratio(self) -> float:
        """Our value over the paper's, on the grid."""
        return GRID[self.ours] / GRID[self.paper]


def paper_exchange(
    method: str, size: Size, assumed: Assumptions, sync_every: int = 100
) -> Exchange:
    """Return the exchange of a method of Table 4 in the paper's simulation."""

    def gradients(numel: int) -> float:
        return all_reduce_bytes(payload_bytes(numel, assumed.gradient_dtype), assumed.num_replicas)

    def outer(dtype: str, numel: int) -> float:
        return exchange_bytes(payload_bytes(numel, dtype), assumed.num_replicas)

    model = paper_model(size, assumed)
    build = partial(build_exchange, model, by_layer=assumed.by_layer)
    if method == "Data-Parallel":
        return build_exchange(model, gradients, by_layer=True)
    sends = partial(outer, "fp4" if method == "+ FP4" else assumed.outer_dtype)
    if method == "DiLoCo":
        return build(sends, sync_every=sync_every)
    tau = 0 if method == "Streaming" else assumed.overlap_steps
    count = model.default_num_fragments
    return build(sends, sync_every=sync_every, num_fragments=count, overlap_steps=tau)


def paper_model(size: Size, assumed: Assumptions) -> Model:
    """Return a model with equal blocks and the nominal number of parameters of a size."""
    params = size.params * assumed.params_scale
    rest = round(params * assumed.rest_share)
    return Model((round((params - rest) / size.layers),) * size.layers, rest)


def cells_of_table_4(assumed: Assumptions = PAPER) -> Iterator[Cell]:
    """Yield all cells of Table 4 with our values."""
    for method, rows in TABLE_4.items():
        for name, printed in rows.items():
            exchange = paper_exchange(method, SIZES[name], assumed)
            yield from _cells(method, name, printed, exchange, assumed)


def cells_by_sync_every() -> Iterator[Cell]:
    """Yield the cells of arXiv:2503.09799; only its row of H = 100 is also in Table 4."""
    for sync_every, printed in DILOCO_BY_SYNC_EVERY.items():
        exchange = paper_exchange("DiLoCo", SIZES["1B"], PAPER, sync_every)
        yield from _cells(f"DiLoCo, H={sync_every}", "1B", printed, exchange, PAPER)


def _cells(
    method: str, name: str, printed: Sequence[float], exchange: Exchange, assumed: Assumptions
) -> Iterator[Cell]:
    seconds = paper_model(SIZES[name], assumed).layer_seconds(SIZES[name].step_seconds)
    for target, value in zip(TARGETS, printed, strict=True):
        first = needed_bandwidth(seconds, exchange, target, GRID)
        ours = first - (assumed.reading == "below")
        assert 0 <= ours < len(GRID), f"{method} {name} {target} is outside of the grid"
        paper = min(range(len(GRID)), key=lambda i: abs(GRID[i] - value))
        exact = _FINE_GRID[needed_bandwidth(seconds, exchange, target, _FINE_GRID)]
        low = paper - (assumed.reading == "reaching")
        miss = max(GRID[low] / exact, exact / GRID[low + 1], 1.0) - 1
        yield Cell(method, name, target, value, paper, ours, miss)
