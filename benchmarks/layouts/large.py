"""The part `large`: the largest Llama that two replicas of two ranks train on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.bandwidth.measure import Results
from benchmarks.layouts.ranks import LEAST_FREE_BYTES, RanksFailed, free_bytes, run_here
from benchmarks.layouts.trained import DILOCO, LION, PLAIN, STEPS, SYNC_EVERY
from benchmarks.sync_cost.__main__ import GIVE_BACK

RANKS, REPLICAS = 4, 2
BF16, FP32 = "bf16-true", "32-true"
WAYS = [(PLAIN, BF16), (DILOCO, BF16), (LION, BF16), (PLAIN, FP32), (DILOCO, FP32), (LION, FP32)]
# bytes a parameter beside the parameter and its gradient: fp32 whatever the parameters are
OUTER_BYTES = {PLAIN: 4, DILOCO: 8}
PROCESS_BYTES = 250_000_000  # what a rank loads and makes besides, whatever the model
SETTINGS: dict[str, Any] = {
    "layers": [16, 14, 12, 10, 8, 6, 4, 2],
    "hidden": 2048,
    "vocabulary": 32_000,
    "tokens": 16,
}
TOY: dict[str, Any] = {"layers": [2], "hidden": 128, "vocabulary": 512, "tokens": 16}


class Shape(NamedTuple):
    """Parameters of a Llama: of a block, outside of blocks, and the number of blocks."""

    block: int
    rest: int
    layers: int

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        return self.layers * self.block + self.rest


def shape(settings: Mapping[str, Any], layers: int) -> Shape:
    """Return the shape of the model of `trained.llama`, computed."""
    hidden = settings["hidden"]
    heads, of_values = hidden // 64, max(hidden // 256, 1)
    attention = 2 * hidden * hidden + 2 * hidden * hidden * of_values // heads
    block = attention + 3 * hidden * 4 * hidden + 2 * hidden
    return Shape(block, settings["vocabulary"] * hidden + hidden, layers)


def needed_bytes(model: Shape, way: str, precision: str) -> int:
    """Return what all ranks will hold, an upper bound.

    A replica holds once: parameters and gradients, and what the algorithm keeps. A rank holds
    besides: three times the largest unit, whole (gathered, its gradients, and what is reduced of
    them), and twelve bytes for each value of its part that leaves (in fp32, encoded, decoded).
    """
    width = 2 if precision == BF16 else 4
    # Lion: momentum, and of parameters in bf16 the master copy
    of_lion = 8 if precision == BF16 else 4
    kept = of_lion if way == LION else OUTER_BYTES[way]
    unit = max(model.block, model.rest)
    of_a_rank = 3 * width * unit + 12 * unit // (RANKS // REPLICAS) + PROCESS_BYTES
    return REPLICAS * model.parameters * (2 * width + kept) + RANKS * of_a_rank


def measure(results: Results, settings: Mapping[str, Any], timeout_s: float) -> None:
    """Find for every way the largest model that completes; what would not fit is not tried."""
    for way, precision in WAYS:
        for layers in settings["layers"]:
            row = f"{way}, {layers}"
            if results.has(precision, row, 0, RANKS):
                break
            model = shape(settings, layers)
            need, free = needed_bytes(model, way, precision), free_bytes() - LEAST_FREE_BYTES
            known = {"row": row, "parameters": model.parameters, "need": need, "free": free}
            error = None
            if need > free:
                error = f"not tried: {need / 2**30:.1f} GiB would be held"
                error += f", and {free / 2**30:.1f} GiB are free"
            else:
                plan = {**settings, "row": row, "way": way, "layers": layers}
                plan |= {"precision": precision, "ranks": RANKS}
                try:
                    nodes = run_here("trained", plan, timeout_s, GIVE_BACK)
                except RanksFailed as failed:
                    error = str(failed)
            if error:
                nodes = [{"error": error}] * RANKS
            results.add(precision, 0, [{**node, **known} for node in nodes])
            print(f"{precision}, {row}: {error or 'done'}", flush=True)
            if not error:
                break


def attempts(records: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str, list[dict[str, Any]]]]:
    """Yield precision, way and ranks of every attempt, in the order of `WAYS`, largest first."""
    for way, precision in WAYS:
        mine = [r for r in records if r["rate"] == precision and r["row"].rpartition(",")[0] == way]
        for record in sorted(mine, key=lambda r: -r["nodes"][0]["parameters"]):
            yield precision, way, record["nodes"]


def opening(records: Sequence[dict[str, Any]]) -> list[str]:
    """Return what was found, for the top of the page."""
    done = [
        (nodes[0]["parameters"], precision, way)
        for precision, way, nodes in attempts(records)
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
    """Return the part of the page below its title."""
    lines = [
        "| between | precision | parameters | foretold, GiB | free | peak, GiB | fill, s"
        " | steps, s | |"
    ]
    lines.append("|---" * 9 + "|")
    for precision, way, nodes in attempts(records):
        first = nodes[0]
        cells = [way, precision, f"{first['parameters']:,}", f"{first['need'] / 2**30:.1f}"]
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
    hidden, words, tokens = (settings[key] for key in ("hidden", "vocabulary", "tokens"))
    spared = LEAST_FREE_BYTES / 2**30
    return f"""\
A Llama of the shape of Llama-3.2-1B ({hidden} wide, tied head) but for {words} words and the number
of blocks, with random values, built on `meta` and filled unit by unit, `inside="fsdp"`: two
replicas of two ranks, all four on this machine. {STEPS} steps of {tokens} tokens a rank,
`sync_every={SYNC_EVERY}`, no overlap, a fragment a block, so that half of the fragments are
exchanged after the second step and the others after the third; the fit's last round follows. The
inner optimizer of DiLoCo is SGD without momentum, which holds nothing. Success is a fit that comes
to its end. Sizes are tried from the largest. One that would hold more than is free, but for
{spared:.0f} GiB, is not begun, and ranks that leave less are ended. Foretold: `needed_bytes` in
`benchmarks/layouts/large.py`. Peak: the sum of what each rank's resident memory rose by.
Seconds say that it comes to an end, and no more: other work may share the machine."""
