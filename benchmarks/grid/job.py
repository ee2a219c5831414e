"""Job of one node of `benchmarks.grid`: the rows of a cell, one after the other.

A step waits for 26.1 ms instead of computing; then it trains the 256 weights of the last norm, so
that there is an optimizer step to follow. The other 30.8 million parameters have no gradients, but
are exchanged like all parameters. A window is a number of whole cycles: for DiLoCo its first launch
follows its first step, so that nothing is in flight at its end.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM
from typing_extensions import override

from benchmarks.bandwidth.torchft_job import LIGHTHOUSE_PORT, new_manager
from benchmarks.common.fits import quiet_trainer
from benchmarks.grid.cells import (
    BLOCKS,
    HEADS,
    INNER,
    NODES,
    OVERLAP,
    PRIORITY,
    STEP_S,
    SYNC_EVERY,
    VOCABULARY,
    WIDTH,
)
from benchmarks.lab import raise_priority
from lightning_commfree import StreamingDiLoCoStrategy

WARM_UP = 2  # steps
TIMEOUT = timedelta(minutes=20)  # of a collective


@dataclass(frozen=True)
class Measured:
    """One row in one cell, as measured by one node.

    Attributes:
        row: name of the row.
        cycles: number of cycles in the window.
        seconds: duration of the window.
        own_s: seconds of the window in which the strategy blocked training, including waiting;
            0 without one.
        waited_s: seconds of `own_s` in which it waited for other nodes.
        sent_bytes: bytes sent by this node, counted by the ledger; 0 without one.
    """

    row: str
    cycles: int
    seconds: float
    own_s: float = 0.0
    waited_s: float = 0.0
    sent_bytes: int = 0


def llama() -> LlamaForCausalLM:
    """Return the model, with random weights that are the same at every call."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=BLOCKS,
        num_attention_heads=HEADS,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def loss_of(model: LlamaForCausalLM) -> Tensor:
    """Wait as long as a step computes; return a loss with gradients of 256 parameters."""
    time.sleep(STEP_S)
    return model.model.norm.weight.sum()


class Waiting(pl.LightningModule):
    """The model, whose steps wait."""

    def __init__(self) -> None:
        super().__init__()
        self.model = llama()

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return loss_of(self.model)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


class Cycles(pl.Callback):
    """Measure whole cycles of a fit.

    Args:
        row: name of the row.
        cycles: number of cycles.
        warm: whether every fragment is exchanged once before the window.
    """

    def __init__(self, row: str, cycles: int, warm: bool) -> None:
        self._row, self._cycles, self._warm = row, cycles, warm
        self._last = WARM_UP + cycles * SYNC_EVERY
        self._own_s = self._start = 0.0
        self._before: tuple[int, float] = (0, 0.0)
        self.measured: Measured | None = None

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if isinstance(trainer.strategy, StreamingDiLoCoStrategy):
            running = trainer.strategy.algorithm
            if self._warm:
                running.finish()  # all replicas are equal, so no weight changes
            running.step = SYNC_EVERY - 1 - WARM_UP
            running.after_step = self._timed(running.after_step)
            # no exchange follows the window: neither a launch nor the mean at the end of a fit
            running.finish = lambda stop=False: False

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if trainer.global_step == WARM_UP:
            dist.barrier()
            self._own_s, self._before = 0.0, _counted(trainer.strategy)
            self._start = time.perf_counter()
        elif trainer.global_step == self._last:
            seconds = time.perf_counter() - self._start
            sent, waited_s = _counted(trainer.strategy)
            self.measured = Measured(
                self._row,
                self._cycles,
                seconds,
                self._own_s,
                waited_s - self._before[1],
                sent - self._before[0],
            )

    def _timed(self, work: Callable[[], None]) -> Callable[[], None]:
        def timed() -> None:
            if self.measured is not None:
                return
            start = time.perf_counter()
            try:
                work()
            finally:
                self._own_s += time.perf_counter() - start

        return timed


def _counted(strategy: Strategy) -> tuple[int, float]:
    """Return the bytes that this node has sent, and the seconds it has waited."""
    if not isinstance(strategy, StreamingDiLoCoStrategy):
        return 0, 0.0
    totals = strategy.ledger.totals()
    return totals.bytes_sent, totals.seconds_waited


def fit(row: str, cycles: int, warm: bool) -> Measured:
    """Measure a row that a Trainer runs."""
    plain = {"num_fragments": 1, "overlap_steps": 0, "wire_dtype": "fp32"}
    settings: dict[str, Any] = {"overlap_steps": OVERLAP} if row == "ours" else plain
    strategy: Strategy = (
        SingleDeviceStrategy(device="cpu")
        if row == "none"
        else StreamingDiLoCoStrategy(SYNC_EVERY, timeout=TIMEOUT, **settings)
    )
    callback = Cycles(row, cycles, warm)
    # one more step: the end of a fit has collectives
    steps = WARM_UP + cycles * SYNC_EVERY + 1
    trainer = quiet_trainer(strategy, 1 if row == "none" else NODES, steps, [callback])
    trainer.fit(Waiting(), DataLoader(range(NODES * steps), batch_size=1))  # type: ignore[arg-type]
    assert callback.measured is not None, "the fit has completed the window"
    return callback.measured


def loop(row: str, cycles: int, warm: bool) -> Measured:
    """Measure torchft's DiLoCo with one fragment, or its loop without it.

    Raises:
        RuntimeError: torchft has skipped a sync.
    """
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def train(steps: int) -> float:
        start = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
        return time.perf_counter() - start

    if row == "loop":
        dist.barrier()
        return Measured(row, cycles, train(cycles * SYNC_EVERY))

    from torchft.local_sgd import DiLoCo  # type: ignore[import-not-found,import-untyped,unused-ignore]

    outer = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9, nesterov=True)
    rank = int(os.environ["RANK"])
    manager = new_manager(rank, model, optimizer, NODES, TIMEOUT)
    with DiLoCo(manager, [model], optimizer, [outer], SYNC_EVERY) as diloco:
        if warm:
            diloco._local_step = SYNC_EVERY - 1
            train(1)  # the first sync connects the replicas
        else:
            manager.start_quorum()
            manager.allreduce(torch.ones(1)).wait()
            manager.should_commit()
        before = manager.current_step()
        dist.barrier()
        seconds = train(cycles * SYNC_EVERY)
    if manager.current_step() - before != cycles:
        raise RuntimeError(
            f"torchft committed {manager.current_step() - before} syncs instead of {cycles}"
        )
    return Measured(row, cycles, seconds)


def main() -> None:
    """Measure the plan in the first argument; append one JSON line per row to the second's file."""
    plan, path = json.loads(sys.argv[1]), Path(sys.argv[2])
    raise_priority(int(os.environ.get(PRIORITY, "0")))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    if os.environ["RANK"] == "0" and "torchft" in {row for row, _, _ in plan}:
        from torchft.coordination import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
            LighthouseServer,
        )

        bind = f"0.0.0.0:{LIGHTHOUSE_PORT}"
        lighthouse = LighthouseServer(bind=bind, min_replicas=NODES, join_timeout_ms=60_000)
        print(f"lighthouse at {lighthouse.address()}")
    with path.open("a") as file:
        for row, cycles, warm in plan:
            measured = (loop if row in ("loop", "torchft") else fit)(row, cycles, warm)
            gc.collect()  # a fit leaves cycles that hold a gigabyte
            file.write(json.dumps(asdict(measured)) + "\n")
            file.flush()
    dist.barrier()
    time.sleep(2)  # a peer may still be waiting for an answer of the lighthouse
    sys.stdout.flush()
    os._exit(0)  # torchft's threads outlive the interpreter's shutdown


if __name__ == "__main__":
    main()
