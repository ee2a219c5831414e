"""What a strategy sends: foretold before a run and read off while it runs.

Our strategies foretell and count for themselves. Lightning's DDP does neither; for it both numbers
come from the ledger's formula for the all-reduce of fp32 gradients, and are said to be computed.
"""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch.nn.parallel import DistributedDataParallel

from lightning_commfree.comm.ledger import Ledger, ring_all_reduce_bytes
from lightning_commfree.strategies import DominoTPStrategy, ReplicatedStrategy, Traffic


class TrafficMeter:
    """What one rank of a fit will send and has sent. Make it in `on_fit_start` or later.

    Args:
        trainer: in its fit.
        tokens_per_batch: that a model sees in a batch; with tensor parallelism several ranks share
            one.

    Attributes:
        plan: what this rank will send.
        ledger: what it has sent; None for a strategy that does not count.

    Raises:
        TypeError: nobody knows what the strategy sends.
    """

    def __init__(self, trainer: pl.Trainer, tokens_per_batch: int) -> None:
        strategy = trainer.strategy
        self.ledger: Ledger | None
        self.plan: Traffic
        if isinstance(strategy, ReplicatedStrategy):
            self.plan, self.ledger = strategy.traffic(), strategy.ledger
        elif isinstance(strategy, DominoTPStrategy):
            batches = trainer.accumulate_grad_batches
            self.plan = strategy.traffic(batches * tokens_per_batch)
            self.ledger = strategy.ledger
        else:
            self.plan, self.ledger = _ddp_traffic(trainer), None
        self._ddp = _wrapped(strategy)

    def bytes_sent(self, steps: int) -> int:
        """Return the bytes that this rank has sent: counted, or computed for `steps` of DDP."""
        if self.ledger is not None:
            return self.ledger.bytes_sent
        return steps * self.plan.bytes_per_cycle

    def seconds_waited(self) -> float | None:
        """Return the seconds that this rank has waited for others; None where nobody counts.

        Lightning's DDP is wrapped by torch's, which measures the time of its all-reduces and how
        much of it backward still computes: the rest is waited for. On CUDA, where measuring stops
        the stream, it does so in the first 10 steps and in every 100th.
        """
        if self.ledger is not None:
            return self.ledger.seconds_waited
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
