"""The traffic of a strategy: predicted before a run and measured during it.

*Bytes per step* are those of training steps, averaged over a cycle. Bytes sent before the first
step, in validations and at the end (checkpoints, a last exchange) are reported separately and never
included; comparisons with fp32 DDP compare steps with steps.

The strategies of this project predict and count their traffic. Lightning's DDP does neither; its
figures come from the ledger's formulas for the all-reduce of fp32 gradients and for the initial
broadcast of weights and buffers, and are marked as computed.
"""

from __future__ import annotations

from collections.abc import Mapping

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_commfree.comm.ledger import (
    PHASES,
    START,
    STEPS,
    Ledger,
    broadcast_bytes,
    ring_all_reduce_bytes,
)
from lightning_commfree.comm.text import human_bytes
from lightning_commfree.strategies import DominoTPStrategy, ReplicaStrategy, Traffic


class TrafficMeter:
    """The predicted and measured traffic of one rank. Create it in `on_fit_start` or later.

    Args:
        trainer: in its fit.
        tokens_per_batch: of one model replica; with tensor parallelism several ranks share one.
        ddp_start_bytes: as below, of the whole model, which a strategy may have sharded.

    Attributes:
        plan: predicted traffic of training steps.
        ledger: measured traffic; None for a strategy that does not count.
        ddp_start_bytes: sent by DDP before the first step, to broadcast weights and buffers.

    Raises:
        TypeError: the traffic of the strategy is unknown.
    """

    def __init__(self, trainer: pl.Trainer, tokens_per_batch: int, ddp_start_bytes: int) -> None:
        strategy = trainer.strategy
        self.ledger: Ledger | None
        self.plan: Traffic
        self.ddp_start_bytes = ddp_start_bytes
        self._trainer = trainer
        if isinstance(strategy, DominoTPStrategy):  # its traffic depends on the batch
            batches = trainer.accumulate_grad_batches
            self.plan = strategy.traffic(batches * tokens_per_batch)
            self.ledger = strategy.ledger
        elif isinstance(strategy, ReplicaStrategy):
            self.plan, self.ledger = strategy.traffic(), strategy.ledger
        else:
            self.plan, self.ledger = _ddp_traffic(trainer), None
        self._ddp = _wrapped(strategy)

    def bytes_per_step(self) -> float:
        """Return the mean over the last cycle, as logged by the strategy; computed for DDP."""
        strategy = self._trainer.strategy
        if isinstance(strategy, ReplicaStrategy):
            return strategy.figures().get("comm/bytes_per_step", 0.0)
        return self.plan.bytes_per_step

    def bytes_in_steps(self, steps: int) -> int:
        """Return the bytes sent by this rank's training steps; computed for DDP."""
        return sum(self.sent(steps).get(STEPS, {}).values())

    def sent(self, steps: int) -> dict[str, dict[str, int]]:
        """Return the bytes sent by this rank, by phase and tag; computed for DDP."""
        if self.ledger is None:
            in_steps = {tag: round(steps * sent) for tag, sent in self.plan.bytes_by_tag.items()}
            return {START: {"broadcast": self.ddp_start_bytes}, STEPS: in_steps}
        found = self.ledger.bytes_by_phase
        return {phase: dict(found[phase]) for phase in PHASES if phase in found}

    def seconds_waited(self) -> float | None:
        """Return the seconds this rank has waited for communication since its first step.

        None if they are not measured. torch's DDP wrapper measures the time of its all-reduces and
        how much of it overlaps with backward; the rest is waiting. On CUDA, where measuring
        synchronizes the stream, it does so in the first 10 steps and in every 100th.
        """
        if self.ledger is not None:
            return self.ledger.seconds_waited - self.ledger.seconds_by_phase[START]
        return None if self._ddp is None else _ddp_seconds_waited(self._ddp)


def _wrapped(strategy: Strategy) -> DistributedDataParallel | None:
    """Return torch's DDP wrapper, if there is one, set to measure as often as possible."""
    ddp = strategy.model
    if not isinstance(ddp, DistributedDataParallel):
        return None
    if strategy.root_device.type == "cpu":
        ddp._set_ddp_runtime_logging_sample_rate(1)
    return ddp


def _ddp_seconds_waited(ddp: DistributedDataParallel) -> float | None:
    found = ddp._get_ddp_logging_data()  # nanoseconds, averaged over the measured steps
    if "avg_backward_comm_time" not in found:
        return None  # in the first step, and on devices without a timer
    waited = found["avg_backward_comm_time"] - found["avg_backward_compute_comm_overlap_time"]
    return 1e-9 * waited * found["iteration"]


def ddp_start_bytes(module: nn.Module, ranks: int) -> int:
    """Return the mean bytes sent by a rank in DDP's initial broadcast of rank 0's tensors."""
    tensors = (*module.parameters(), *module.buffers())
    return broadcast_bytes(sum(tensor.nbytes for tensor in tensors), ranks)


def by_tag(sent: Mapping[str, float]) -> str:
    """Format as "outer_gradient 1.23 MB, handshake 40 B", largest first, without zeros."""
    largest_first = sorted(sent.items(), key=lambda item: -item[1])
    return ", ".join(f"{tag} {human_bytes(size)}" for tag, size in largest_first if size)


def _ddp_traffic(trainer: pl.Trainer) -> Traffic:
    if not isinstance(trainer.strategy, DDPStrategy | SingleDeviceStrategy):
        raise TypeError(
            f"The recipes do not know what `{type(trainer.strategy).__name__}` sends. Use a"
            " strategy of `lightning_commfree`, or Lightning's `DDPStrategy`."
        )
    trainable = sum(p.numel() for p in trainer.lightning_module.parameters() if p.requires_grad)
    per_step = ring_all_reduce_bytes(4 * trainable, trainer.world_size)
    return Traffic({"gradient": per_step}, 1, float(per_step))
