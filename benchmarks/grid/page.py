"""Result page of `benchmarks.grid`, made from the predictions and the measurements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from benchmarks.common.page import draw_bars
from benchmarks.grid.cells import (
    BASELINES,
    CAPACITY,
    FAST,
    LABELS,
    PUBLISHED,
    SYNC_EVERY,
    TOLERANCE,
    UNSHAPED,
    WIDE,
    Cell,
)

TITLE = "Does the planner predict the utilization over slow, distant and lossy links?"
HIT, MISS, OPEN = "hit", "miss", "not measured yet"
Rows = Mapping[str, Sequence[Mapping[str, Any]]]  # what all nodes measured, by row


class Outcome(NamedTuple):
    """One row in one cell: utilization as predicted and as measured (None: not yet)."""

    cell: Cell
    row: str
    predicted: float
    measured: float | None

    @property
    def difference(self) -> float | None:
        """Measured minus predicted."""
        return None if self.measured is None else self.measured - self.predicted

    @property
    def verdict(self) -> str:
        """Whether the prediction is within the tolerance."""
        if self.difference is None:
            return OPEN
        return HIT if abs(self.difference) <= TOLERANCE else MISS


def step_seconds(rows: Rows, baseline: str) -> float | None:
    """Return the seconds of a step without communication, mean over the nodes."""
    nodes = rows.get(baseline)
    if nodes is None:
        return None
    return mean(node["seconds"] / (SYNC_EVERY * node["cycles"]) for node in nodes)


def cycle_seconds(rows: Rows, row: str) -> float | None:
    """Return the seconds of a cycle, mean over the nodes."""
    nodes = rows.get(row)
    return None if nodes is None else mean(node["seconds"] / node["cycles"] for node in nodes)


def utilization(rows: Rows, row: str) -> float | None:
    """Return the share of a row's time that the same loop without communication takes."""
    step_s, cycle_s = step_seconds(rows, BASELINES[row]), cycle_seconds(rows, row)
    return None if step_s is None or cycle_s is None else SYNC_EVERY * step_s / cycle_s


def outcomes(predictions: Mapping[str, Any], cells: Mapping[str, Rows]) -> list[Outcome]:
    """Return every cell with its prediction, and its measurement if there is one.

    Args:
        predictions: with utilizations by cell and row.
        cells: what all nodes measured, by name of the cell.
    """
    return [
        Outcome(
            cell,
            row,
            predictions["predicted"][cell.name][row],
            utilization(cells.get(cell.name, {}), row),
        )
        for cell in (*FAST, *WIDE)
        for row in cell.rows
    ]


def percent(share: float | None) -> str:
    """Format a share with one digit."""
    return "-" if share is None else f"{100 * share:.1f} %"


def points(difference: float | None) -> str:
    """Format a difference of two shares in points."""
    return "-" if difference is None else f"{100 * difference:+.1f}"


def opening(found: Sequence[Outcome], picture: str) -> list[str]:
    """Return the question and the finding, for the top of the page."""
    lines = [
        "Four nodes train 30.8 million parameters with H = 128 and steps of 26.1 ms, the setting of"
        " [diloco-measured](https://github.com/Adnan082/diloco-measured). Steps wait instead of"
        " computing. The predictions were committed before the run that decides. No model is"
        " trained here; the loss of four replicas, with H = 100 and smaller models, is on the page"
        " of [the size ladder](../size_ladder/result.md).",
        "",
    ]
    measured = [one for one in found if one.measured is not None]
    if not measured:
        return [*lines, "**Found:** nothing yet; this page has the predictions only."]
    hits = sum(one.verdict == HIT for one in measured)
    worst = max(measured, key=lambda one: abs(one.difference or 0.0))
    lines += [
        f"**Found:** {hits} of {len(measured)} cells are within {100 * TOLERANCE:.0f} points of the"
        f" prediction. The largest difference is {points(worst.difference)} points"
        f" ({LABELS[worst.row]}, {worst.cell.name})." + _missing(len(found) - len(measured))
    ]
    lines += ["", *_against_published(measured), f"![utilization by link and method]({picture})"]
    return lines


def _missing(count: int) -> str:
    return f" Not measured: {count}." if count else ""


def _against_published(measured: Sequence[Outcome]) -> Iterator[str]:
    """Yield how plain DiLoCo compares with the published figures."""
    pairs = [
        (one.measured, PUBLISHED[one.cell.mbit])
        for one in measured
        if one.row == "diloco" and one.cell in FAST and one.cell.mbit is not None
    ]
    if not pairs:
        return
    ours = ", ".join(percent(measured) for measured, _ in pairs)
    theirs = ", ".join(percent(published) for _, published in pairs)
    largest = max(abs((measured or 0.0) - published) for measured, published in pairs)
    verb = "agree" if largest <= TOLERANCE else "disagree"
    yield (
        f"Plain DiLoCo reaches {ours}, where diloco-measured published {theirs}: they {verb}"
        f" (largest difference {100 * largest:.1f} points). There, every rank had a machine with a"
        " GPU. Here four nodes share two cores, so the work of a sync takes longer, which shows on"
        " fast links; the bytes are the same."
    )
    yield ""


def draw(found: Sequence[Outcome], path: Path) -> None:
    """Draw measured utilizations as a PNG, or the predictions if nothing is measured."""
    done = [one for one in found if one.measured is not None]
    shown = done or list(found)
    groups: dict[str, dict[str, float]] = {}
    for one in shown:
        name = one.cell.name.replace(", 0.1 % loss, ", ",\n").replace("Mbit/s, ", "Mbit/s,\n")
        share = one.predicted if one.measured is None else one.measured
        groups.setdefault(name, {})[LABELS[one.row]] = 100 * share
    title = "measured" if done else "predicted, before the run"
    draw_bars(path, f"Utilization over links, {title}", "%", groups)


def page_lines(
    found: Sequence[Outcome], predictions: Mapping[str, Any], result: Mapping[str, Any]
) -> list[str]:
    """Return the page below the provenance."""
    return [
        "## All cells",
        "",
        "Utilization: computing time over wall time, in whole cycles. A prediction is a hit within"
        f" {100 * TOLERANCE:.0f} points.",
        "",
        *_verdicts(found),
        "",
        *_misses(found, predictions["unshaped"], result["cells"]),
        *_again(predictions, result["again"]),
        *_cycles(result["cells"]),
        "## The links",
        "",
        *_links(predictions["links"]),
        "",
        "## The planner's inputs",
        "",
        *_inputs(predictions["inputs"]),
        "",
        "## How it was measured",
        "",
        HOW,
    ]


def _verdicts(found: Sequence[Outcome]) -> Iterator[str]:
    """Yield the table of cells with their verdicts."""
    yield from (
        "| link | method | predicted | measured | difference, points | verdict | published |",
        "|---|---|---|---|---|---|---|",
    )
    for one in found:
        published = (
            percent(PUBLISHED.get(one.cell.mbit or 0))
            if one.row == "diloco" and one.cell in FAST
            else ""
        )
        yield (
            f"| {one.cell.name} | {LABELS[one.row]} | {percent(one.predicted)}"
            f" | {percent(one.measured)} | {points(one.difference)} | {one.verdict}"
            f" | {published} |"
        )


def _misses(found: Sequence[Outcome], unshaped: Rows, cells: Mapping[str, Rows]) -> Iterator[str]:
    """Yield the strategy's own work in the cells that missed, beside the work predicted from."""
    missed = [one for one in found if one.verdict == MISS and one.row != "torchft"]
    if not missed:
        return
    yield (
        "What our strategies themselves took in a cycle that missed, without waiting for others,"
        " and in the run on unshaped links that the prediction is based on:"
    )
    yield ""
    for one in missed:
        here, there = (_own_seconds(rows, one.row) for rows in (cells[one.cell.name], unshaped))
        yield f"- {one.cell.name}, {LABELS[one.row]}: {here:.2f} s, and {there:.2f} s."
    yield ""


def _own_seconds(rows: Rows, row: str) -> float:
    return mean((node["own_s"] - node["waited_s"]) / node["cycles"] for node in rows[row])


def _again(predictions: Mapping[str, Any], cells: Mapping[str, Rows]) -> Iterator[str]:
    """Yield the table of cells that were measured a second time."""
    found = [one for one in outcomes(predictions, cells) if one.measured is not None]
    if found:
        yield from ("## Measured again", "", AGAIN, "", *_verdicts(found), "")


def _cycles(cells: Mapping[str, Rows]) -> Iterator[str]:
    """Yield the table of seconds behind the utilizations."""
    if not cells:
        return
    yield from (
        "## Seconds of a cycle",
        "",
        "| link | method | cycles | seconds per cycle | of it: the strategy | waiting | MB sent |",
        "|---|---|---|---|---|---|---|",
    )
    for cell in (*FAST, *WIDE):
        rows = cells.get(cell.name, {})
        for row, nodes in rows.items():
            cycles = nodes[0]["cycles"]
            own, waited, sent = (
                mean(node[key] / cycles for node in nodes)
                for key in ("own_s", "waited_s", "sent_bytes")
            )
            counted = [f"{own:.2f}", f"{waited:.2f}", f"{sent / 1e6:.1f}"] if own else ["-"] * 3
            label = LABELS.get(row, f"no communication ({row})")
            yield (
                f"| {cell.name} | {label} | {cycles} | {cycle_seconds(rows, row):.2f}"
                f" | {' | '.join(counted)} |"
            )
    yield ""


def _links(links: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    yield (
        "Measured with plain sockets before the grid, while nothing else ran in the laboratory:"
        " datagrams from node 0 to node 1 and back, and data that every node sends to every other"
        " node at the same time, per node, until the last one is done."
    )
    yield from (
        "",
        "| link | round trip, ms | datagrams lost, both ways | Mbit/s of a node |",
        "|---|---|---|---|",
    )
    for cell in (UNSHAPED, *FAST, *WIDE, CAPACITY):
        if cell.name in links:
            link = links[cell.name]
            yield (
                f"| {cell.name} | {link['median_ms']:.2f} | {100 * link['lost']:.2f} %"
                f" | {link['mbit']:,.1f} |"
            )


def _inputs(inputs: Mapping[str, Any]) -> Iterator[str]:
    steps = ", ".join(
        f"{1e3 * seconds:.2f} ms ({name})" for name, seconds in inputs["step_s"].items()
    )
    syncs = ", ".join(
        f"{seconds:.2f} s ({LABELS[row]})" for row, seconds in inputs["sync_s"].items()
    )
    yield f"- A step without communication: {steps}; `none` runs in a Trainer, `loop` does not."
    yield (
        f"- A cycle's work other than steps and transfers: {syncs}, from a run on unshaped links."
        " Four nodes share two cores, so it is more than on four machines."
    )
    yield (
        "- Bandwidth: without a round trip, the throughput of the table above. With one, 48.3"
        " Mbit/s, which is what packets of 1500 bytes carry at 50 Mbit/s; CUBIC's windows are the"
        " planner's part."
    )


AGAIN = """\
The tables above are of the first run. Its fast links came while other programs were busy on the two
cores; these cells were measured again later, with the same predictions. The verdicts that count are
the first ones."""
HOW = """\
Four nodes of the network laboratory (`benchmarks/lab/netlab.py`) on two cores. Without a round
trip, they are connected to a switch, and both directions of every link are shaped. With one, every
node's interface is a TUN device, and a process (`benchmarks/lab/wan.py`) keeps every packet for
half of the round trip and loses one in 1,000, acknowledgements too; what a node sends is shaped.
The relay sustains 50 Mbit/s for each of four nodes, not 200. TCP's congestion control is CUBIC, the
default of Linux, or BBR where the table says so.

The model is the Llama of diloco-measured: 6 blocks of width 256, and separate embedding and head
for 50,257 tokens, which hold 83 % of the parameters. A step sleeps for 26.1 ms, then trains the 256
weights of the last norm; all parameters are exchanged. A row's baseline is the same loop on the
same nodes without communication, so a step includes the loop's own time.

- Streaming DiLoCo: `StreamingDiLoCoStrategy(sync_every=128, overlap_steps=5)`, the setting of
  [the bandwidth page](../bandwidth/result.md): fp4, and 3 fragments, of which one holds embedding
  and head.
- Plain DiLoCo: the same strategy with `num_fragments=1, overlap_steps=0, wire_dtype="fp32"`, which
  is the algorithm that diloco-measured ran.
- torchft's DiLoCo: one fragment, no delay, one all-reduce for each tensor (its default). The
  planner does not know torchft; its figure here is for DiLoCo with an all-reduce in a ring, one
  connection to a neighbour, and two tensors at a time.

The planner counts bytes, latencies (two for each phase of an exchange) and TCP's windows
(`commfree_planner/tcp.py`), and adds the work of a cycle as measured. Fits of a cell run one after
the other in the same processes."""
