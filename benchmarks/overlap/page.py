"""The result page of `benchmarks.overlap`, from its raw results alone."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.overlap.medians import (
    Medians,
    Rows,
    mechanism_medians,
    median_ms,
    medians,
    merged,
    share_hidden,
    spread_ms,
)
from benchmarks.overlap.method import method_lines
from benchmarks.overlap.ways import LABELS

TITLE = "How much of tensor parallelism's communication does Domino hide?"


class Target(NamedTuple):
    """What one setting is to show: least share hidden, least speed of sync's."""

    hidden: float
    speed: float


MECHANISM_TARGETS = {"0.2": 0.9, "0.3": 0.9, "0.45": 0.8}
# by the share of the synchronous step that is communication; of a measured share the nearest one's
LABORATORY_TARGETS = {0.25: Target(0.5, 1.1), 0.35: Target(0.6, 1.25), 0.5: Target(0.6, 1.35)}
PEERS = ("torch", "transformers")
# arXiv:2409.15241: where, share of communication, share of it that is hidden
PAPER = (
    ("the paper, Llama-2 on 8 H100, one node", "19 to 27%", "67 to 81%"),
    ("the paper, Llama-2 on 16 H100, two nodes", "45 to 57%", "56 to 59%"),
)
_EQUAL_LOSS = 1e-4  # nats; sums in another order differ by rounding


def opening(content: Mapping[str, Any], caption: str | None, picture: str) -> list[str]:
    """Return what was asked and what was found, for the top of the page.

    Args:
        content: of the raw file.
        caption: of the picture; None if there is none.
        picture: its file.
    """
    lines = [
        "Tensor parallelism sums activations over ranks in every layer, and waits. Domino cuts a"
        " batch in two and computes one part while the sums of the other travel.",
        "",
    ]
    for rate, nodes in content["laboratory"].items():
        found = medians(merged([node[0] for node in nodes]))
        if found is not None:
            lines.append(
                f"- **Found, two nodes at {rate}:** {found.hidden:.0%} of the communication is"
                f" hidden, which is {found.share:.0%} of a synchronous step; a step is"
                f" {found.speed:.2f} times as fast."
            )
    if content["mechanism"]:
        shares = [mechanism_medians(content["mechanism"]["rows"], s) for s in MECHANISM_TARGETS]
        least, most = min(s.hidden for s in shares), max(s.hidden for s in shares)
        lines.append(
            f"- Over links that only take time, and no CPU, {least:.0%} to {most:.0%} are hidden."
        )
    if caption:
        lines += ["", f"![One step, {caption}]({picture})"]
    return lines


def headline(content: Mapping[str, Any]) -> list[str]:
    """Return the targets, the figures and the verdicts."""
    lines = ["| target | figure | |", "|---|---|---|"]
    if content["mechanism"]:
        for share, least in MECHANISM_TARGETS.items():
            found = mechanism_medians(content["mechanism"]["rows"], share)
            what = f"links that only take time, {float(share):.0%} of the synchronous step"
            lines.append(_verdict(f"{what}: hidden, at least {least:.0%}", found.hidden, least))
    for rate, nodes in content["laboratory"].items():
        lines += _laboratory_verdicts(rate, merged([node[0] for node in nodes]))
    if not content["laboratory"]:
        lines.append("| two nodes | not measured | |")
    return lines


def _laboratory_verdicts(rate: str, rows: Rows) -> list[str]:
    found = medians(rows)
    if found is None:
        return [f"| two nodes at {rate} | rows are missing | |"]
    target = target_of(found.share)
    lines = [
        _verdict(
            f"two nodes at {rate}, {found.share:.0%} of the synchronous step: hidden, at least"
            f" {target.hidden:.0%}",
            found.hidden,
            target.hidden,
        ),
        _verdict(
            f"two nodes at {rate}: speed / synchronous, at least {target.speed}",
            found.speed,
            target.speed,
            "{:.2f}",
        ),
    ]
    for peer in PEERS:
        if peer in rows:
            speed = median_ms(rows[peer]["seconds"]) / found.domino
            what = f"two nodes at {rate}: speed / {LABELS[peer]}, at least 1"
            lines.append(_verdict(what, speed, 1.0, "{:.2f}"))
    return lines


def target_of(share: float) -> Target:
    """Return the target of the nearest share of communication in a synchronous step."""
    return LABORATORY_TARGETS[min(LABORATORY_TARGETS, key=lambda s: abs(s - share))]


def beside_paper(laboratory: Mapping[str, Any]) -> list[str]:
    """Return the table of what is hidden beside the paper's points, and what the rest is."""
    lines = [
        "## Beside the paper",
        "",
        "| | communication / synchronous step | hidden | of it exposed: smaller products | waiting"
        " for sums | gloo's own CPU time |",
        "|---|---|---|---|---|---|",
        *(f"| {where} | {share} | {hidden} | - | - | - |" for where, share, hidden in PAPER),
    ]
    for rate, nodes in laboratory.items():
        rows = merged([node[0] for node in nodes])
        found = medians(rows)
        if found is None or "none_split" not in rows:
            continue
        parts = [part / (found.sync - found.none) for part in exposed_ms(rows, found)]
        cells = " | ".join(f"{part:.0%}" for part in parts)
        lines.append(f"| two nodes at {rate} | {found.share:.0%} | {found.hidden:.0%} | {cells} |")
    return [
        *lines,
        "",
        "Hidden and the three columns behind it are shares of the communication and add up to"
        " 100%. The paper's points follow from the bars of its throughput figure, as parts of the"
        " throughput without communication, of Megatron-LM and of Domino. There a network card and"
        " a few of a GPU's processors carry the sums. Here gloo's threads and the kernel do, on the"
        " two cores that compute: the last column, which links that only take time do not have.",
        "",
    ]


def exposed_ms(rows: Rows, found: Medians) -> tuple[float, float, float]:
    """Return what leads from the step without communication to Domino's.

    Smaller products (the batch in two without communication), waiting for sums, and the rest, in
    which gloo's threads and the kernel share the cores with the computing.
    """
    split = median_ms(rows["none_split"]["seconds"]) - found.none
    waited = median_ms(rows["batch"]["waited"])
    return split, waited, found.domino - found.none - split - waited


def _verdict(what: str, figure: float, least: float, form: str = "{:.1%}") -> str:
    return f"| {what} | {form.format(figure)} | {'met' if figure >= least else 'missed'} |"


def most_hidden(layers: int) -> float:
    """Return the share of the sums' bytes that two parts of a batch can hide.

    Each layer has four sums a step. Exposed are that of the head, half of the embedding's, and half
    a sum at the end of each direction: its second part, behind which nothing is left to compute.
    """
    return (4 * layers - 0.5) / (4 * layers + 2)


def mechanism_lines(measured: Mapping[str, Any], layers: int) -> list[str]:
    """Return the table of the links that only take time."""
    rows = measured["rows"]
    split = median_ms(rows["none_split"]["seconds"])
    first = mechanism_medians(rows, next(iter(MECHANISM_TARGETS)))
    lines = [
        "## Mechanism: links that only take time",
        "",
        "| link: MB/s, ms latency | synchronous share | no communication, ms | synchronous, ms"
        " (waiting) | Domino, ms (waiting) | share hidden |",
        "|---|---|---|---|---|---|",
    ]
    for share in MECHANISM_TARGETS:
        found = mechanism_medians(rows, share)
        link = measured["links"][share]
        sync, domino = (median_ms(rows[f"{way}@{share}"]["waited"]) for way in ("sync", "batch"))
        lines.append(
            f"| {1e-6 / link['seconds_per_byte']:.0f}, {1e3 * link['latency_s']:.2f}"
            f" | {found.share:.1%} | {found.none:.1f} | {found.sync:.1f} ({sync:.1f})"
            f" | {found.domino:.1f} ({domino:.1f}) | {found.hidden:.1%} |"
        )
    transfers = rows[f"sync@{share}"]["collectives"], rows[f"batch@{share}"]["collectives"]
    return [
        *lines,
        "",
        f"A step makes {transfers[0]} transfers in the synchronous mode and {transfers[1]} with"
        " Domino. Without communication the batch in two parts takes"
        f" {_signed(split - first.none)} ms longer than in one: the price of smaller products."
        " What stays exposed is the sum of the head and of the loss, half of the embedding's, and"
        f" of each direction half of the last one: with {layers} layers at most"
        f" {most_hidden(layers):.1%} can be hidden, were the batch in two parts as fast as in one.",
        "",
    ]


def _signed(milliseconds: float) -> str:
    return f"{milliseconds:+.1f}"


def rate_lines(rate: str, rows: Rows, missing: Mapping[str, str]) -> list[str]:
    """Return the table of one rate."""
    found = medians(rows)
    title = f"## Two nodes at {rate}"
    lines = [
        title if found is None else f"{title}: synchronous share {found.share:.1%}",
        "",
        "| | ms a step | quartiles | speed / synchronous | share hidden | waiting, ms |"
        " collectives | MB a step, ledger | MB a step, interface |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        lines.append(_row_line(name, row, found))
    lines += [f"| {LABELS[name]} | did not run: {why} |" for name, why in missing.items()]
    return [*lines, "", *where_time_goes(rows, found), *_same_start(rows)]


def _row_line(name: str, row: Mapping[str, Any], found: Medians | None) -> str:
    ms = median_ms(row["seconds"])
    speed = hidden = "-"
    if found is not None:
        speed = f"{found.sync / ms:.2f}"
        if name not in ("none", "none_split", "sync"):
            hidden = f"{share_hidden(found.none, found.sync, ms):.1%}"
    waited = f"{median_ms(row['waited']):.1f}" if row["waited"] else "-"
    counted = row["collectives"] or "-"
    ledger = f"{row['payload_bytes'] / 1e6:.2f}" if row["collectives"] else "-"
    wire = f"{statistics.median(row['wire_bytes']) / 1e6:.2f}"
    return (
        f"| {LABELS[name]} | {ms:.1f} | {spread_ms(row['seconds'])} | {speed} | {hidden} | {waited}"
        f" | {counted} | {ledger} | {wire} |"
    )


def where_time_goes(rows: Rows, found: Medians | None) -> list[str]:
    """Return the sum that leads from the step without communication to Domino's."""
    if found is None or "none_split" not in rows:
        return []
    split, waited, rest = exposed_ms(rows, found)
    return [
        f"From no communication to Domino, {found.none:.1f} to {found.domino:.1f} ms:"
        f" {_signed(split)} ms for smaller products (the batch in two without communication),"
        f" {_signed(waited)} ms waiting for sums, {_signed(rest)} ms in which gloo's threads and"
        " the kernel share the cores with the computing.",
        "",
    ]


def _same_start(rows: Rows) -> list[str]:
    losses = [row["first_loss"] for name, row in rows.items() if not name.startswith("none")]
    if not losses:
        return []
    apart = max(losses) - min(losses)
    verdict = "the same model" if apart <= _EQUAL_LOSS else "NOT the same model"
    return [f"Before the first step the losses of all rows differ by {apart:.1e}: {verdict}.", ""]


def size_lines(laboratory: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]]) -> list[str]:
    """Return the table of shapes: where splitting loses."""
    lines = [
        "## Where splitting loses",
        "",
        "| rate | batch x tokens | KB a sum | no communication, ms | synchronous, ms | Domino, ms |"
        " speed / synchronous | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for rate, nodes in laboratory.items():
        for shapes in zip(*nodes, strict=True):
            rows = merged(shapes)
            found = medians(rows)
            if found is None:
                continue
            batch, tokens = shapes[0]["shape"]
            # every sum but the loss's is a hidden state; the ledger's mean per collective
            kilobytes = rows["sync"]["payload_bytes"] / rows["sync"]["collectives"] / 1e3
            verdict = "splitting wins" if found.speed > 1 else "splitting loses"
            lines.append(
                f"| {rate} | {batch} x {tokens} | {kilobytes:.0f} | {found.none:.1f}"
                f" | {found.sync:.1f} | {found.domino:.1f} | {found.speed:.2f} | {verdict} |"
            )
    return [
        *lines,
        "",
        "KB a sum: what the ledger counts for a collective of the synchronous mode, on average."
        " Splitting doubles the number of all-reduces and halves the products. Where a sum takes"
        " little more than its latency, or the products are too small to keep the cores busy, it"
        ' loses, and `split="none"` is the better setting. A user sees it in two figures that the'
        " strategy logs: `comm/exposed_ms`, what a step waits for sums, and the step time itself:"
        " if `comm/exposed_ms` falls by less than the rest of the step grows when"
        ' `split="none"` is changed to `split="batch"`, splitting loses. With `--shape`,'
        " `--hidden`, `--layers` and `--rates` this script answers the same for a model's own"
        " sizes.",
        "",
    ]


def page_lines(content: Mapping[str, Any]) -> list[str]:
    """Return the page below its provenance: targets and tables, then the method.

    Args:
        content: of the raw file.
    """
    settings = content["settings"]
    lines = ["## Targets", "", *headline(content), "", *beside_paper(content["laboratory"])]
    if content["mechanism"]:
        lines += mechanism_lines(content["mechanism"], settings["mechanism_layers"])
    for rate, nodes in content["laboratory"].items():
        lines += rate_lines(rate, merged([node[0] for node in nodes]), nodes[0][0]["missing"])
    if content["laboratory"]:
        lines += size_lines(content["laboratory"])
    return [*lines, *method_lines(settings)]
