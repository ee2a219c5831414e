"""Job of one node of the bandwidth benchmarks: all rows in one process, taking turns.

Every row trains the same GPT-2 on the same random tokens, first `WARM_UP` steps and then the
window, in legs of a few steps between which the other rows have theirs. One more step follows the
window, so that the work at the end of a fit is outside of it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2LMHeadModel
from typing_extensions import override

from benchmarks.bandwidth.figures import ACCUMULATED
from benchmarks.bandwidth.window import WARM_UP, Stopwatch, Window
from benchmarks.common.fits import Module, Tokens, gpt2, loader, quiet_trainer
from benchmarks.common.relay import Relay, Run
from lightning_commfree import DistributedLion, DistributedLionStrategy, StreamingDiLoCoStrategy


class Workload(NamedTuple):
    """A random GPT-2, and the batch of a rank: `batch` sequences of `tokens` tokens."""

    batch: int
    tokens: int
    vocabulary: int
    layers: int
    width: int

    def model(self) -> GPT2LMHeadModel:
        """Return the model."""
        return gpt2(self.vocabulary, self.tokens, layers=self.layers, width=self.width)


WORKLOADS = {
    "5.8M": Workload(4, 128, 4096, 6, 256),
    "0.19M": Workload(16, 64, 512, 3, 64),  # the size ladder's 0.2M, with two replicas
}


class HookedDDP(DDPStrategy):
    """DDP with a communication hook on the CPU, where Lightning ignores hooks.

    Args:
        make_hook: returns the hook's state and the hook; called with an initialized process group.
    """

    def __init__(self, make_hook: Callable[[], tuple[Any, Callable[..., Any]]]) -> None:
        super().__init__()
        self._make_hook = make_hook

    @override
    def _register_ddp_hooks(self) -> None:
        assert isinstance(self.model, DistributedDataParallel), "the model is wrapped by DDP"
        state, hook = self._make_hook()
        self.model.register_comm_hook(state, hook)


def powersgd(rank: int, start: int = 2) -> tuple[Any, Callable[..., Any]]:
    """Return the state and hook of PowerSGD with low-rank matrices of this rank.

    Args:
        rank: of the matrices.
        start: steps before it compresses. torch's default is 1000; its warm start needs 2.
    """
    state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=start)
    return state, powerSGD_hook


def _diloco(sync_every: int | str, **settings: Any) -> Callable[[], Strategy]:
    return lambda: StreamingDiLoCoStrategy(sync_every=sync_every, **settings)


def strategies(sync_every: int) -> dict[str, Callable[[], Strategy]]:
    """Return factories for the strategies of the rows that a Trainer runs, in table order."""
    late = {"overlap_steps": min(5, sync_every - 1)}
    mean = partial(torch.optim.SGD, lr=1.0)
    plain = {"num_fragments": 1, "overlap_steps": 0, "wire_dtype": "fp32"}
    return {
        "none": lambda: SingleDeviceStrategy(device="cpu"),
        "ddp": DDPStrategy,
        "ddp_accumulate": DDPStrategy,
        "ddp_bf16": lambda: HookedDDP(lambda: (None, bf16_compress_hook)),
        "ddp_powersgd": lambda: HookedDDP(partial(powersgd, 4)),
        "ddp_powersgd_1": lambda: HookedDDP(partial(powersgd, 1)),
        "ddp_powersgd_1_none": lambda: SingleDeviceStrategy(device="cpu"),
        "ddp_powersgd_none": lambda: SingleDeviceStrategy(device="cpu"),
        "local_sgd": _diloco(10, mix=0.0, outer_optimizer=mean, **plain),
        "diloco": _diloco(sync_every, **plain),
        "streaming": _diloco(sync_every, overlap_steps=0, wire_dtype="fp32"),
        "overlap": _diloco(sync_every, wire_dtype="fp32", **late),
        "overlap_fp4": _diloco(sync_every, wire_dtype="fp4", **late),
        "auto": _diloco("auto"),
    }


def lion_strategies() -> dict[str, Callable[[], Strategy]]:
    """Return the same for the Lion rows of `benchmarks.lion_bandwidth`."""
    return {
        "lion_none": lambda: SingleDeviceStrategy(device="cpu"),
        "lion": DistributedLionStrategy,
        "lion_no_overlap": lambda: DistributedLionStrategy(overlap=False),
        "lion_random": lambda: DistributedLionStrategy(ties="random"),
        "lion_average": lambda: DistributedLionStrategy(vote="average"),
        "lion_zeros": DistributedLionStrategy,
    }


def measure(
    row: str, steps: int, sync_every: int, workload: Workload, pass_on: Callable[[], None]
) -> Window:
    """Run one fit. An error of torch or Lightning before its first step becomes a failed window.

    Before the first step all nodes raise the same error. A later error ends the job, because the
    other nodes may be continuing.
    """
    stopwatch = Stopwatch(row, steps, pass_on)
    strategy = (strategies(sync_every) | lion_strategies())[row]()
    optimizer = DistributedLion if row in lion_strategies() else torch.optim.AdamW
    module = Module(workload.model(), optimizer, zeros=row == "lion_zeros")
    dist.barrier()
    try:
        nodes = 1 if isinstance(strategy, SingleDeviceStrategy) else dist.get_world_size()
        batches = ACCUMULATED if row == "ddp_accumulate" else 1  # of an optimizer step
        steps_in_all = -(-(WARM_UP + steps + 1) // batches)
        trainer = quiet_trainer(strategy, nodes, steps_in_all, [stopwatch])
        trainer.accumulate_grad_batches = batches
        tokens = Tokens(workload.vocabulary, workload.tokens)
        trainer.fit(module, loader(tokens, workload.batch))
    except (RuntimeError, TypeError) as error:  # torch rejects a hook
        if stopwatch.began:
            raise
        return Window(row, steps, error=str(error).splitlines()[0])
    assert stopwatch.window is not None, "the fit has completed the window"
    return stopwatch.window


def _run(row: str, steps: int, sync_every: int, workload: Workload) -> Run[Window]:
    return lambda pass_on: measure(row, steps, sync_every, workload, pass_on)


def main() -> None:
    """Measure the plan in the first argument; append one JSON line per row to the second's file."""
    plan, path = json.loads(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    settings = plan["sync_every"], WORKLOADS[plan["size"]]
    relay = Relay({row: _run(row, steps, *settings) for row, steps in plan["rows"]})
    with path.open("a") as file:
        for _, window in relay.results():
            file.write(json.dumps(asdict(window)) + "\n")
            file.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
