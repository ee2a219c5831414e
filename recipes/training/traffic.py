"""What a strategy sends: foretold before a run and read off while it runs.

*Bytes per step* are what training steps send, mean over a cycle, wherever they stand. What is sent
before the first step, in validations and at the end (checkpoints, a last exchange) is told beside
them and never added to them; against fp32 DDP steps are set against steps.

Our strategies foretell and count for themselves. Lightning's DDP does neither; for it the numbers
come from the ledger's formulas for the all-reduce of fp32 gradients and for the broadcast of
weights and buffers at the start, and are said to be computed.
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
from lightning_commfree.strategies import DominoTPStrategy, ReplicaStrategy, Traffic


class TrafficMeter:
    """What one rank of a fit will send and has sent. Make it in `on_fit_start` or later.

    Args:
        trainer: in its fit.
        tokens_per_batch: that a model sees in a batch; with tensor parallelism several ranks share
            one.
        ddp_start_bytes: see below; of the whole model, which a strategy may have divided.

    Attributes:
        plan: what this rank will send in training steps.
        ledger: what it has sent; None for a strategy that does not count.
        ddp_start_bytes: what DDP sends before the first step: rank 0's weights and buffers.

    Raises:
        TypeError: nobody knows what the strategy sends.
    """

    def __init__(self, trainer: pl.Trainer, tokens_per_batch: int, ddp_start_bytes: int) -> None:
        strategy = trainer.strategy
        self.ledger: Ledger | None
        self.plan: Traffic
        self.ddp_start_bytes = ddp_start_bytes
        self._trainer = trainer
        if isinstance(strategy, DominoTPStrategy):  # what it sends depends on the batch
            batches = trainer.accumulate_grad_batches
            self.plan = strategy.traffic(batches * tokens_per_batch)
            self.ledger = strategy.ledger
        elif isinstance(strategy, ReplicaStrategy):
            self.plan, self.ledger = strategy.traffic(), strategy.ledger
        else:
            self.plan, self.ledger = _ddp_traffic(trainer), None
        self._ddp = _wrapped(strategy)

    def bytes_per_step(self) -> float:
        """Return the mean over the last cycle, as the strategy logs it; computed for DDP."""
        strategy = self._trainer.strategy
        if isinstance(strategy, ReplicaStrategy):
            return strategy.figures().get("comm/bytes_per_step", 0.0)
        return self.plan.bytes_per_step

    def bytes_in_steps(self, steps: int) -> int:
        """Return what this rank's training steps have sent: counted, or computed for DDP's."""
        return sum(self.sent(steps).get(STEPS, {}).values())

    def sent(self, steps: int) -> dict[str, dict[str, int]]:
        """Return the bytes that this rank has sent, by phase and tag; `steps` are computed."""
        if self.ledger is None:
            in_steps = {tag: round(steps * sent) for tag, sent in self.plan.bytes_by_tag.items()}
            return {START: {"broadcast": self.ddp_start_bytes}, STEPS: in_steps}
        found = self.ledger.bytes_by_phase
        return {phase: dict(found[phase]) for phase in PHASES if phase in found}

    def seconds_waited(self) -> float | None:
        """Return the seconds that this rank has waited for others since its first step.

        None where nobody counts.

        Lightning's DDP is wrapped by torch's, which measures the time of its all-reduces and how
        much of it backward still computes: the rest is waited for. On CUDA, where measuring stops
        the stream, it does so in the first 10 steps and in every 100th.
        """
        if self.ledger is not None:
            return self.ledger.seconds_waited - self.ledger.seconds_by_phase[START]
        return None if self._ddp is None else _ddp_seconds_waited(self._ddp)


def _wrapped(strategy: Strategy) -> DistributedDataParallel | None:
    """Return torch's wrapper, if there is one, after it was told to measure as often as it may."""
    ddp = strategy.model
    if not isinstance(ddp, DistributedDataParallel):
        return None
    if strategy.root_device.type == "cpu":
        ddp._set_ddp_runtime_logging_sample_rate(1)
    return ddp


def _ddp_seconds_waited(ddp: DistributedDataParallel) -> float | None:
    found = ddp._get_ddp_logging_data()  # nanoseconds; means over the steps that were measured
    if "avg_backward_comm_time" not in found:
        return None  # in the first step, and on devices that torch has no timer for
    waited = found["avg_backward_comm_time"] - found["avg_backward_compute_comm_overlap_time"]
    return 1e-9 * waited * found["iteration"]


def ddp_start_bytes(module: nn.Module, ranks: int) -> int:
    """Return what one of several ranks sends, in the mean, while DDP gives all rank 0's tensors."""
    tensors = (*module.parameters(), *module.buffers())
    return broadcast_bytes(sum(tensor.nbytes for tensor in tensors), ranks)


def by_tag(sent: Mapping[str, float]) -> str:
    """Return "outer_gradient 1.23 MB, handshake 40 B", largest first, without what is nothing."""
    largest_first = sorted(sent.items(), key=lambda item: -item[1])
    return ", ".join(f"{tag} {human_bytes(size)}" for tag, size in largest_first if size)


def human_bytes(num_bytes: float) -> str:
    """Return a number of bytes with three digits and a decimal unit: 1.23 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"


def _ddp_traffic(trainer: pl.Trainer) -> Traffic:
    if not isinstance(trainer.strategy, DDPStrategy | SingleDeviceStrategy):
        raise TypeError(
            f"The recipes cannot say what `{type(trainer.strategy).__name__}` sends. Use a"
            " strategy of `lightning_commfree`, or Lightning's `DDPStrategy`."
        )
    trainable = sum(p.numel() for p in trainer.lightning_module.parameters() if p.requires_grad)
    per_step = ring_all_reduce_bytes(4 * trainable, trainer.world_size)
    return Traffic({"gradient": per_step}, 1, float(per_step))
