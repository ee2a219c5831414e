"""What a rank of two nodes runs: all rows in one process, a few steps of each in turn."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.bandwidth.job import BATCH, TOKENS, VOCABULARY
from benchmarks.bandwidth.window import WARM_UP, Stopwatch, Window
from benchmarks.common.fits import Module, Tokens, gpt2, loader, quiet_trainer
from benchmarks.common.relay import Relay, Run
from lightning_commfree import StreamingDiLoCoStrategy
from lightning_commfree.domino import DominoSettings

ALONE, DOMINO = "alone", "domino"
NEVER = 10_000  # steps: no fragment leaves in the fit


def inside_of(row: str) -> Any:
    """Return what is inside the replicas of a row."""
    layout = row.split("_")[0]
    return DominoSettings(split="none") if layout == DOMINO else layout


def measure(row: str, plan: dict[str, Any], pass_on: Any) -> Window:
    """Run one fit of two replicas, a node each; those of an "alone" row never sync in it."""
    ranks, sync_every = plan["ranks"], plan["sync_every"]
    stopwatch = Stopwatch(row, sync_every, sync_every, pass_on)
    strategy = StreamingDiLoCoStrategy(
        sync_every=NEVER if row.endswith(ALONE) else sync_every,
        replica_size=ranks,
        inside=inside_of(row),
    )
    module = Module(gpt2(VOCABULARY, TOKENS, plan["layers"], plan["width"]))
    dist.barrier()
    nodes = dist.get_world_size() // ranks
    trainer = quiet_trainer(strategy, nodes, WARM_UP + sync_every + 1, [stopwatch], devices=ranks)
    trainer.fit(module, loader(Tokens(VOCABULARY, TOKENS), BATCH))
    assert stopwatch.window is not None, "the fit went through the window"
    return stopwatch.window


def _run(row: str, plan: dict[str, Any]) -> Run[Window]:
    return lambda pass_on: measure(row, plan, pass_on)


def every_row(plan: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return this rank's windows by row."""
    del folder
    relay = Relay({row: _run(row, plan) for row in plan["rows"]})
    return {row: asdict(window) for row, window in relay.results()}
