"""Bytes that a rank of a replica holds under each layout.

The first half runs in the ranks, the second half starts them and writes the page.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import GPT2LMHeadModel
from typing_extensions import override

from benchmarks.bandwidth.measure import Results
from benchmarks.bandwidth.page import target
from benchmarks.common.fits import Module, Tokens, gpt2, loader, quiet_trainer
from benchmarks.common.page import draw_bars
from benchmarks.layouts.ranks import run_ranks
from lightning_commfree import FSDPSettings, StreamingDiLoCoStrategy, from_pretrained_on_meta
from lightning_commfree.diloco import StreamingDiLoCo
from lightning_commfree.model.blocks import block_names
from lightning_commfree.model.shards import local_tensor

STEPS, BATCH, TOKENS, VOCABULARY = 4, 2, 32, 4096
KINDS = ("parameters", "gradients", "optimizer", "outer")
BUILT, META, FOLDER, APART = "built", "meta", "folder", "apart"
# makes glibc return freed tensors to the system, whatever their size
RETURN_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**17), "MALLOC_TRIM_THRESHOLD_": str(2**17)}


class LateModule(Module):
    """A module whose ranks create the model in `configure_model`, before it is sharded.

    Args:
        make: creates the model.
        on_meta: create it on the meta device, without values.
        begin: called before the model is created.
        done: called when the model has its values; under FSDP, this rank's shards of them.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        on_meta: bool,
        begin: Callable[[], None],
        done: Callable[[], None],
    ) -> None:
        super().__init__(None, torch.optim.AdamW)
        self._make, self._on_meta = make, on_meta
        self._begin, self._done = begin, done

    @override
    def configure_model(self) -> None:
        if self.model is None:
            self._begin()
            with torch.device("meta" if self._on_meta else "cpu"):
                self.model = self._make()

    @override
    def configure_optimizers(self) -> Optimizer:
        self._done()
        return super().configure_optimizers()


class Peak:
    """Rise of the peak resident memory of this process."""

    def begin(self) -> None:
        """Reset the peak to the current value."""
        Path("/proc/self/clear_refs").write_text("5")
        self._before = _peak_bytes()

    def growth(self) -> int:
        """Return the rise in bytes since `begin`."""
        return _peak_bytes() - self._before


def _peak_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError("/proc/self/status has no VmHWM: this needs Linux")


def outer_state(diloco: StreamingDiLoCo) -> list[Tensor]:
    """Return the tensors of the outer state that this rank holds."""
    tensors = [fragment.global_copy for fragment in diloco.fragments]
    for fragment in diloco.fragments:
        for state in fragment.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
    return tensors


def held_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the memory of tensors or of this rank's shards; each storage counts once."""
    storages = (local_tensor(tensor).untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def unit_bytes(module: nn.Module) -> Iterator[int]:
    """Yield the bytes of the full parameters of every block, then of those outside of blocks."""
    whole = {p: p.numel() * p.element_size() for p in module.parameters()}
    for name in block_names(module):
        block = set(module.get_submodule(name).parameters())
        yield sum(whole.pop(p) for p in block)
    yield sum(whole.values())


class Count(pl.Callback):
    """Count bytes before the last optimizer step, when every fragment has landed once.

    Attributes:
        found: bytes by `KINDS`, and of the largest unit.
    """

    def __init__(self) -> None:
        self.found: dict[str, int] = {}

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        if trainer.global_step < STEPS - 1:
            return
        parameters: list[Tensor] = list(pl_module.parameters())
        states = [value for state in optimizer.state.values() for value in state.values()]
        assert isinstance(trainer.strategy, StreamingDiLoCoStrategy), (
            "the strategy created by `_fit`"
        )
        tensors: dict[str, list[Tensor]] = {
            "parameters": parameters,
            "gradients": [p.grad for p in parameters if p.grad is not None],
            "optimizer": [value for value in states if isinstance(value, Tensor)],
            "outer": outer_state(trainer.strategy.algorithm),
        }
        self.found = {kind: held_bytes(tensors[kind]) for kind in KINDS}
        self.found["largest_unit"] = max(unit_bytes(pl_module))


class Save(pl.Callback):
    """Save a checkpoint after the last step; measure the rise of memory and the duration."""

    def __init__(self, path: Path, peak: Peak) -> None:
        self._path, self._peak = path, peak
        self.growth, self.seconds = 0, 0.0

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if trainer.global_step == STEPS:
            dist.barrier()
            self._peak.begin()
            begun = time.perf_counter()
            trainer.save_checkpoint(self._path)
            self.seconds = time.perf_counter() - begun
            self.growth = self._peak.growth()


def every_row(plan: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Run the fits of `plan["rows"]`, each one replica of all ranks; return this rank's bytes."""
    model = {key: plan[key] for key in ("layers", "width")}
    if any(" " in row for row in plan["rows"]):
        # a first fit triggers torch's lazy loading, which belongs to no row
        _fit(plan["rows"][-1], plan["ranks"], {"layers": 2, "width": 16}, folder)
    return [_fit(row, plan["ranks"], model, folder) for row in plan["rows"]]


def _fit(row: str, ranks: int, model: dict[str, int], folder: Path) -> dict[str, Any]:
    """Train a replica. Row "LAYOUT" counts bytes; "LAYOUT HOW" measures peaks.

    HOW is BUILT, META, FOLDER or APART; APART is META with a checkpoint in a folder.
    """
    inside, _, how = row.partition(" ")
    peak, count, filled = Peak(), Count(), [0]
    save = Save(folder / f"{inside}_{how}.ckpt", peak)
    module: Module = Module(gpt2(VOCABULARY, TOKENS, **model))
    make: Callable[[], Any] = partial(gpt2, VOCABULARY, TOKENS, **model)
    if how == FOLDER:
        saved = folder / "model"
        make().save_pretrained(saved)  # writes on rank 0 only
        dist.barrier()
        make = partial(from_pretrained_on_meta, GPT2LMHeadModel, saved)
    if how:
        module = LateModule(
            make,
            how in (META, APART),
            peak.begin,
            lambda: filled.append(peak.growth()),
        )
    layout: Any = FSDPSettings(folder_above_bytes=0) if how == APART else inside
    strategy = StreamingDiLoCoStrategy(
        sync_every=2, overlap_steps=0, replica_size=ranks, inside=layout
    )
    callbacks: list[pl.Callback] = [save] if how else [count]
    trainer = quiet_trainer(strategy, 1, STEPS, callbacks, devices=ranks)
    trainer.fit(module, loader(Tokens(VOCABULARY, TOKENS), BATCH))
    found: dict[str, Any] = {"row": row, "error": None, **count.found}
    if how:
        units = list(unit_bytes(module))
        found |= {"fill": filled[-1], "save": save.growth, "model": sum(units)}
        found["save_s"] = save.seconds
        found["largest_unit"] = max(units)
        found["largest_tensor"] = max(p.numel() * p.element_size() for p in module.parameters())
    return found


DDP, FSDP = "ddp", "fsdp"  # values of `inside`
LAYOUTS = (DDP, FSDP)
WITHIN = 0.05  # relative difference from 1/k of the bytes of a single rank
COUNTS, PEAKS = "counts", "peaks"
PEAK_RANKS = 2
LABELS = {
    BUILT: "built in memory",
    META: "built on meta",
    FOLDER: "from a folder",
    APART: "built on meta, checkpoint in a folder",
}
PEAK_ROWS = [f"{DDP} {BUILT}", *(f"{FSDP} {how}" for how in LABELS)]
SETTINGS: dict[str, Any] = {
    "sizes": [1, 2, 4],
    COUNTS: {"layers": 6, "width": 256},
    PEAKS: {"layers": 12, "width": 512},
}
TOY: dict[str, Any] = {
    "sizes": [1, 2],
    COUNTS: {"layers": 2, "width": 32},
    PEAKS: {"layers": 4, "width": 128},
}
Nodes = Sequence[Mapping[str, Any]]


def measure(results: Results, settings: Mapping[str, Any], timeout_s: float) -> None:
    """Measure everything missing from `results`, with new processes for each rank count and model.

    Raises:
        RanksFailed: a rank failed.
    """
    jobs = [(COUNTS, k, [DDP] if k == 1 else list(LAYOUTS)) for k in settings["sizes"]]
    for kind, ranks, rows in [*jobs, (PEAKS, PEAK_RANKS, PEAK_ROWS)]:
        missing = [row for row in rows if not results.has(kind, row, ranks, ranks)]
        if not missing:
            continue
        plan = {"ranks": ranks, "rows": missing, **settings[kind]}
        by_rank = run_ranks(plan, timeout_s, RETURN_FREED_MEMORY)
        for nodes in zip(*by_rank, strict=True):
            results.add(kind, ranks, nodes)
            print(f"{kind}: {nodes[0]['row']}, {ranks} ranks", flush=True)


def found(records: Sequence[Mapping[str, Any]], kind: str) -> dict[tuple[int, str], Nodes]:
    """Return the measurements of the ranks by number of ranks and row."""
    return {(r["round"], r["row"]): r["nodes"] for r in records if r["rate"] == kind}


def held(rank: Mapping[str, Any]) -> int:
    """Return the total bytes of a rank."""
    return sum(rank[kind] for kind in KINDS)


def shares(counts: Mapping[tuple[int, str], Nodes]) -> dict[tuple[int, str], float]:
    """Return, by ranks and layout, the bytes of the fullest rank over 1/k of a single rank's."""
    (alone,) = counts[1, DDP]
    return {
        (k, layout): max(map(held, nodes)) * k / held(alone)
        for (k, layout), nodes in counts.items()
    }


def fill_of_bound(nodes: Nodes) -> float:
    """Return the highest peak of a fill over a rank's shard plus twice the largest unit.

    A unit exists in full, and for a moment next to the shard of it that is kept.
    """
    bound = nodes[0]["model"] / len(nodes) + 2 * nodes[0]["largest_unit"]
    return float(max(rank["fill"] for rank in nodes) / bound)


def save_of_tensor(nodes: Nodes) -> float:
    """Return how much more memory rank 0 needs for a save than the others, in largest tensors."""
    first, *others = (rank["save"] for rank in nodes)
    return float((first - max(others)) / nodes[0]["largest_tensor"])


def opening(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the finding, for the top of the page."""
    counts, peaks = found(records, COUNTS), found(records, PEAKS)
    told = [
        f"{share / k:.3f} with {k} ranks"
        for (k, layout), share in shares(counts).items()
        if layout == FSDP
    ]
    built, meta = (peaks[PEAK_RANKS, f"{FSDP} {how}"] for how in (BUILT, META))
    fills = [max(rank["fill"] for rank in nodes) / nodes[0]["model"] for nodes in (built, meta)]
    saves = [rank["save"] / rank["model"] for rank in meta]
    return [
        f"- **Found, memory:** under FSDP a rank holds {' and '.join(told)} of the bytes of a"
        f" single rank. Two ranks shard a model that was built in memory with a peak of"
        f" {fills[0]:.2f} of its size, and one built on `meta` with {fills[1]:.2f}. A checkpoint"
        f" raises the memory of rank 0 by {saves[0]:.1f} of the model's size, and of the other rank"
        f" by {saves[1]:.1f}.",
    ]


def draw(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the bytes of the fullest rank as a PNG."""
    groups: dict[str, dict[str, float]] = {}
    for (k, layout), nodes in found(records, COUNTS).items():
        group = groups.setdefault(f"{k} rank{'s' if k > 1 else ''} per replica", {})
        group[layout] = max(map(held, nodes)) / 1e6
    draw_bars(path, "Memory of a rank: weights, gradients, optimizer and outer state", "MB", groups)


def page_lines(records: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> list[str]:
    """Return the page below the provenance and its heading."""
    counts, peaks = found(records, COUNTS), found(records, PEAKS)
    lines = ["| target | figure | |", "|---|---|---|"]
    for (k, layout), share in shares(counts).items():
        if layout == FSDP:
            text = f"{layout}, {k} ranks: held / (single rank / {k}), within {100 * WITHIN:.0f} %"
            lines.append(target(text, share, abs(share - 1) <= WITHIN))
    for how in (META, FOLDER):
        fill = fill_of_bound(peaks[PEAK_RANKS, f"{FSDP} {how}"])
        text = f"{LABELS[how]}: fill / (model / {PEAK_RANKS} + two units), at most {1 + WITHIN}"
        lines.append(target(text, fill, fill <= 1 + WITHIN))
    beside = save_of_tensor(peaks[PEAK_RANKS, f"{FSDP} {APART}"])
    text = f"{LABELS[APART]}: (save of rank 0 - of rank 1) / the largest tensor, at most 1"
    lines.append(target(text, beside, beside <= 1))
    head = [*KINDS, "total", "x ranks / single rank", "largest unit"]
    lines += ["", f"| ranks, inside | {' | '.join(head)} |", "|---" * (1 + len(head)) + "|"]
    for (k, layout), nodes in counts.items():
        fullest = max(nodes, key=held)
        cells = [f"{fullest[kind] / 1e6:.2f}" for kind in KINDS]
        cells += [f"{held(fullest) / 1e6:.2f}", f"{shares(counts)[k, layout]:.4f}"]
        cells.append(f"{fullest['largest_unit'] / 1e6:.2f}")
        lines.append(f"| {k}, {layout} | {' | '.join(cells)} |")
    lines += ["", _how_it_was_counted(settings), ""]
    lines += ["| two ranks | model, MB | fill: rank 0 | rank 1 | save: rank 0 | rank 1 | seconds |"]
    lines.append("|---|---|---|---|---|---|---|")
    for row in PEAK_ROWS:
        layout, how = row.split()
        nodes = peaks[PEAK_RANKS, row]
        cells = [f"{rank['fill'] / 1e6:.0f}" for rank in nodes]
        cells += [f"{rank['save'] / 1e6:.0f}" for rank in nodes]
        cells.append(f"{max(rank['save_s'] for rank in nodes):.2f}")
        lines.append(
            f"| {layout}, {LABELS[how]} | {nodes[0]['model'] / 1e6:.0f} | {' | '.join(cells)} |"
        )
    return [*lines, "", _how_peaks_were_taken(settings)]


def _how_it_was_counted(settings: Mapping[str, Any]) -> str:
    layers, width = (settings[COUNTS][key] for key in ("layers", "width"))
    return f"""\
MB of 10^6 bytes, of the fullest rank. One replica trains a GPT-2 with {layers} blocks of width
{width}, a vocabulary of {VOCABULARY}, fp32 and AdamW, with Streaming DiLoCo between replicas
(`sync_every=2`), for {STEPS} steps of {BATCH} x {TOKENS} tokens per rank. Counted before the last
optimizer step, when every fragment has landed once: the memory of a rank's own tensors, each
storage once. Parameters; gradients; optimizer: the two moments of AdamW; outer: global copy and
outer momentum, which the ranks of a replica share also under DDP. Not counted: the largest unit
with its gradients, which FSDP gathers for a moment, and DDP's buckets, a second copy of all
gradients."""


def _how_peaks_were_taken(settings: Mapping[str, Any]) -> str:
    layers, width = (settings[PEAKS][key] for key in ("layers", "width"))
    return f"""\
MB by which the resident memory of a process rose (`VmHWM`, reset first), for a GPT-2 with {layers}
blocks of width {width}, after a first fit of a small model. *Fill*: from the creation of the model
in `configure_model` to `configure_optimizers`, when it is sharded, or wrapped by DDP with its
buckets. *Save*: while `trainer.save_checkpoint` runs after the last step. Under FSDP rank 0 gathers
the full weights and both full moments of AdamW, three times the model. On every rank, memory rises
by a second copy of its own weights, because a checkpoint contains the outer weights, and by the
buffers of a gathered tensor. With a folder
(`FSDPSettings(folder_above_bytes=0)`) each rank writes its own shards and no tensor is gathered.
*Seconds*: of the slower rank, measured once beside other work, on the only disk of this machine."""
