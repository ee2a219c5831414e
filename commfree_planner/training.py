"""A training run, and the messages and bandwidth that it needs."""

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
    exchange_phases,
    exchange_rounds,
    payload_bytes,
)
from commfree_planner.layer_sums import LayerSums
from commfree_planner.model import Model, build_exchange
from commfree_planner.simulation import Exchange, log_grid, needed_bandwidth, utilization

GBIT_GRID = log_grid(1e-6, 1e6, 1201)  # 100 points per decade, 2.3 % apart
# of commands
_OPTION_NAMES = {
    "step_seconds": "step_time",
    "latency_s": "latency",
    "sync_seconds": "sync_time",
}


@dataclass(frozen=True)
class Training:
    """The properties of a training run that determine its communication.

    Args:
        model: parameters by block.
        step_seconds: seconds of an inner step without waiting.
        num_replicas: M.
        sync_every: H, inner steps between two syncs of a fragment.
        num_fragments: P; None takes the model's default.
        overlap_steps: tau, inner steps from launch to landing.
        wire_dtype: of the outer gradients.
        gradient_dtype: of gradients in data parallelism; also assumed for activations.
        latency_s: of the link, one way, in seconds.
        loss: share of the packets that the link loses (`tcp`).
        bbr: whether TCP's congestion control is BBR instead of CUBIC, Linux's default.
        sync_seconds: time per cycle of Streaming DiLoCo in which a replica neither computes nor
            waits for the link: it encodes, decodes and steps the outer optimizer. Measure it on a
            fast link.
        tokens_per_step: of a replica; None: unknown, which leaves out tensor parallelism.

    Raises:
        ValueError: a value is out of range.
        TypeError: a value is not a number.
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
    loss: float = 0.0
    bbr: bool = False
    sync_seconds: float = 0.0
    tokens_per_step: int | None = None

    def __post_init__(self) -> None:
        self._check_types()
        if not (self.step_seconds > 0 and math.isfinite(self.step_seconds)):
            raise ValueError(
                f"`step_time={self.step_seconds}` must be a positive number of seconds: the"
                " duration of an optimizer step without communication. Measure it with one replica."
            )
        for name in ("num_replicas", "sync_every"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"`{name}={getattr(self, name)}` must be at least 1. Pass an integer."
                )
        if not 0 <= self.overlap_steps < self.sync_every:
            raise ValueError(
                f"`overlap_steps={self.overlap_steps}` must be at least 0 and below"
                f" `sync_every={self.sync_every}`: a fragment must land before it leaves again."
                " Lower `overlap_steps` or raise `sync_every`."
            )
        for name, legal in (("wire_dtype", WIRE_DTYPES), ("gradient_dtype", GRADIENT_DTYPES)):
            if getattr(self, name) not in legal:
                raise ValueError(
                    f"`{name}={getattr(self, name)!r}` is not valid. Choose one of"
                    f" {', '.join(map(repr, legal))}."
                )
        self._check_link()
        if self.tokens_per_step is not None and self.tokens_per_step < 1:
            raise ValueError(
                f"`tokens_per_step={self.tokens_per_step}` must be at least 1: the tokens of a"
                " replica in a step. Omit it to leave out tensor parallelism."
            )
        self.model.fragments(self.fragment_count)  # raises if the model has too few blocks

    @property
    def fragment_count(self) -> int:
        """P: the user's value or the model's default."""
        given = self.num_fragments
        return self.model.default_num_fragments if given is None else given

    def utilization(self, exchange: Exchange | LayerSums, gbit_per_s: float) -> float:
        """Return the utilization at a bandwidth; see `simulation.utilization`."""
        seconds = self.model.layer_seconds(self.step_seconds)
        return utilization(seconds, exchange, gbit_per_s, self.latency_s, self.loss, self.bbr)

    def needed_gbit_per_s(self, exchange: Exchange | LayerSums, target: float) -> float:
        """Return the bandwidth that reaches a utilization, rounded up by at most 2.3 %.

        Returns:
            Gbit/s; 0 if nothing is sent, infinity above 10^6, for example due to latency.

        Raises:
            ValueError: the target is outside (0, 1).
        """
        seconds = self.model.layer_seconds(self.step_seconds)
        i = needed_bandwidth(
            seconds, exchange, target, GBIT_GRID, self.latency_s, self.loss, self.bbr
        )
        if exchange.bytes_per_cycle == 0:
            return 0.0
        return GBIT_GRID[i] if i < len(GBIT_GRID) else math.inf

    def diloco(self, num_fragments: int, overlap_steps: int, wire_dtype: str) -> Exchange:
        """Return the messages of Streaming DiLoCo with this setting and the training's H."""
        return build_exchange(
            self.model,
            partial(self._outer_bytes, wire_dtype),
            sync_every=self.sync_every,
            num_fragments=num_fragments,
            overlap_steps=overlap_steps,
            by_layer=False,
            rounds=exchange_rounds(self.num_replicas),
            connections=max(self.num_replicas - 1, 1),
            phases=exchange_phases(self.num_replicas),
            sync_seconds=self.sync_seconds if self.num_replicas > 1 else 0.0,
        )

    def data_parallel(self, dtype: str | None = None) -> Exchange:
        """Return the messages of DDP between replicas, in a ring of one rank per replica.

        Args:
            dtype: of the messages, for a communication hook; None: that of the gradients.

        If a replica has several ranks, this is an all-reduce that adds within replicas first; a
        flat ring of all ranks sends up to twice as much between two replicas.
        """
        sent = partial(self._gradient_bytes, dtype or self.gradient_dtype)
        rounds = all_reduce_rounds(self.num_replicas)
        return build_exchange(self.model, sent, by_layer=True, rounds=rounds)

    def _outer_bytes(self, wire_dtype: str, numel: int) -> float:
        """Return the bytes that a replica sends to exchange `numel` outer gradients."""
        sent = payload_bytes(numel, wire_dtype)
        return exchange_bytes(sent, self.num_replicas)

    def _gradient_bytes(self, dtype: str, numel: int) -> float:
        """Return the bytes that a replica sends to all-reduce `numel` gradients."""
        return all_reduce_bytes(payload_bytes(numel, dtype), self.num_replicas)

    def _check_link(self) -> None:
        """Raise a ValueError unless latency, loss and sync time are in range."""
        if not 0 <= self.latency_s < math.inf:
            raise ValueError(
                f"`latency={self.latency_s}` must be a number of seconds of at least 0, one way:"
                " half of the time shown by ping. Pass, for example, 0.02 between regions."
            )
        if not 0 <= self.loss < 0.5:
            raise ValueError(
                f"`loss={self.loss}` must be a share of packets, at least 0 and below 0.5: 0.001"
                " for one packet in a thousand."
            )
        if not 0 <= self.sync_seconds < math.inf:
            raise ValueError(
                f"`sync_time={self.sync_seconds}` must be a number of seconds of at least 0: the"
                " time of a cycle that a fast link leaves beside the steps."
            )

    def _check_types(self) -> None:
        optional = ("num_fragments", "tokens_per_step")
        whole = ("num_replicas", "sync_every", "overlap_steps", *optional)
        for name in ("step_seconds", "latency_s", "loss", "sync_seconds", *whole):
            value = getattr(self, name)
            kind = int if name in whole else int | float
            if value is None and name in optional:
                continue
            if not isinstance(value, kind) or isinstance(value, bool):
                raise TypeError(
                    f"`{_OPTION_NAMES.get(name, name)}={value!r}` must be"
                    f" {'an integer' if name in whole else 'a number'}, but it is a"
                    f" {type(value).__name__}."
                )
