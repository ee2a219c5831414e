"""Which strategy a run should take at its bandwidth, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from commfree_planner.advice import Advice
from commfree_planner.methods import BF16, DATA_PARALLEL, DOMINO, LION, POWER_SGD, methods
from commfree_planner.training import Training


@dataclass(frozen=True)
class Choice:
    """A strategy, and the reasons in sentences.

    Attributes:
        strategy: what `Trainer(strategy=...)` takes.
        setting: of it, in words; empty: its defaults.
        utilization: that it reaches.
        reasons: complete sentences.
    """

    strategy: str
    setting: str
    utilization: float
    reasons: tuple[str, ...]


def choose(training: Training, gbit_per_s: float, target: float, advice: Advice) -> Choice:
    """Return the strategy that changes training least among those that reach the target.

    In this order: data parallelism as it is; the same with gradients rounded to bf16; Streaming
    DiLoCo. It is also the one where nothing reaches the target, unless another comes nearer.

    Args:
        training: the run.
        gbit_per_s: bandwidth of a replica, in Gbit/s.
        target: utilization to reach, in (0, 1).
        advice: the setting of Streaming DiLoCo, as `advise` returns it for the same.
    """
    reached = {m.name: training.utilization(m.exchange, gbit_per_s) for m in methods(training)}
    if training.num_replicas == 1:
        return Choice("ddp", "", 1.0, ("One replica has nobody to exchange with.",))
    if reached[DATA_PARALLEL] >= target:
        reason = (
            f"Data parallelism computes for {reached[DATA_PARALLEL]:.1%} of the time at this"
            " bandwidth: nothing else has anything to gain."
        )
        return Choice("ddp", "", reached[DATA_PARALLEL], (reason,))
    if reached.get(BF16, 0.0) >= target:
        reason = (
            f"Data parallelism computes for {reached[DATA_PARALLEL]:.1%} of the time, and with"
            f" gradients rounded to bf16 for {reached[BF16]:.1%}: the least change that does."
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
        f"Data parallelism would compute for {reached[DATA_PARALLEL]:.1%} of the time and wait for"
        f" the rest; this computes for {best:.1%}."
    )
    if name != "distributed_lion":
        yield (
            "distributed_lion, if the weights must be equal after every step or there is no memory"
            f" for a global copy: {reached[LION]:.1%}, with a learning rate of its own."
        )
    if reached[POWER_SGD] >= target:
        yield (
            f"DDP with torch's PowerSGD hook would compute for {reached[POWER_SGD]:.1%}, before"
            " what it takes to compress; its gradients are approximations."
        )
    if DOMINO in reached:
        fast = (
            "" if reached[DOMINO] >= target else "; give its ranks faster links, as within a node"
        )
        yield (
            "domino_tp between these ranks, if the model does not fit on one device:"
            f" {reached[DOMINO]:.1%} at most{fast}."
        )
