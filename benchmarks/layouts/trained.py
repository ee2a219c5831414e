"""What a rank runs of a large Llama: two inner steps and a sync, of a model built on `meta`."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.optim import SGD, Optimizer
from transformers import LlamaConfig, LlamaForCausalLM
from typing_extensions import override

from benchmarks.common.fits import Tokens, loader, quiet_trainer
from benchmarks.layouts.held import Late, Peak
from lightning_commfree import DistributedLion, DistributedLionStrategy, StreamingDiLoCoStrategy

SYNC_EVERY = 2
# with a cycle of two, half of the fragments leave after the second step and half after the third
STEPS = 3
DILOCO, PLAIN, LION = "DiLoCo", "DiLoCo, outer SGD without momentum", "Lion"


def llama(plan: dict[str, Any]) -> LlamaForCausalLM:
    """Return a Llama of the shape of Llama-3.2-1B, but for what the plan says."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=plan["vocabulary"],
            hidden_size=plan["hidden"],
            intermediate_size=4 * plan["hidden"],
            num_hidden_layers=plan["layers"],
            num_attention_heads=plan["hidden"] // 64,
            num_key_value_heads=max(plan["hidden"] // 256, 1),
            tie_word_embeddings=True,
        )
    )


def _parts(way: str, ranks: int, layers: int) -> tuple[Any, Callable[..., Optimizer]]:
    """Return strategy and inner optimizer of a way to train."""
    if way == LION:
        return DistributedLionStrategy(node_size=ranks, inside="fsdp"), DistributedLion
    outer: Any = {"outer_optimizer": partial(SGD, lr=0.7)} if way == PLAIN else {}
    strategy = StreamingDiLoCoStrategy(
        sync_every=SYNC_EVERY,
        overlap_steps=0,
        # a block each: what leaves is made in fp32 beside all that is held
        num_fragments=layers + 1,
        replica_size=ranks,
        inside="fsdp",
        **outer,
    )
    return strategy, SGD


class Clock(pl.Callback):
    """Seconds of every step, with what it syncs."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    @override
    def on_train_batch_start(self, *_: Any) -> None:
        self._start = time.perf_counter()

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        self.seconds.append(time.perf_counter() - self._start)


def one_fit(plan: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train two replicas for `STEPS` steps; return what one rank saw."""
    del folder
    peak, clock, filled = Peak(), Clock(), [0.0]
    peak.begin()
    begun = time.perf_counter()
    strategy, optimizer = _parts(plan["way"], plan["ranks"] // 2, plan["layers"])
    module = Late(
        lambda: llama(plan),
        True,
        lambda: None,
        lambda: filled.append(time.perf_counter() - begun),
        optimizer,
    )
    trainer = quiet_trainer(
        strategy, 1, STEPS, [clock], devices=plan["ranks"], precision=plan["precision"]
    )
    trainer.fit(module, loader(Tokens(plan["vocabulary"], plan["tokens"]), 1))
    return {
        "row": plan["row"],
        "error": None,
        "parameters": sum(p.numel() for p in module.parameters()),
        "bytes_sent": strategy.ledger.bytes_sent,
        "peak_bytes": peak.growth(),
        "fill_s": filled[-1],
        "step_s": clock.seconds,
        "fit_s": time.perf_counter() - begun,
    }
