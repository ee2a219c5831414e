"""Time a resume early and late in an epoch: `python -m benchmarks.resume_position`.

Two replicas of Streaming DiLoCo train on a map-style data set, shuffled, and save after batch 20
and batch 20,000 of one epoch. Other fits resume from both, with 1 ms to read a row, and are timed
from the start of `fit` to the end of the first batch. Reading 20,000 batches would take 20 seconds.

Success: the median resume at batch 20,000 starts within one second of the one at batch 20.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from benchmarks.common.page import provenance, result_page, write_page
from benchmarks.resume_position.job import SYNC_EVERY

PAGE = Path(__file__).with_name("result.md")
TITLE = "How long does a resume take to find its position in the data?"
RANKS = 2
BOUND_S = 1.0  # of the median at the last position, more than at the first one
Seconds = Mapping[int, Sequence[float]]  # of the slower rank, by batches before the save


def measure(batches: Sequence[int], rounds: int, delay_s: float) -> Seconds:
    """Measure the seconds of every resume.

    Raises:
        subprocess.CalledProcessError: a rank failed.
    """
    plan = {"ranks": RANKS, "batches": batches, "rounds": rounds, "delay_s": delay_s}
    with tempfile.TemporaryDirectory() as folder:
        torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        job = ["-m", "benchmarks.resume_position.job", json.dumps(plan), folder]
        subprocess.run([sys.executable, "-m", *torchrun, *job], check=True)
        ranks = [dict(json.loads((Path(folder) / f"{r}.json").read_text())) for r in range(RANKS)]
    return {
        count: [max(both) for both in zip(*(rank[count] for rank in ranks), strict=True)]
        for count in batches
    }


def page_of(seconds: Seconds, delay_s: float, block: Sequence[str]) -> list[str]:
    """Return the page."""
    medians = {count: median(values) for count, values in seconds.items()}
    (first, early), (last, late) = min(medians.items()), max(medians.items())
    verdict = "met" if late - early <= BOUND_S else "missed"
    opening = [
        "A fit that resumes in the middle of an epoch must not train on the same batches again."
        " Does it take longer where more batches are done?",
        "",
        f"**Found:** with {1e3 * delay_s:g} ms to read a batch, the resume at batch {last:,} starts"
        f" {late - early:+.2f} s after the one at batch {first:,}; to read as many batches would"
        f" take {delay_s * (last - first):.1f} s (bound: {BOUND_S:+g} s): {verdict}.",
    ]
    rounds = range(1, len(seconds[first]) + 1)
    rows = [
        f"| {count:,} | {medians[count]:.2f} | {' | '.join(f'{one:.2f}' for one in values)} |"
        for count, values in seconds.items()
    ]
    body = [
        "## The resumes",
        "",
        f"{RANKS} replicas of Streaming DiLoCo (`sync_every={SYNC_EVERY}`) with a linear layer;"
        " batches of one row, from a shuffled map-style data set without workers. Seconds from the"
        " start of `fit` to the end of the first batch, of the slower rank. Each resumed fit is"
        " checked to be trained on the row that the fit that saved was trained on next.",
        "",
        f"| batches before the save | median, s | {' | '.join(f'round {n}' for n in rounds)} |",
        f"|---|---|{'---|' * len(rounds)}",
        *rows,
    ]
    return result_page(TITLE, opening, [block], body)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.resume_position", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[20, 20_000])
    parser.add_argument("--rounds", type=int, default=5, help="resumes from each (%(default)s)")
    parser.add_argument("--delay-ms", type=float, default=1.0, help="to read a row (%(default)s)")
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args(arguments)
    block = provenance("resume_position", arguments, options.page)
    delay_s = options.delay_ms / 1e3
    seconds = measure(options.batches, options.rounds, delay_s)
    write_page(options.page, page_of(seconds, delay_s, block))


if __name__ == "__main__":
    main()
