"""The part `memory`: what a rank of a replica holds, for every way to hold a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.bandwidth.measure import Results
from benchmarks.bandwidth.page import target
from benchmarks.common.page import draw_bars
from benchmarks.layouts.held import (
    APART,
    BATCH,
    BUILT,
    FOLDER,
    KINDS,
    META,
    STEPS,
    TOKENS,
    VOCABULARY,
)
from benchmarks.layouts.ranks import run_here
from benchmarks.sync_cost.__main__ import GIVE_BACK

DDP, FSDP = "ddp", "fsdp"  # as `inside` is called
LAYOUTS = (DDP, FSDP)
WITHIN = 0.05  # of 1/k of what one rank alone holds
COUNTS, PEAKS = "counts", "peaks"
PEAK_RANKS = 2
PEAK_ROWS = {
    f"{DDP} {BUILT}": "ddp, built in memory",
    f"{FSDP} {BUILT}": "fsdp, built in memory",
    f"{FSDP} {META}": "fsdp, built on meta",
    f"{FSDP} {FOLDER}": "fsdp, from a folder",
    f"{FSDP} {APART}": "fsdp, built on meta, checkpoint in a folder",
}
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
    """Measure what `results` lacks, a set of processes for each number of ranks and model.

    Raises:
        RanksFailed: a rank failed.
    """
    jobs = [(COUNTS, k, [DDP] if k == 1 else list(LAYOUTS)) for k in settings["sizes"]]
    for kind, ranks, rows in [*jobs, (PEAKS, PEAK_RANKS, list(PEAK_ROWS))]:
        lacking = [row for row in rows if not results.has(kind, row, ranks, ranks)]
        if not lacking:
            continue
        plan = {"ranks": ranks, "rows": lacking, **settings[kind]}
        by_rank = run_here("held", plan, timeout_s, GIVE_BACK)
        for nodes in zip(*by_rank, strict=True):
            results.add(kind, ranks, nodes)
            print(f"{kind}: {nodes[0]['row']}, {ranks} ranks", flush=True)


def found(records: Sequence[Mapping[str, Any]], kind: str) -> dict[tuple[int, str], Nodes]:
    """Return what the ranks have measured, by number of ranks and row."""
    return {(r["round"], r["row"]): r["nodes"] for r in records if r["rate"] == kind}


def held(rank: Mapping[str, Any]) -> int:
    """Return the bytes of all kinds that a rank holds."""
    return sum(rank[kind] for kind in KINDS)


def shares(counts: Mapping[tuple[int, str], Nodes]) -> dict[tuple[int, str], float]:
    """Return by ranks and layout what the fullest rank holds, over 1/k of one rank's."""
    (alone,) = counts[1, DDP]
    return {
        (k, layout): max(map(held, nodes)) * k / held(alone)
        for (k, layout), nodes in counts.items()
    }


def fill_of_bound(nodes: Nodes) -> float:
    """Return the highest peak of a fill over a rank's part and twice the largest unit.

    A unit is there whole, and for a moment beside the part of it that is kept.
    """
    bound = nodes[0]["model"] / len(nodes) + 2 * nodes[0]["largest_unit"]
    return float(max(rank["fill"] for rank in nodes) / bound)


def save_of_tensor(nodes: Nodes) -> float:
    """Return by how much a save takes rank 0 more than the others, in largest tensors."""
    first, *others = (rank["save"] for rank in nodes)
    return float((first - max(others)) / nodes[0]["largest_tensor"])


def opening(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what was found, for the top of the page."""
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
        f"- **Found, memory:** under FSDP a rank holds, of what one rank alone holds,"
        f" {' and '.join(told)}. Two ranks divide a model that was built in memory at a peak of"
        f" {fills[0]:.2f} of its size, one on `meta` at {fills[1]:.2f}. A checkpoint takes rank 0"
        f" {saves[0]:.1f} of the model's size, the other rank {saves[1]:.1f}.",
    ]


def draw(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write a PNG with what the fullest rank holds."""
    groups: dict[str, dict[str, float]] = {}
    for (k, layout), nodes in found(records, COUNTS).items():
        group = groups.setdefault(f"{k} rank{'s' if k > 1 else ''} a replica", {})
        group[layout] = max(map(held, nodes)) / 1e6
    draw_bars(path, "What a rank of a replica holds: weights, gradients, states", "MB", groups)


def page_lines(records: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> list[str]:
    """Return the part of the page below its title."""
    counts, peaks = found(records, COUNTS), found(records, PEAKS)
    lines = ["| target | figure | |", "|---|---|---|"]
    for (k, layout), share in shares(counts).items():
        if layout == FSDP:
            text = f"{layout}, {k} ranks: held / (one rank's / {k}), within {100 * WITHIN:.0f} %"
            lines.append(target(text, share, abs(share - 1) <= WITHIN))
    for how in (META, FOLDER):
        fill = fill_of_bound(peaks[PEAK_RANKS, f"{FSDP} {how}"])
        text = f"{how}: fill / (model / {PEAK_RANKS} + two units), at most {1 + WITHIN}"
        lines.append(target(text, fill, fill <= 1 + WITHIN))
    for how in (BUILT, META, APART):
        beside = save_of_tensor(peaks[PEAK_RANKS, f"{FSDP} {how}"])
        text = f"{how}, checkpoint: (rank 0's rise - the other's) / the largest tensor, at most 1"
        lines.append(target(text, beside, beside <= 1))
    head = [*KINDS, "together", "x ranks / one rank's", "largest unit"]
    lines += ["", f"| ranks, inside | {' | '.join(head)} |", "|---" * (1 + len(head)) + "|"]
    for (k, layout), nodes in counts.items():
        fullest = max(nodes, key=held)
        cells = [f"{fullest[kind] / 1e6:.2f}" for kind in KINDS]
        cells += [f"{held(fullest) / 1e6:.2f}", f"{shares(counts)[k, layout]:.4f}"]
        cells.append(f"{fullest['largest_unit'] / 1e6:.2f}")
        lines.append(f"| {k}, {layout} | {' | '.join(cells)} |")
    lines += ["", _how_it_was_counted(settings), ""]
    lines += [
        "| two ranks | model, MB | fill: rank 0 | rank 1 | checkpoint: rank 0 | rank 1 | seconds |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for row, label in PEAK_ROWS.items():
        nodes = peaks[PEAK_RANKS, row]
        cells = [f"{rank['fill'] / 1e6:.0f}" for rank in nodes]
        cells += [f"{rank['save'] / 1e6:.0f}" for rank in nodes]
        cells.append(f"{max(rank['save_s'] for rank in nodes):.2f}")
        lines.append(f"| {label} | {nodes[0]['model'] / 1e6:.0f} | {' | '.join(cells)} |")
    return [*lines, "", _how_peaks_were_taken(settings)]


def _how_it_was_counted(settings: Mapping[str, Any]) -> str:
    layers, width = (settings[COUNTS][key] for key in ("layers", "width"))
    return f"""\
MB of 10^6 bytes, of the fullest rank. One replica of so many ranks trains a GPT-2 of
{layers} blocks, {width} wide, {VOCABULARY} words, fp32, AdamW, with Streaming DiLoCo around it
(`sync_every=2`), {STEPS} steps of {BATCH} x {TOKENS} tokens a rank. Counted ahead of the last
optimizer step, when every fragment has landed once: the memory behind a rank's own tensors, each
storage once. Parameters; gradients; optimizer: AdamW's two moments; outer: global copy and outer
momentum, which the ranks of a replica share also under DDP. Not counted, and under FSDP only there
for a moment: the largest unit, whole, with its gradients. Nor DDP's buckets, a second copy of all
gradients."""


def _how_peaks_were_taken(settings: Mapping[str, Any]) -> str:
    layers, width = (settings[PEAKS][key] for key in ("layers", "width"))
    return f"""\
MB by which a process's resident memory rose above what it was (`VmHWM`, set back first): a GPT-2 of
{layers} blocks, {width} wide, after a first fit of a small one. *Fill*: from ahead of the
model's making in `configure_model` to `configure_optimizers`, where it is divided, or wrapped for
DDP with its buckets. *Checkpoint*: while `trainer.save_checkpoint` runs after the last step. Rank
0 writes whole weights and AdamW's two whole moments, three times the model, and puts one tensor
together at a time. What rises on every rank is a second copy of its own weights, for a checkpoint
holds the outer ones; and what a gathered tensor takes beside itself. Into a folder
(`FSDPSettings(folder_above_bytes=0)`) each rank writes its own parts, and no tensor is put
together. *Seconds*: of the slower rank, once, on the one disk of this machine."""
