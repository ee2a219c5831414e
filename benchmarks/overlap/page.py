"""Result page of `benchmarks.overlap`, made from its raw results."""

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
from benchmarks.overlap.methods import LABELS

TITLE = "How much of tensor parallelism's communication does Domino hide?"


class Target(NamedTuple):
    """Target of one setting: least share hidden, and least speed relative to synchronous."""

    hidden: float
    speed: float


MECHANISM_TARGETS = {"0.2": 0.9, "0.3": 0.9, "0.45": 0.8}
# by the share of communication in the synchronous step; the nearest share applies
LABORATORY_TARGETS = {0.25: Target(0.5, 1.1), 0.35: Target(0.6, 1.25), 0.5: Target(0.6, 1.35)}
PEERS = ("torch", "transformers")
# arXiv:2409.15241: setting, share of communication, share of it that is hidden
PAPER = (
    ("the paper, Llama-2 on 8 H100, one node", "19 to 27%", "67 to 81%"),
    ("the paper, Llama-2 on 16 H100, two nodes", "45 to 57%", "56 to 59%"),
)
_EQUAL_LOSS = 1e-4  # nats; a different order of summation changes the rounding


def opening(content: Mapping[str, Any], caption: str | None, picture: str) -> list[str]:
    """Return the question and the finding, for the top of the page.

    Args:
        content: of the raw file.
        caption: of the picture; None without a picture.
        picture: file name of the picture.
    """
    lines = [
        "Tensor parallelism all-reduces activations in every layer and waits for the result. Domino"
        " splits a batch in two and computes one half while the all-reduces of the other half are"
        " in flight. In backward they also overlap with the gradients of weights, with or without a"
        " split.",
        "",
    ]
    for rate, nodes in content["laboratory"].items():
        found = medians(merged([node[0] for node in nodes]))
        if found is not None:
            lines.append(
                f"- **Found, two nodes at {rate}:** communication is {found.share:.0%} of a"
                f" synchronous step; Domino hides {found.hidden:.0%} of it and makes a step"
                f" {found.speed:.2f} times as fast."
            )
    if content["mechanism"]:
        shares = [mechanism_medians(content["mechanism"]["rows"], s) for s in MECHANISM_TARGETS]
        least, most = min(s.hidden for s in shares), max(s.hidden for s in shares)
        lines.append(
            f"- Over simulated links, which use no CPU, {least:.0%} to {most:.0%} is hidden."
        )
    if caption:
        lines += ["", f"![One step, {caption}]({picture})"]
    return lines


def headline(content: Mapping[str, Any]) -> list[str]:
    """Return the targets with the measured figures and verdicts."""
    lines = ["| target | figure | |", "|---|---|---|"]
    if content["mechanism"]:
        for share, least in MECHANISM_TARGETS.items():
            found = mechanism_medians(content["mechanism"]["rows"], share)
            what = f"simulated link, {float(share):.0%} of the synchronous step"
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
    """Return the target for the nearest share of communication in the synchronous step."""
    return LABORATORY_TARGETS[min(LABORATORY_TARGETS, key=lambda s: abs(s - share))]


def paper_lines(laboratory: Mapping[str, Any]) -> list[str]:
    """Return the table that compares the hidden and exposed shares with the paper."""
    lines = [
        "## Compared with the paper",
        "",
        "| | communication / synchronous step | hidden | exposed: smaller matrix products | waiting"
        " for all-reduces | CPU time of gloo |",
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
        "Hidden and the three columns after it are shares of the communication and add up to 100%."
        " The paper's values are derived from the bars of its throughput figure: without"
        " communication, Megatron-LM, and Domino. There, a network card and a few processors of a"
        " GPU execute the all-reduces. Here, gloo's threads and the kernel do so on the two cores"
        " that compute; this is the last column, which does not exist for simulated links.",
        "",
    ]


def exposed_ms(rows: Rows, found: Medians) -> tuple[float, float, float]:
    """Return the parts of the difference between no communication and Domino, in milliseconds.

    Smaller matrix products (the split batch without communication), waiting for all-reduces, and
    the rest, in which gloo's threads and the kernel share the cores with the computation.
    """
    split = median_ms(rows["none_split"]["seconds"]) - found.none
    waited = median_ms(rows["batch"]["waited"])
    return split, waited, found.domino - found.none - split - waited


def _verdict(what: str, figure: float, least: float, form: str = "{:.1%}") -> str:
    return f"| {what} | {form.format(figure)} | {'met' if figure >= least else 'missed'} |"


def most_hidden(layers: int) -> float:
    """Return the share of the all-reduced bytes that two halves of a batch can hide.

    Each layer has four all-reduces per step. Exposed are that of the head, half of the embedding's,
    and half of the last one in each direction: its second half, after which nothing is left to
    compute.
    """
    return (4 * layers - 0.5) / (4 * layers + 2)


_ORDERS = {"none": ("sync", "unsplit"), "batch": ("batch_late", "batch")}  # by `split`


def order_lines(laboratory: Mapping[str, Any]) -> list[str]:
    """Return the table that compares the two orders of launch and gradients of weights."""
    lines = [
        "## Launch before or after the gradients of weights",
        "",
        "| rate | `split` | launch after, ms (waiting) | launch before, ms (waiting) | speed,"
        " before / after | share of communication hidden, after, before |",
        "|---|---|---|---|---|---|",
    ]
    for rate, nodes in laboratory.items():
        rows = merged([node[0] for node in nodes])
        for split, names in _ORDERS.items():
            if not {"none", "sync", *names} <= rows.keys():
                continue
            none, sync, after, before = (
                median_ms(rows[name]["seconds"]) for name in ("none", "sync", *names)
            )
            waits = [median_ms(rows[name]["waited"]) for name in names]
            hidden = [share_hidden(none, sync, ms) for ms in (after, before)]
            lines.append(
                f'| {rate} | `"{split}"` | {after:.1f} ({waits[0]:.1f}) | {before:.1f}'
                f" ({waits[1]:.1f}) | {after / before:.3f} | {hidden[0]:.1%}, {hidden[1]:.1%} |"
            )
    return [
        *lines,
        "",
        "The library launches before. Both orders ran in the same rounds; their gradients are equal"
        ' to the bit. Launching after with `split="none"` is the synchronous mode.',
        "",
    ]


def mechanism_lines(measured: Mapping[str, Any], layers: int) -> list[str]:
    """Return the table of the simulated links."""
    rows = measured["rows"]
    split = median_ms(rows["none_split"]["seconds"])
    first = mechanism_medians(rows, next(iter(MECHANISM_TARGETS)))
    lines = [
        "## Mechanism: simulated links",
        "",
        "| link: MB/s, ms latency | synchronous share | no communication, ms | synchronous, ms"
        ' (waiting) | `split="none"`, ms (waiting) | share hidden | `split="batch"`, ms (waiting)'
        " | share hidden |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for share in MECHANISM_TARGETS:
        found = mechanism_medians(rows, share)
        link = measured["links"][share]
        sync, unsplit, domino = (
            median_ms(rows[f"{name}@{share}"]["waited"]) for name in ("sync", "unsplit", "batch")
        )
        unsplit_ms = median_ms(rows[f"unsplit@{share}"]["seconds"])
        lines.append(
            f"| {1e-6 / link['seconds_per_byte']:.0f}, {1e3 * link['latency_s']:.2f}"
            f" | {found.share:.1%} | {found.none:.1f} | {found.sync:.1f} ({sync:.1f})"
            f" | {unsplit_ms:.1f} ({unsplit:.1f})"
            f" | {share_hidden(found.none, found.sync, unsplit_ms):.1%}"
            f" | {found.domino:.1f} ({domino:.1f}) | {found.hidden:.1%} |"
        )
    transfers = rows[f"sync@{share}"]["collectives"], rows[f"batch@{share}"]["collectives"]
    return [
        *lines,
        "",
        f"A step makes {transfers[0]} transfers in the synchronous mode and {transfers[1]} with"
        " Domino. Without communication, two halves take"
        f" {_signed(split - first.none)} ms longer than the whole batch, the cost of smaller matrix"
        " products. The all-reduces of the head and the loss remain exposed, as do half of the"
        f" embedding's and half of the last one in each direction: with {layers} layers at most"
        f" {most_hidden(layers):.1%} can be hidden if two halves are as fast as the whole batch.",
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
        "| | ms per step | quartiles | speed / synchronous | share hidden | waiting, ms |"
        " collectives | MB per step, ledger | MB per step, interface |",
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
    """Return where the time between no communication and Domino goes."""
    if found is None or "none_split" not in rows:
        return []
    split, waited, rest = exposed_ms(rows, found)
    return [
        f"From no communication to Domino, {found.none:.1f} to {found.domino:.1f} ms:"
        f" {_signed(split)} ms for smaller matrix products (the split batch without"
        f" communication), {_signed(waited)} ms waiting for all-reduces, {_signed(rest)} ms in"
        " which gloo's threads and the kernel share the cores with the computation.",
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
    """Return the table of batch shapes, which shows where splitting is slower."""
    lines = [
        "## Where splitting is slower",
        "",
        "| rate | batch x tokens | KB per all-reduce | no communication, ms | synchronous, ms"
        ' | `split="none"`, ms | `split="batch"`, ms | speed / synchronous | |',
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for rate, nodes in laboratory.items():
        for shapes in zip(*nodes, strict=True):
            rows = merged(shapes)
            found = medians(rows)
            if found is None:
                continue
            batch, tokens = shapes[0]["shape"]
            # the ledger's mean per collective; all but the loss's all-reduces are hidden states
            kilobytes = rows["sync"]["payload_bytes"] / rows["sync"]["collectives"] / 1e3
            unsplit = median_ms(rows["unsplit"]["seconds"]) if "unsplit" in rows else found.sync
            verdict = "faster" if found.domino < unsplit else "slower"
            lines.append(
                f"| {rate} | {batch} x {tokens} | {kilobytes:.0f} | {found.none:.1f}"
                f" | {found.sync:.1f} | {unsplit:.1f} | {found.domino:.1f} | {found.speed:.2f}"
                f" | {verdict} |"
            )
    return [
        *lines,
        "",
        "KB per all-reduce: average over the collectives of the synchronous mode, from the ledger."
        " Splitting doubles the number of all-reduces and halves the matrix products. If an"
        " all-reduce takes little more than its latency, or the products are too small to keep the"
        ' cores busy, splitting is slower and `split="none"` is the better setting. Users can see'
        " this in two values that the strategy logs, the time waiting for all-reduces"
        ' (`comm/exposed_ms`) and the step time: after a change from `split="none"` to'
        ' `split="batch"`, splitting is slower if `comm/exposed_ms` decreases by less than the rest'
        " of the step increases. With `--shape`, `--hidden`, `--layers` and `--rates` this command"
        " measures other sizes.",
        "",
    ]


def page_lines(content: Mapping[str, Any]) -> list[str]:
    """Return the page below the provenance: targets and tables, then the method."""
    settings = content["settings"]
    lines = ["## Targets", "", *headline(content), "", *paper_lines(content["laboratory"])]
    if content["mechanism"]:
        lines += mechanism_lines(content["mechanism"], settings["mechanism_layers"])
    if content["laboratory"]:
        lines += order_lines(content["laboratory"])
    for rate, nodes in content["laboratory"].items():
        lines += rate_lines(rate, merged([node[0] for node in nodes]), nodes[0][0]["missing"])
    if content["laboratory"]:
        lines += size_lines(content["laboratory"])
    return [*lines, *method_lines(settings)]


def method_lines(settings: Mapping[str, Any]) -> list[str]:
    """Return the description of the method."""
    batch, tokens = settings["shape"]
    return [
        "## How it was measured",
        "",
        f"transformers' LlamaForCausalLM with random weights: hidden {settings['hidden']},"
        f" {settings['layers']} layers in the laboratory and {settings['mechanism_layers']} over"
        f" simulated links, vocabulary {settings['vocabulary']}; random tokens, batch"
        f" {batch} x {tokens}, fp32, tensor parallel over two ranks, one thread each. A step is"
        " forward with the loss, backward, fused AdamW. All rows run in one pair of processes, each"
        " with its own model; a round takes one step of each row in rotating order, between"
        f" barriers. Medians over {settings['rounds']} rounds: of the slower node's time, and of"
        " the mean waiting time of the nodes.",
        "",
        'Synchronous: Domino with `split="none"`, changed so that each all-reduce of backward is'
        " launched after the gradients of weights and nothing is left to overlap with."
        " Share hidden: (synchronous - Domino) / (synchronous - no communication). Without"
        " communication: the same sharded model, whose all-reduces complete immediately with wrong"
        " values. A simulated link transmits one transfer at a time and uses no CPU; its rate"
        " follows from the measured step without communication, and each transfer takes"
        f" {settings['latency_us']:.0f} microseconds more. parallelize_module: inputs of attention"
        " and MLP become DTensors once, so that backward has one all-reduce for each, and the loss"
        " is computed from sharded logits; transformers' plan is the one in the model's config.",
        "",
        "The picture is drawn from a Chrome trace of `torch.profiler` with named sublayers,"
        " launches and landings; profiling makes the step slightly longer. In flight: from the"
        " launch to the end of the landing, even if the result has arrived earlier.",
    ]
