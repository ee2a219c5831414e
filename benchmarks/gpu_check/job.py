"""One process of a fit: `python -m benchmarks.gpu_check.job PLAN FOLDER`.

Every process is a node of its own (`NODE_RANK`), so several ranks can share one GPU. NCCL refuses
that; gloo does not.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from typing_extensions import override

from benchmarks.common.fits import Module, Tokens, gpt2, loader, quiet_trainer
from lightning_commfree import (
    DistributedLion,
    DistributedLionStrategy,
    DominoTPStrategy,
    StreamingDiLoCoStrategy,
)

PLAIN = "AdamW on one device"


@dataclass(frozen=True)
class Plan:
    """A fit; `kind` is a name in `strategy_of`. The moments are in steps, 0 for never."""

    kind: str
    device: str
    ranks: int = 2  # processes
    gpus: int = 1  # per process
    backend: str = "gloo"
    precision: str = "32-true"
    steps: int = 24
    sync_every: int = 8
    layers: int = 2
    width: int = 64
    vocabulary: int = 256
    positions: int = 64
    batch: int = 4
    saves_at: int = 0
    dies_at: int = 0  # the last process kills itself
    resumes: str = ""  # path of a checkpoint
    exact: bool = True  # deterministic kernels
    lists_waits: bool = False  # where the host waits for the device


def strategy_of(plan: Plan) -> Any:
    """Return the strategy of a plan."""
    more: dict[str, Any] = {"process_group_backend": plan.backend} if plan.device == "cuda" else {}
    diloco: dict[str, Any] = {"sync_every": plan.sync_every, "overlap_steps": 2, **more}
    lion: dict[str, Any] = {"check_drift_every": 5, **more}
    strategies: dict[str, Callable[[], Any]] = {
        PLAIN: lambda: "auto",
        "diloco": lambda: StreamingDiLoCoStrategy(**diloco),
        "diloco, outer_device": lambda: StreamingDiLoCoStrategy(outer_device="cpu", **diloco),
        "diloco, fsdp": lambda: StreamingDiLoCoStrategy(replica_size=2, inside="fsdp", **diloco),
        "lion": lambda: DistributedLionStrategy(**lion),
        "lion, average": lambda: DistributedLionStrategy(vote="average", **lion),
        "lion, nodes": lambda: DistributedLionStrategy(node_size=2, **lion),
        "domino": lambda: DominoTPStrategy(tensor_parallel_size=2, split="batch", **more),
        "domino, auto": lambda: DominoTPStrategy(tensor_parallel_size=2, **more),
    }
    return strategies[plan.kind]()


class Watch(pl.Callback):
    """Times every step, saves or dies at the planned one."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self._plan, self._folder = plan, folder
        self.starts: list[float] = []

    @override
    def on_train_batch_start(self, *_: Any) -> None:
        if self._plan.device == "cuda" and not self._plan.lists_waits:
            torch.cuda.synchronize()
        self.starts.append(time.perf_counter())
        if self._plan.lists_waits:
            torch.cuda.set_sync_debug_mode("warn")

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if self._plan.lists_waits:
            torch.cuda.set_sync_debug_mode("default")
        step, plan = trainer.global_step, self._plan
        if step == plan.saves_at:
            trainer.save_checkpoint(self._folder / "middle.ckpt")
        if step == plan.dies_at and trainer.node_rank == plan.ranks - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def seconds(self) -> list[float]:
        """Return the duration of each step, without the first quarter, in which caches fill."""
        both = zip(self.starts, self.starts[1:], strict=False)
        return [end - start for start, end in both][len(self.starts) // 4 :]


def run(plan: Plan, folder: Path) -> None:
    """Train, and write what this rank has seen to `folder`."""
    if plan.exact:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False

    tokens = Tokens(plan.vocabulary, plan.positions)
    net = gpt2(plan.vocabulary, plan.positions, plan.layers, plan.width)
    for child in net.modules():  # its random numbers differ between CPU and GPU
        if isinstance(child, nn.Dropout):
            child.p = 0.0
    optimizer = DistributedLion if plan.kind.startswith("lion") else torch.optim.AdamW
    module, watch = Module(net, optimizer), Watch(plan, folder)
    trainer = quiet_trainer(
        strategy_of(plan),
        plan.ranks,
        plan.steps,
        [watch],
        devices=plan.gpus,
        precision=plan.precision,
        accelerator="gpu" if plan.device == "cuda" else "cpu",
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.fit(module, loader(tokens, plan.batch), ckpt_path=plan.resumes or None)

    peak = torch.cuda.max_memory_allocated() if plan.device == "cuda" else 0
    # FSDP2 leaves shards, which nobody compares
    state = {} if "fsdp" in plan.kind else {k: v.cpu() for k, v in module.state_dict().items()}
    found = {
        "seconds": watch.seconds(),
        "peak_bytes": peak,
        "state": state,
        "loss": _loss(module, torch.stack([tokens[-1 - i] for i in range(8)])) if state else None,
        "sent": dict(getattr(getattr(trainer.strategy, "ledger", None), "bytes_by_tag", {})),
        "waits": [
            f"{w.filename}:{w.lineno}" for w in said if "synchronizing CUDA" in str(w.message)
        ],
    }
    torch.save(found, folder / f"{trainer.global_rank}.pt")


@torch.no_grad()
def _loss(module: pl.LightningModule, batch: torch.Tensor) -> float:
    loss: Any = module.cpu().float().eval().training_step(batch, 0)
    return float(loss)


if __name__ == "__main__":
    run(Plan(**json.loads(sys.argv[1])), Path(sys.argv[2]))
