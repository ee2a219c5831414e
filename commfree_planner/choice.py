"""Recommend a strategy for a bandwidth, with reasons."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from commfree_planner.advice import Advice
from commfree_planner.methods import BF16, DATA_PARALLEL, DOMINO, LION, POWER_SGD, methods
from commfree_planner.pace import auto_line, plan_auto
from commfree_planner.training import Training

STREAMING = "streaming_diloco"


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
    DiLoCo: with its default, `sync_every="auto"`, unless the user has fixed H or tau. If none
    reaches the target, it returns Streaming DiLoCo or Distributed Lion, whichever has the higher
    utilization.

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
    found = _streaming(training, gbit_per_s, advice)
    if found.utilization < target and reached[LION] > found.utilization:
        found = Choice("distributed_lion", "", reached[LION], ())
    reasons = _reasons(reached, found.strategy, found.utilization, target)
    return replace(found, reasons=(*found.reasons, *reasons))


def alternatives(
    training: Training, gbit_per_s: float, target: float, choice: Choice, advice: Advice
) -> list[str]:
    """Return the settings of Streaming DiLoCo that `choice` does not name, as lines of text."""
    lines = advice.lines(target)
    if choice.strategy != STREAMING:
        return [auto_line(training, gbit_per_s), *lines]
    return [*lines, auto_line(training, gbit_per_s)] if advice.fixed else lines


def _streaming(training: Training, gbit_per_s: float, advice: Advice) -> Choice:
    """Return Streaming DiLoCo with what the user has fixed; by default, with "auto"."""
    wire = training.wire_dtype
    if advice.fixed:
        setting = (
            f"sync_every={advice.sync_every}, num_fragments={advice.num_fragments},"
            f" overlap_steps={advice.overlap_steps}, wire_dtype={wire!r}"
        )
        return Choice(STREAMING, setting, advice.utilization, ())
    auto, count = plan_auto(training, gbit_per_s), training.num_fragments
    setting = 'sync_every="auto"'
    setting += "" if count is None else f", num_fragments={count}"
    setting += "" if wire == Training.wire_dtype else f", wire_dtype={wire!r}"
    reason = (
        f'"auto" is the default. It exchanges every {auto.sync_every} steps on this link, with'
        f" overlap_steps={auto.overlap_steps}."
    )
    return Choice(STREAMING, setting, auto.utilization, (reason,))


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
