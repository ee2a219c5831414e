"""What the user trains, and what it takes at a bandwidth."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from commfree_planner.bytes_sent import (
    GRADIENT_DTYPES,
    WIRE_DTYPES,
    all_reduce_bytes,
    all_reduce_rounds,
    exchange_bytes,
    exchange_rounds,
    payload_bytes,
)
from commfree_planner.dag import Exchange, utilization
from commfree_planner.layer_sums import LayerSums
from commfree_planner.model import Model, build_exchange
from commfree_planner.search import log_grid, needed_bandwidth

GBIT_GRID = log_grid(1e-6, 1e6, 1201)  # 100 a decade: 2.3 % from one to the next
_GIVEN_AS = {"step_seconds": "step_time", "latency_s": "latency"}  # to commands


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
        gradient_dtype: of data parallelism's gradients; DDP's is that of the parameters, and the
            activations' is taken to be it.
        latency_s: of the link, one way, in seconds.
        tokens_per_step: that a replica trains on in a step; None: nobody said, and then there is no
            row for tensor parallelism.

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
    latency_s: float = 0.0
    tokens_per_step: int | None = None

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
        if not 0 <= self.latency_s < math.inf:
            raise ValueError(
                f"`latency={self.latency_s}` must be a number of seconds from 0 on, one way: half"
                " of what ping says. Give, for example, 0.02 between regions."
            )
        if self.tokens_per_step is not None and self.tokens_per_step < 1:
            raise ValueError(
                f"`tokens_per_step={self.tokens_per_step}` must be at least 1: what a replica"
                " trains on in a step. Leave it out for no row of tensor parallelism."
            )
        self.model.fragments(self.fragment_count)  # refuses what the model is too small for

    @property
    def fragment_count(self) -> int:
        """P, the user's or the model's default."""
        given = self.num_fragments
        return self.model.default_num_fragments if given is None else given

    def utilization(self, exchange: Exchange | LayerSums, gbit_per_s: float) -> float:
        """Return the utilization at a bandwidth; see `dag.utilization`."""
        seconds = self.model.layer_seconds(self.step_seconds)
        return utilization(seconds, exchange, gbit_per_s, self.latency_s)

    def needed_gbit_per_s(self, exchange: Exchange | LayerSums, target: float) -> float:
        """Return the bandwidth that reaches a utilization, rounded up by at most 2.3 %.

        Returns:
            Gbit/s; 0 where nothing is sent, infinity beyond 10^6: latency alone may be too much.

        Raises:
            ValueError: the target is outside (0, 1).
        """
        seconds = self.model.layer_seconds(self.step_seconds)
        i = needed_bandwidth(seconds, exchange, target, GBIT_GRID, self.latency_s)
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
            rounds=exchange_rounds(self.num_replicas),
        )

    def data_parallel(self, dtype: str | None = None) -> Exchange:
        """Return what DDP sends between replicas, by a ring of one rank of each.

        Args:
            dtype: of what is sent, as by a hook; None: that of the gradients.

        Where a replica has several ranks, that is an all-reduce that adds within replicas first; a
        flat ring of all ranks sends up to twice as much between two of them.
        """
        sent = partial(self._gradient_bytes, dtype or self.gradient_dtype)
        rounds = all_reduce_rounds(self.num_replicas)
        return build_exchange(self.model, sent, by_layer=True, rounds=rounds)

    def _outer_bytes(self, wire_dtype: str, numel: int) -> float:
        return exchange_bytes(payload_bytes(numel, wire_dtype), self.num_replicas)

    def _gradient_bytes(self, dtype: str, numel: int) -> float:
        return all_reduce_bytes(payload_bytes(numel, dtype), self.num_replicas)

    def _check_kinds(self) -> None:
        optional = ("num_fragments", "tokens_per_step")
        whole = ("num_replicas", "sync_every", "overlap_steps", *optional)
        for name in ("step_seconds", "latency_s", *whole):
            value = getattr(self, name)
            kind = int if name in whole else int | float
            if value is None and name in optional:
                continue
            if not isinstance(value, kind) or isinstance(value, bool):
                raise TypeError(
                    f"`{_GIVEN_AS.get(name, name)}={value!r}` must be a"
                    f" {'whole ' if name in whole else ''}number, but it is a"
                    f" {type(value).__name__}."
                )
