"""Compare the step time of elastic and fixed replicas: `python -m benchmarks.elastic_step`.

Two replicas train the same model, with the same settings of exchanges, under
`StreamingDiLoCoStrategy`, and under `ElasticDiLoCoStrategy` with a folder and with a TCPStore.
Nobody joins, leaves or is late. The jobs take turns, one fit each in a round.

Success: the median step of elastic replicas takes at most 1.02 times as long, with both stores.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from benchmarks.common.page import provenance, result_page, write_page
from benchmarks.elastic_step.job import BATCH, LENGTH, REPLICAS, SETTINGS, WARM_UP
from lightning_commfree.stores.tcp import serve

PAGE = Path(__file__).with_name("result.md")
TITLE = "What does an elastic replica pay if nobody joins or leaves?"
BOUND = 1.02
FIXED, FOLDER, TCP = "StreamingDiLoCoStrategy", "elastic, a folder", "elastic, a TCPStore"
JOB = ["-m", "benchmarks.elastic_step.job"]
Seconds = Mapping[str, Sequence[float]]  # mean step of each fit, by kind of job


def fixed_fit(steps: int, folder: Path) -> float:
    """Return the mean step of a fit of fixed replicas in seconds."""
    out = folder / "fixed.json"
    torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={REPLICAS}"]
    subprocess.run([sys.executable, "-m", *torchrun, *JOB, str(steps), str(out)], check=True)
    return float(json.loads(out.read_text()))


def elastic_fit(url: str, steps: int, folder: Path) -> float:
    """Return the mean step of a fit of elastic replicas in seconds, of the slower one.

    Raises:
        RuntimeError: a replica failed.
    """
    outs = [folder / f"{replica}.json" for replica in range(REPLICAS)]
    env = {**os.environ, "COMMFREE_STORE": url}
    commands = ([sys.executable, *JOB, str(steps), str(out)] for out in outs)
    replicas = [subprocess.Popen(command, env=env) for command in commands]
    codes = [replica.wait() for replica in replicas]
    if any(codes):
        raise RuntimeError(f"A replica of the job in {url} failed.")
    return max(float(json.loads(out.read_text())) for out in outs)


@contextmanager
def tcp_store() -> Iterator[str]:
    """Serve a store, and yield its URL."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    server = serve("127.0.0.1", port)
    yield f"tcp://127.0.0.1:{port}"
    del server


def fits() -> dict[str, Callable[[int, Path], float]]:
    """Return what runs a fit in an empty folder, by kind of job."""

    def on_a_folder(steps: int, folder: Path) -> float:
        store = folder / "store"
        store.mkdir()
        return elastic_fit(f"file://{store}", steps, folder)

    def on_tcp(steps: int, folder: Path) -> float:
        with tcp_store() as url:
            return elastic_fit(url, steps, folder)

    return {FIXED: fixed_fit, FOLDER: on_a_folder, TCP: on_tcp}


def measure(steps: int, rounds: int) -> Seconds:
    """Run each kind of job once a round, in turns that change from round to round."""
    found: dict[str, list[float]] = {kind: [] for kind in fits()}
    for i in range(rounds):
        order = list(fits().items())
        for kind, fit in order if i % 2 else reversed(order):
            with tempfile.TemporaryDirectory() as folder:
                found[kind].append(fit(steps, Path(folder)))
    return found


def page_of(seconds: Seconds, steps: int, block: Sequence[str]) -> list[str]:
    """Return the page."""
    medians = {kind: median(values) for kind, values in seconds.items()}
    ratios = {kind: value / medians[FIXED] for kind, value in medians.items()}
    verdict = "met" if max(ratios[FOLDER], ratios[TCP]) <= BOUND else "missed"
    opening = [
        f"**Found:** a step takes {ratios[FOLDER]:.3f} times as long as under"
        f" `StreamingDiLoCoStrategy` with a folder, and {ratios[TCP]:.3f} times with a TCPStore"
        f" (bound: {BOUND}): {verdict}."
    ]
    rounds = range(1, len(seconds[FIXED]) + 1)
    rows = [
        f"| {kind} | {1e3 * medians[kind]:.1f} | {ratios[kind]:.3f} |"
        f" {' | '.join(f'{1e3 * one:.1f}' for one in values)} |"
        for kind, values in seconds.items()
    ]
    settings = ", ".join(f"`{name}={value}`" for name, value in SETTINGS.items())
    body = [
        "## The fits",
        "",
        f"{REPLICAS} replicas on one machine, a GPT-2 with 5.8 million parameters, {BATCH} rows of"
        f" {LENGTH} tokens a step, {settings}. Mean step of a fit over {steps} steps after"
        f" {WARM_UP} others, in milliseconds; of the slower replica if they are elastic, which"
        " wait for each other at every exchange.",
        "",
        f"| job | median, ms | ratio | {' | '.join(f'round {n}' for n in rounds)} |",
        f"|---|---|---|{'---|' * len(rounds)}",
        *rows,
    ]
    return result_page(TITLE, opening, [block], body)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.elastic_step", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--steps", type=int, default=96, help="measured, of a fit (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="fits of each kind (%(default)s)")
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args(arguments)
    if options.steps % SETTINGS["sync_every"]:
        parser.error(f"--steps must be a multiple of {SETTINGS['sync_every']}, for whole cycles")
    block = provenance("elastic_step", arguments, options.page)
    write_page(options.page, page_of(measure(options.steps, options.rounds), options.steps, block))


if __name__ == "__main__":
    main()
