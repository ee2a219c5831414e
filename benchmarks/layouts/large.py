"""Part `large`: the largest Llama that two replicas of two ranks can train on this machine.

The first half runs in the ranks, the second half starts them and writes the page.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch.optim import SGD, Optimizer
from transformers import LlamaConfig, LlamaForCausalLM
from typing_extensions import override

from benchmarks.bandwidth.measure import Results
from benchmarks.common.fits import Tokens, loader, quiet_trainer
from benchmarks.layouts.memory import RETURN_FREED_MEMORY, LateModule, Peak
from benchmarks.layouts.ranks import LEAST_FREE_BYTES, RanksFailed, free_bytes, run_here
from lightning_commfree import DistributedLion, DistributedLionStrategy, StreamingDiLoCoStrategy

SYNC_EVERY = 2
# with a cycle of two, half of the fragments leave after the second step and half after the third
STEPS = 3
DILOCO, PLAIN, LION = "DiLoCo", "DiLoCo, outer SGD without momentum", "Lion"


def llama(plan: dict[str, Any]) -> LlamaForCausalLM:
    """Return a Llama with the proportions of Llama-3.2-1B and the sizes of the plan."""
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


def _strategy(method: str, ranks: int, layers: int) -> tuple[Any, Callable[..., Optimizer]]:
    """Return the strategy and inner optimizer of a method."""
    if method == LION:
        return DistributedLionStrategy(node_size=ranks, inside="fsdp"), DistributedLion
    outer: Any = {"outer_optimizer": partial(SGD, lr=0.7)} if method == PLAIN else {}
    strategy = StreamingDiLoCoStrategy(
        sync_every=SYNC_EVERY,
        overlap_steps=0,
        # one block each, because a leaving fragment needs extra memory in fp32
        num_fragments=layers + 1,
        replica_size=ranks,
        inside="fsdp",
        **outer,
    )
    return strategy, SGD


class Clock(pl.Callback):
    """Record the seconds of every step, including its sync."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    @override
    def on_train_batch_start(self, *_: Any) -> None:
        self._start = time.perf_counter()

    @override
    def on_train_batch_end(self, *_: Any) -> None:
        self.seconds.append(time.perf_counter() - self._start)


def one_fit(plan: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train two replicas for `STEPS` steps; return the measurements of this rank."""
    del folder
    peak, clock, filled = Peak(), Clock(), [0.0]
    peak.begin()
    begun = time.perf_counter()
    strategy, optimizer = _strategy(plan["method"], plan["ranks"] // 2, plan["layers"])
    module = LateModule(
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


RANKS, REPLICAS = 4, 2
BF16, FP32 = "bf16-true", "32-true"
METHODS = [(PLAIN, BF16), (DILOCO, BF16), (LION, BF16), (PLAIN, FP32), (DILOCO, FP32), (LION, FP32)]
# bytes per parameter besides the parameter and its gradient; always fp32
OUTER_BYTES = {PLAIN: 4, DILOCO: 8}
PROCESS_BYTES = 250_000_000  # of a rank, independent of the model
SETTINGS: dict[str, Any] = {
    "layers": [16, 14, 12, 10, 8, 6, 4, 2],
    "hidden": 2048,
    "vocabulary": 32_000,
    "tokens": 16,
}
TOY: dict[str, Any] = {"layers": [2], "hidden": 128, "vocabulary": 512, "tokens": 16}


class Shape(NamedTuple):
    """Parameters per block and outside of blocks, and the number of blocks."""

    block: int
    rest: int
    layers: int

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        return self.layers * self.block + self.rest


def shape(settings: Mapping[str, Any], layers: int) -> Shape:
    """Compute the shape of the model returned by `llama`."""
    hidden = settings["hidden"]
    heads, kv_heads = hidden // 64, max(hidden // 256, 1)
    attention = 2 * hidden * hidden + 2 * hidden * hidden * kv_heads // heads
    block = attention + 3 * hidden * 4 * hidden + 2 * hidden
    return Shape(block, settings["vocabulary"] * hidden + hidden, layers)


def needed_bytes(model: Shape, method: str, precision: str) -> int:
    """Return an upper bound of the memory of all ranks.

    A replica holds the parameters, gradients and the state of the algorithm once. Each rank also
    holds three times the largest unit (gathered, its gradients, and their reduced copy), and twelve
    bytes for each value of its shard that leaves (in fp32, encoded, decoded).
    """
    width = 2 if precision == BF16 else 4
    # Lion: momentum, and a master copy of parameters in bf16
    lion_bytes = 8 if precision == BF16 else 4
    kept = lion_bytes if method == LION else OUTER_BYTES[method]
    unit = max(model.block, model.rest)
    per_rank = 3 * width * unit + 12 * unit // (RANKS // REPLICAS) + PROCESS_BYTES
    return REPLICAS * model.parameters * (2 * width + kept) + RANKS * per_rank


def measure(results: Results, settings: Mapping[str, Any], timeout_s: float) -> None:
    """Find the largest model that completes with each method; skip models that cannot fit."""
    for method, precision in METHODS:
        for layers in settings["layers"]:
            row = f"{method}, {layers}"
            if results.has(precision, row, 0, RANKS):
                break
            model = shape(settings, layers)
            need, free = needed_bytes(model, method, precision), free_bytes() - LEAST_FREE_BYTES
            known = {"row": row, "parameters": model.parameters, "need": need, "free": free}
            error = None
            if need > free:
                error = f"not tried: needs {need / 2**30:.1f} GiB"
                error += f", but {free / 2**30:.1f} GiB are free"
            else:
                plan = {**settings, "row": row, "method": method, "layers": layers}
                plan |= {"precision": precision, "ranks": RANKS}
                try:
                    nodes = run_here("large", plan, timeout_s, RETURN_FREED_MEMORY)
                except RanksFailed as failed:
                    error = str(failed)
            if error:
                nodes = [{"error": error}] * RANKS
            results.add(precision, 0, [{**node, **known} for node in nodes])
            print(f"{precision}, {row}: {error or 'done'}", flush=True)
            if not error:
                break


def attempts(records: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str, list[dict[str, Any]]]]:
    """Yield precision, method and ranks of every attempt, in order of `METHODS`, largest first."""
    for method, precision in METHODS:
        mine = [
            r for r in records if r["rate"] == precision and r["row"].rpartition(",")[0] == method
        ]
        for record in sorted(mine, key=lambda r: -r["nodes"][0]["parameters"]):
            yield precision, method, record["nodes"]


def opening(records: Sequence[dict[str, Any]]) -> list[str]:
    """Return the finding, for the top of the page."""
    done = [
        (nodes[0]["parameters"], precision, method)
        for precision, method, nodes in attempts(records)
        if not nodes[0]["error"]
    ]
    if not done:
        return ["- **Found, large:** no size completed."]
    told = {
        precision: max((d for d in done if d[1] == precision), default=None)
        for _, precision, _ in done
    }
    texts = [
        f"{one[0] / 1e9:.2f}B in {precision} ({one[2]})" for precision, one in told.items() if one
    ]
    return [f"- **Found, large:** two replicas of two ranks train {' and '.join(texts)} here."]


def page_lines(records: Sequence[dict[str, Any]], settings: Mapping[str, Any]) -> list[str]:
    """Return this part of the page."""
    lines = [
        "| between | precision | parameters | predicted, GiB | free | peak, GiB | fill, s"
        " | steps, s | |"
    ]
    lines.append("|---" * 9 + "|")
    for precision, method, nodes in attempts(records):
        first = nodes[0]
        cells = [method, precision, f"{first['parameters']:,}", f"{first['need'] / 2**30:.1f}"]
        cells.append(f"{first['free'] / 2**30:.1f}")
        if first["error"]:
            cells += ["", "", "", first["error"]]
        else:
            peak = sum(node["peak_bytes"] for node in nodes) / 2**30
            steps = ", ".join(
                f"{max(one):.1f}" for one in zip(*(n["step_s"] for n in nodes), strict=True)
            )
            fill = max(node["fill_s"] for node in nodes)
            cells += [f"{peak:.1f}", f"{fill:.0f}", steps, "done"]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", _how_it_was_tried(settings)]


def _how_it_was_tried(settings: Mapping[str, Any]) -> str:
    hidden, vocabulary, tokens = (settings[key] for key in ("hidden", "vocabulary", "tokens"))
    reserve = LEAST_FREE_BYTES / 2**30
    return f"""\
A Llama with the proportions of Llama-3.2-1B (width {hidden}, tied head), but with a vocabulary
of {vocabulary}, the number of blocks given by the parameters, and random values, built on `meta`
and filled unit by unit, `inside="fsdp"`: two replicas of two ranks, all four on this machine.
{STEPS} steps of {tokens} tokens per rank, `sync_every={SYNC_EVERY}`, no overlap, one fragment
per block, so that half of the fragments are exchanged after the second step and the others after
the third; the fit's last round follows. The inner optimizer of DiLoCo is SGD without momentum,
which has no state. An attempt succeeds if the fit completes. Sizes are tried from the largest. A
size that needs more than the free memory less {reserve:.0f} GiB is not tried, and ranks that
leave less free are ended. Predicted: `needed_bytes` in `benchmarks/layouts/large.py`. Peak: the
sum over the ranks of the rise of resident memory. The seconds only show that the fit completes;
other work may share the machine."""
