"""What the user trains, and the five methods that are compared for it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from commfree_planner.bytes_sent import (
    GRADIENT_DTYPES,
    WIRE_DTYPES,
    all_reduce_bytes,
    exchange_bytes,
    payload_bytes,
)
from commfree_planner.dag import Exchange, utilization
from commfree_planner.model import Model, build_exchange
from commfree_planner.search import log_grid, needed_bandwidth

GBIT_GRID = log_grid(1e-6, 1e6, 1201)  # 100 a decade: 2.3 % from one to the next
_EAGER = " Eager updates hide a whole cycle: plan them as overlap_steps=sync_every-1."


class Method(NamedTuple):
    """A way to train, and what it sends."""

    name: str
    setting: str
    exchange: Exchange


@dataclass(frozen=True)
class Training:
    """A training run, as far as its communication goes.

    Args:
        model: parameters by block.
        step_seconds: an inner step that waits for nobody, in seconds.
        num_replicas: M.
        sync_every: H, inner steps between two syncs of a fragment.
        num_fragments: P; None takes 3 blocks per fragment and one fragment for the rest.
        overlap_steps: tau, inner steps from launch to landing.
        wire_dtype: of the outer gradients.
        gradient_dtype: of data parallelism's gradients; DDP's is that of the parameters.

    Raises:
        ValueError: a value outside its range.
        TypeError: a value that is no number.
    """

    model: Model
    step_seconds: float
    num_replicas: int = 2
    sync_every: int = 100
    num_fragments: int | None = None
    overlap_steps: int = 1
    wire_dtype: str = "fp4"
    gradient_dtype: str = "fp32"

    def __post_init__(self) -> None:
        self._check_kinds()
        if not (self.step_seconds > 0 and math.isfinite(self.step_seconds)):
            raise ValueError(
                f"`step_time={self.step_seconds}` must be a positive number of seconds: what an"
                " optimizer step takes where nothing is sent. Measure it with one replica."
            )
        for name in ("num_replicas", "sync_every"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"`{name}={getattr(self, name)}` must be at least 1. Give a whole number."
                )
        if not 0 <= self.overlap_steps < self.sync_every:
            raise ValueError(
                f"`overlap_steps={self.overlap_steps}` must be at least 0 and below"
                f" `sync_every={self.sync_every}`: a fragment has to land before it leaves again."
                " Lower `overlap_steps` or raise `sync_every`."
            )
        for name, legal in (("wire_dtype", WIRE_DTYPES), ("gradient_dtype", GRADIENT_DTYPES)):
            if getattr(self, name) not in legal:
                raise ValueError(
                    f"`{name}={getattr(self, name)!r}` is unknown. Choose one of"
                    f" {', '.join(map(repr, legal))}."
                )
        self.model.fragments(self.fragment_count)  # refuses what the model is too small for

    @property
    def fragment_count(self) -> int:
        """P, the user's or the model's default."""
        given = self.num_fragments
        return self.model.default_num_fragments if given is None else given

    def utilization(self, exchange: Exchange, gbit_per_s: float) -> float:
        """Return the utilization at a bandwidth; see `dag.utilization`."""
        return utilization(self.model.layer_seconds(self.step_seconds), exchange, gbit_per_s)

    def needed_gbit_per_s(self, exchange: Exchange, target: float) -> float:
        """Return the bandwidth that reaches a utilization, rounded up by at most 2.3 %.

        Returns:
            Gbit/s; 0 where nothing is sent, infinity beyond 10^6.

        Raises:
            ValueError: the target is outside (0, 1).
        """
        seconds = self.model.layer_seconds(self.step_seconds)
        i = needed_bandwidth(seconds, exchange, target, GBIT_GRID)
        if exchange.bytes_per_cycle == 0:
            return 0.0
        return GBIT_GRID[i] if i < len(GBIT_GRID) else math.inf

    def diloco(self, num_fragments: int, overlap_steps: int, wire_dtype: str) -> Exchange:
        """Return what `StreamingDiLoCoStrategy` sends with this setting and the training's H."""
        return build_exchange(
            self.model,
            partial(self._outer_bytes, wire_dtype),
            sync_every=self.sync_every,
            num_fragments=num_fragments,
            overlap_steps=overlap_steps,
            by_layer=False,
        )

    def data_parallel(self) -> Exchange:
        """Return what DDP sends between replicas, by a ring of one rank of each.

        Where a replica has several ranks, that is an all-reduce that adds within replicas first; a
        flat ring of all ranks sends up to twice as much between two of them.
        """
        return build_exchange(self.model, self._gradient_bytes, by_layer=True)

    def _outer_bytes(self, wire_dtype: str, numel: int) -> float:
        return exchange_bytes(payload_bytes(numel, wire_dtype), self.num_replicas)

    def _gradient_bytes(self, numel: int) -> float:
        return all_reduce_bytes(payload_bytes(numel, self.gradient_dtype), self.num_replicas)

    def _check_kinds(self) -> None:
        whole = ("num_replicas", "sync_every", "overlap_steps", "num_fragments")
        for name in ("step_seconds", *whole):
            value = getattr(self, name)
            kind = int if name in whole else int | float
            if value is None and name == "num_fragments":
                continue
            if not isinstance(value, kind) or isinstance(value, bool):
                raise TypeError(
                    f"`{'step_time' if name == 'step_seconds' else name}={value!r}` must be a"
                    f" {'whole ' if name in whole else ''}number, but it is a"
                    f" {type(value).__name__}."
                    f"{_EAGER if value == 'eager' else ''}"
                )


def methods(training: Training) -> list[Method]:
    """Return the methods in the paper's order; each one sends less, or less at a time.

    Data parallelism with the training's `gradient_dtype`; DiLoCo, one fragment that blocks, in
    fp32; the same in P fragments; with overlap; with the training's `wire_dtype`.
    """
    count, tau, wire = training.fragment_count, training.overlap_steps, training.wire_dtype
    return [
        Method("data parallel", f"every step, {training.gradient_dtype}", training.data_parallel()),
        Method("DiLoCo", "P=1, tau=0, fp32", training.diloco(1, 0, "fp32")),
        Method("streaming", f"P={count}, tau=0, fp32", training.diloco(count, 0, "fp32")),
        Method("+ overlap", f"P={count}, tau={tau}, fp32", training.diloco(count, tau, "fp32")),
        Method(f"+ {wire}", f"P={count}, tau={tau}, {wire}", training.diloco(count, tau, wire)),
    ]
