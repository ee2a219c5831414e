"""How much of tensor parallelism's communication Domino hides: `python -m benchmarks.overlap`.

Two parts. *mechanism*: one process with simulated links, whose all-reduces take time but no CPU.
*laboratory*: two nodes with real sockets over shaped links (needs root and iproute2), compared with
the methods of PyTorch and transformers. Measurements are kept as JSON, so an interrupted call
continues where it stopped, and `--page-only` writes the page again. A Chrome trace of one step is
kept for the synchronous mode and for two of Domino's splits.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.page import provenance, result_page, write_page
from benchmarks.lab import LaboratoryUnavailable, NetLab, exit_on_signals
from benchmarks.overlap.job import TRACED
from benchmarks.overlap.link import NO_TIME, Link, SleepingChannel, link_for
from benchmarks.overlap.medians import median_ms
from benchmarks.overlap.methods import LABELS, Model, batch_of, ours
from benchmarks.overlap.page import TITLE, opening, page_lines
from benchmarks.overlap.rounds import Entry, run_rounds
from benchmarks.overlap.trace import draw_timeline, read_trace, record
from lightning_commfree.comm.ledger import Ledger

PAGE = Path(__file__).with_name("result.md")
PARTS = ("mechanism", "laboratory")
SHARES = (0.2, 0.3, 0.45)
RATES = ("2gbit", "1gbit", "500mbit")
SMALL = ((4, 64), (2, 64), (2, 32), (2, 8))  # where splitting may be slower
SMALL_ROWS = ("none", "sync", "unsplit", "batch")
NODES = 2
TRACED_SHARE = 0.3


class Raw:
    """Raw results, written to disk after every part.

    Args:
        path: of the JSON file; may exist.
        settings: common to all measurements.
        block: provenance of the measurements that will be added.

    Raises:
        ValueError: the file was measured with other settings.
    """

    def __init__(self, path: Path, settings: dict[str, Any], block: Sequence[str] = ()) -> None:
        self._path, self._block = path, list(block)
        self.content: dict[str, Any] = {
            "settings": settings,
            "made_by": [],
            "mechanism": None,
            "laboratory": {},
        }
        if path.exists():
            self.content = json.loads(path.read_text())
            if self.content["settings"] != settings:
                raise ValueError(
                    f"{path} was measured with {self.content['settings']}, not with {settings}."
                    " Use the same options, or another `--raw`."
                )

    def add(self, part: str, measured: Any, rate: str | None = None) -> None:
        """Add a part, or one rate of it."""
        if rate is None:
            self.content[part] = measured
        else:
            self.content[part][rate] = measured
        if self._block not in self.content["made_by"]:
            self.content["made_by"].append(self._block)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self.content, indent=1) + "\n")


def mechanism(
    model: Model, shape: Sequence[int], rounds: int, latency_s: float, traces: Path
) -> dict[str, Any]:
    """Measure over simulated links, one for each of `SHARES`, and trace one of them.

    The rate of a link follows from a measured step without communication: a step that waits for
    every transfer spends the given share of its time waiting.

    Returns:
        `compute_s`: the measured step; `links`: latency and rate by share; `rows`: timings by
        "METHOD" or "METHOD@SHARE".
    """
    channel = SleepingChannel(NODES, Ledger())
    methods = {name: ours(name, model.build(), channel) for name in TRACED}
    sync, batch = methods["sync"], methods["batch"]
    tokens = batch_of(shape, model.vocabulary)
    alone = run_rounds({"sync": Entry(sync)}, tokens, rounds=max(rounds // 4, 2))["sync"]
    compute_s = median_ms(alone.seconds) / 1e3
    links = {
        share: link_for(share, compute_s, alone.collectives, alone.payload_bytes, latency_s)
        for share in SHARES
    }

    def over(link: Link) -> Any:
        return lambda: setattr(channel, "link", link)

    entries = {"none": Entry(sync, over(NO_TIME)), "none_split": Entry(batch, over(NO_TIME))}
    for share, link in links.items():
        for name, method in methods.items():
            entries[f"{name}@{share}"] = Entry(method, over(link))
    rows = run_rounds(entries, tokens, rounds)
    channel.link = links[TRACED_SHARE]
    for method in methods.values():
        record(method, tokens, traces / "mechanism" / f"{method.name}.json")
    return {
        "compute_s": compute_s,
        "links": {str(share): asdict(link) for share, link in links.items()},
        "rows": {name: asdict(timing) for name, timing in rows.items()},
    }


def laboratory(rate: str, options: argparse.Namespace) -> list[list[dict[str, Any]]]:
    """Measure on two nodes at one rate; return for each node a dictionary per shape.

    Raises:
        LaboratoryUnavailable: this machine cannot run the laboratory.
        RuntimeError: a node failed; the message contains its output.
    """
    shapes = [{"shape": options.shape, "rows": options.rows, "rounds": options.rounds}]
    rows = [row for row in SMALL_ROWS if row in options.rows]
    shapes += [{"shape": s, "rows": rows, "rounds": options.rounds} for s in options.small]
    plan = json.dumps({"model": asdict(model_of(options, options.layers)), "shapes": shapes})
    folders = [(options.traces / rate / f"node{node}").resolve() for node in range(NODES)]
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    job = [sys.executable, "-m", "benchmarks.overlap.job", plan]
    env = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with NetLab(NODES, rate) as lab:
        commands = [[*job, str(folder)] for folder in folders]
        results = lab.run(commands, timeout_s=options.timeout, env=env)
    bad = [result for result in results if result.returncode]
    if bad:
        raise RuntimeError(f"A node ended with code {bad[0].returncode}:\n{bad[0].output}")
    return [json.loads((folder / "measured.json").read_text()) for folder in folders]


def measure(raw: Raw, options: argparse.Namespace) -> None:
    """Measure everything missing from `raw` in the requested parts."""
    if "mechanism" in options.parts and raw.content["mechanism"] is None:
        model = model_of(options, options.mechanism_layers)
        latency_s = options.latency_us / 1e6
        measured = mechanism(model, options.shape, options.rounds, latency_s, options.traces)
        raw.add("mechanism", measured)
        print("mechanism: measured", flush=True)
    for rate in options.rates if "laboratory" in options.parts else ():
        if rate not in raw.content["laboratory"]:
            raw.add("laboratory", laboratory(rate, options), rate)
            print(f"{rate}: measured", flush=True)


def model_of(options: argparse.Namespace, layers: int) -> Model:
    """Return the model of a part."""
    model = Model(options.hidden, layers, vocabulary=options.vocabulary)
    return replace(model, positions=options.shape[1])


def draw(content: dict[str, Any], options: argparse.Namespace) -> str | None:
    """Draw the timeline of the laboratory's middle rate, or of the mechanism; return the caption.

    Returns None if nothing has been measured.
    """
    measured = list(content["laboratory"])
    if measured:
        rate = measured[len(measured) // 2]
        caption, folder = f"node 0 at {rate}", options.traces / rate / "node0"
    elif content["mechanism"]:
        caption = f"a simulated link, {TRACED_SHARE:.0%} of the synchronous step"
        folder = options.traces / "mechanism"
    else:
        return None
    files = {name: folder / f"{name}.json" for name in TRACED}
    spans = {LABELS[name]: read_trace(file) for name, file in files.items() if file.exists()}
    if not spans:
        return None
    draw_timeline(spans, f"One step, {caption}", options.page.with_suffix(".png"))
    return caption


def shape_of(text: str) -> list[int]:
    """Return batch and tokens from a word such as 8x128."""
    try:
        rows, tokens = (int(number) for number in text.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape such as 8x128") from None
    if rows < 2 or tokens < 2:
        raise argparse.ArgumentTypeError(f"{text!r}: batch and tokens must be 2 or more")
    return [rows, tokens]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, checked."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.overlap", description=__doc__.splitlines()[0]
    )
    add = parser.add_argument
    add("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    add("--rates", nargs="+", default=list(RATES), help="of the laboratory's links")
    add("--rows", nargs="+", default=list(LABELS), choices=list(LABELS))
    add("--rounds", type=int, default=24, help="measured steps of each row (%(default)s)")
    add("--hidden", type=int, default=512)
    add("--layers", type=int, default=4, help="in the laboratory (%(default)s)")
    add("--mechanism-layers", type=int, default=16)
    add("--vocabulary", type=int, default=4096)
    add("--shape", type=shape_of, default=[8, 128], help="batch x tokens (8x128)")
    small = [list(shape) for shape in SMALL]
    add("--small", nargs="*", type=shape_of, default=small, help="smaller batches")
    add("--latency-us", type=float, default=100.0, help="of a transfer over a simulated link")
    add("--timeout", type=float, default=3000.0, help="seconds per rate")
    add("--traces", type=Path, default=Path("outputs/bench/overlap_traces"))
    add("--raw", type=Path, default=Path("outputs/bench/overlap.json"))
    add("--page", type=Path, default=PAGE)
    add("--page-only", action="store_true", help="measure nothing")
    options = parser.parse_args(arguments)
    for name in ("rounds", "layers", "mechanism_layers"):
        if getattr(options, name) < 1:
            flag = "--" + name.replace("_", "-")
            parser.error(f"{flag} must be 1 or more, not {getattr(options, name)}")
    return options


_SETTINGS = (
    *("rounds", "hidden", "layers", "mechanism_layers", "vocabulary", "shape", "latency_us"),
    *("rows", "small"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write the page and its picture."""
    options = parse(arguments)
    exit_on_signals()
    torch.set_num_threads(1)
    block = provenance("overlap", arguments, options.page)
    settings = {name: getattr(options, name) for name in _SETTINGS}
    try:
        raw = Raw(options.raw, settings, block)
        if not options.page_only:
            measure(raw, options)
    except LaboratoryUnavailable as error:
        print(f"{error} `--parts mechanism` does not need it.", file=sys.stderr)
        return 2
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    caption = draw(raw.content, options)
    first = opening(raw.content, caption, f"{options.page.stem}.png")
    lines = result_page(TITLE, first, raw.content["made_by"], page_lines(raw.content))
    write_page(options.page, lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
