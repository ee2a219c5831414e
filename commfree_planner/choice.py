"""Recommend a strategy for a bandwidth, with reasons."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from commfree_planner.advice import Advice
from commfree_planner.methods import BF16, DATA_PARALLEL, DOMINO, LION, POWER_SGD, methods
from commfree_planner.training import Training


@dataclass(frozen=True)
class Choice:
    """A strategy, with reasons.

    Attributes:
        strategy: value for `Trainer(strategy=...)`.
        setting: its arguments as text; empty for defaults.
        utilization: of this setting.
        reasons: complete sentences.
    """

    strategy: str
    setting: str
    utilization: float
    reasons: tuple[str, ...]


def choose(training: Training, gbit_per_s: float, target: float, advice: Advice) -> Choice:
    """Return the strategy that changes training least and reaches the target.

    It prefers plain data parallelism, then data parallelism with bf16 gradients, then Streaming
    DiLoCo. If none reaches the target, it returns Streaming DiLoCo or Distributed Lion, whichever
    has the higher utilization.

    Args:
        training: the run.
        gbit_per_s: bandwidth of a replica, in Gbit/s.
        target: utilization to reach, in (0, 1).
        advice: result of `advise` for the same arguments.
    """
    reached = {m.name: training.utilization(m.exchange, gbit_per_s) for m in methods(training)}
    if training.num_replicas == 1:
        return Choice("ddp", "", 1.0, ("One replica exchanges nothing.",))
    if reached[DATA_PARALLEL] >= target:
        reason = (
            f"Data parallelism computes for {reached[DATA_PARALLEL]:.1%} of the time at this"
            " bandwidth: other strategies gain nothing."
        )
        return Choice("ddp", "", reached[DATA_PARALLEL], (reason,))
    if reached.get(BF16, 0.0) >= target:
        reason = (
            f"Data parallelism computes for {reached[DATA_PARALLEL]:.1%} of the time, and with"
            f" gradients rounded to bf16 for {reached[BF16]:.1%}, which reaches the target."
        )
        return Choice("ddp", "ddp_comm_hook=bf16_compress_hook", reached[BF16], (reason,))
    setting = (
        f"sync_every={advice.sync_every}, num_fragments={advice.num_fragments},"
        f" overlap_steps={advice.overlap_steps}, wire_dtype={training.wire_dtype!r}"
    )
    if advice.utilization < target and reached[LION] > advice.utilization:
        setting, best, name = "", reached[LION], "distributed_lion"
    else:
        best, name = advice.utilization, "streaming_diloco"
    return Choice(name, setting, best, tuple(_reasons(reached, name, best, target)))


def _reasons(reached: dict[str, float], name: str, best: float, target: float) -> Iterator[str]:
    yield (
        f"Data parallelism computes for {reached[DATA_PARALLEL]:.1%} of the time and waits for the"
        f" rest; this strategy computes for {best:.1%}."
    )
    if name != "distributed_lion":
        yield (
            "Use distributed_lion if weights must be equal after every step, or if there is no"
            f" memory for a global copy: {reached[LION]:.1%}; it needs its own learning rate."
        )
    if reached[POWER_SGD] >= target:
        yield (
            f"DDP with torch's PowerSGD hook computes for {reached[POWER_SGD]:.1%}, not including"
            " the time of compression; its gradients are approximations."
        )
    if DOMINO in reached:
        fast = (
            "" if reached[DOMINO] >= target else "; its ranks need faster links, as within a node"
        )
        yield (
            "Use domino_tp between these ranks if the model does not fit on one device: at most"
            f" {reached[DOMINO]:.1%}{fast}."
        )
