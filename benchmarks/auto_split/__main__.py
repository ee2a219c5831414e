"""Compare `split="auto"` of Domino with fixed splits: `python -m benchmarks.auto_split`.

Two nodes of the laboratory share a GPT-2. For each batch size, "auto" first completes its trial.
Passes of all fixed splits then determine the best one. If "auto" chose another one, further passes
of these two measure how much slower it is. It needs root and iproute2.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.auto_split.job import FIXED, LAYERS, MOST, TOKENS, WIDTH
from benchmarks.common.page import provenance, result_page, write_page
from benchmarks.lab import LaboratoryUnavailable, NetLab, exit_on_signals
from lightning_commfree.domino.settings import AUTO

PAGE = Path(__file__).with_name("result.md")
TITLE = 'Does `split="auto"` choose well?'
MOST_LOST = 1.02  # of the best fixed split's time
HOW_TO_READ = f"""\
Milliseconds of a forward and backward pass of a GPT-2 with {LAYERS} blocks of width {WIDTH},
sharded over two nodes with one thread each; medians over rounds of the slower node. Batches have
rows of {TOKENS} tokens. *Chosen* is the split that "auto" took from its own measurements, after
the number of passes in *trial*. *Ratio* is the time of "auto" over the time of the best fixed
split, compared round by round in separate rounds of these two: the median and its 95 % confidence
interval. It is 1 where "auto" chose the best split, because both then run the same events (the
job asserts this). The rule, written before the run: met if every ratio is at most {MOST_LOST:g}."""


class Cell(NamedTuple):
    """Measurements for one rate and batch size."""

    chosen: str
    trial: int  # passes until the choice
    passes: Mapping[str, Sequence[float]]  # seconds of the fixed splits, by round
    pair: Mapping[str, Sequence[float]]  # of "auto" and the best split; empty if they are the same

    @property
    def ms(self) -> dict[str, float]:
        """The medians in milliseconds."""
        return {split: 1e3 * statistics.median(each) for split, each in self.passes.items()}

    @property
    def best(self) -> str:
        """The fastest fixed split."""
        return min(FIXED, key=self.ms.__getitem__)

    @property
    def ratio_interval(self) -> tuple[float, float, float]:
        """Median over rounds of the time of "auto" over the best split's, and its 95 % interval."""
        if not self.pair:
            return 1, 1, 1
        ratios = sorted(
            own / its for own, its in zip(self.pair[AUTO], self.pair[self.best], strict=True)
        )
        half = 0.98 * len(ratios) ** 0.5  # half width of the interval, in ranks
        low, high = round(len(ratios) / 2 - half), round(len(ratios) / 2 + half)
        ends = ratios[max(low, 0)], ratios[min(high, len(ratios) - 1)]
        return statistics.median(ratios), *ends

    @property
    def ratio(self) -> float:
        """Median time of "auto" over the best fixed split's."""
        return self.ratio_interval[0]


Cells = Mapping[tuple[str, int], Cell]


def measure(rates: Sequence[str], rows: Sequence[int], most_rounds: int) -> Cells:
    """Measure all cells.

    Raises:
        LaboratoryUnavailable: this machine cannot run the laboratory.
        RuntimeError: a node failed.
    """
    found: dict[tuple[str, int], Cell] = {}
    for rate in rates:
        plan = json.dumps({"rows": rows, "most_rounds": most_rounds})
        with tempfile.TemporaryDirectory() as folder, NetLab(2, rate) as lab:
            files = [Path(folder) / f"{node}.jsonl" for node in range(2)]
            command = [sys.executable, "-m", "benchmarks.auto_split.job", plan]
            commands = [[*command, str(file)] for file in files]
            results = lab.run(commands, timeout_s=2400, env={"OMP_NUM_THREADS": "1"})
            for result in results:
                if result.returncode:
                    raise RuntimeError(f"A node failed:\n{result.output}")
            print(results[0].output, flush=True)
            written = [json.loads(line) for line in files[0].read_text().splitlines()]
        found |= {(rate, line.pop("rows")): Cell(**line) for line in written}
    return found


def opening(cells: Cells) -> list[str]:
    """Return the question and the finding, for the top of the page."""
    worst = max(cells, key=lambda key: cells[key].ratio)
    met = [cell for cell in cells.values() if cell.ratio <= MOST_LOST]
    right = [cell for cell in cells.values() if cell.chosen == cell.best]
    trials = [cell.trial for cell in cells.values()]
    verdict = "met" if len(met) == len(cells) else "missed"
    return [
        "Splitting a batch is faster for large batches on slow links and slower elsewhere. Does"
        ' `split="auto"` find the fastest split?',
        "",
        f"- **Found:** within {MOST_LOST - 1:.0%} of the best fixed split in {len(met)} of"
        f" {len(cells)} cells ({verdict}); at worst {cells[worst].ratio:.3f}"
        f" ({worst[1]} x {TOKENS} tokens at {worst[0]}).",
        f"- It chose the split that is fastest by this page's medians in {len(right)} of"
        f" {len(cells)} cells, after {min(trials)} to {max(trials)} passes, which train as usual.",
    ]


def page_lines(cells: Cells) -> list[str]:
    """Return the page below the provenance."""
    lines = [
        "| link | rows | " + ", ms | ".join(FIXED) + ", ms | rounds | chosen | trial | ratio"
        " | rounds |",
        "|---" * (len(FIXED) + 7) + "|",
    ]
    for (rate, rows), cell in cells.items():
        times = " | ".join(f"{cell.ms[split]:.1f}" for split in FIXED)
        of_all, of_two = len(cell.passes["none"]), len(cell.pair.get(AUTO, ()))
        ratio = "{:.3f} ({:.3f} to {:.3f})".format(*cell.ratio_interval) if cell.pair else "1"
        lines.append(
            f"| {rate} | {rows} | {times} | {of_all} | {cell.chosen} | {cell.trial} | {ratio}"
            f" | {of_two or ''} |"
        )
    return ["## The passes", "", *HOW_TO_READ.splitlines(), "", *lines]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.auto_split", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--rates", nargs="+", default=["500mbit", "2gbit", "10gbit"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--most-rounds", type=int, default=MOST)
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args(arguments)
    exit_on_signals()
    block = provenance("auto_split", arguments, options.page)
    try:
        cells = measure(options.rates, options.rows, options.most_rounds)
    except (LaboratoryUnavailable, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    write_page(options.page, result_page(TITLE, opening(cells), [block], page_lines(cells)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
