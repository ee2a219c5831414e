"""Does `split="auto"` of Domino lose to a fixed split? `python -m benchmarks.auto_split`.

Two nodes of the laboratory share a GPT-2. For each size of batch "auto" is given its trial first.
Then passes of the fixed splits say which is the best, and, where that is another one, passes of
"auto" and of the best one how far it is behind. It takes root and iproute2.
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
Milliseconds of a forward and backward of a GPT-2 with {LAYERS} blocks of width {WIDTH}, divided
among two nodes with one thread each; medians over rounds of the slower node. Batches have rows of
{TOKENS} tokens. *Chosen* is what "auto" has taken, by its own measurements, after so many passes
(*trial*). *Ratio*: the time of "auto" over that of the best fixed split, round by round, in rounds
of these two that follow the others; then the median, and between which values 95 % of such medians
lie. It is 1 where "auto" has chosen the best split: both run the same events then, which the job
asserts. The rule, written before the run: met if every ratio is at most {MOST_LOST:g}."""


class Cell(NamedTuple):
    """What was found for a rate and a number of rows."""

    chosen: str
    trial: int  # passes until it was chosen
    passes: Mapping[str, Sequence[float]]  # seconds, round by round, of the fixed splits
    pair: Mapping[str, Sequence[float]]  # of "auto" and the best one, if that is another one

    @property
    def ms(self) -> dict[str, float]:
        """The medians in milliseconds."""
        return {split: 1e3 * statistics.median(each) for split, each in self.passes.items()}

    @property
    def best(self) -> str:
        """The fixed split that took least."""
        return min(FIXED, key=self.ms.__getitem__)

    @property
    def behind(self) -> tuple[float, float, float]:
        """Time of "auto" over that of the best: the median over rounds, and its 95 % interval."""
        if not self.pair:
            return 1, 1, 1
        ratios = sorted(
            own / its for own, its in zip(self.pair[AUTO], self.pair[self.best], strict=True)
        )
        half = 0.98 * len(ratios) ** 0.5  # of the ranks between which a median lies
        low, high = round(len(ratios) / 2 - half), round(len(ratios) / 2 + half)
        ends = ratios[max(low, 0)], ratios[min(high, len(ratios) - 1)]
        return statistics.median(ratios), *ends

    @property
    def ratio(self) -> float:
        """Time of "auto" over that of the best fixed split."""
        return self.behind[0]


Cells = Mapping[tuple[str, int], Cell]


def measure(rates: Sequence[str], rows: Sequence[int], most_rounds: int) -> Cells:
    """Return what was found.

    Raises:
        LaboratoryUnavailable: where this machine cannot make the laboratory.
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
    """Return what was asked and what was found, for the top of the page."""
    worst = max(cells, key=lambda key: cells[key].ratio)
    met = [cell for cell in cells.values() if cell.ratio <= MOST_LOST]
    right = [cell for cell in cells.values() if cell.chosen == cell.best]
    trials = [cell.trial for cell in cells.values()]
    verdict = "met" if len(met) == len(cells) else "missed"
    return [
        "Splitting a batch pays for large ones on slow links, and costs time elsewhere. Does"
        ' `split="auto"` find what is fastest?',
        "",
        f"- **Found:** within {MOST_LOST - 1:.0%} of the best fixed split in {len(met)} of"
        f" {len(cells)} cells ({verdict}); at worst {cells[worst].ratio:.3f}"
        f" ({worst[1]} x {TOKENS} tokens at {worst[0]}).",
        f"- The fastest split by this page's medians was chosen in {len(right)} of {len(cells)},"
        f" after {min(trials)} to {max(trials)} passes, which train.",
    ]


def page_lines(cells: Cells) -> list[str]:
    """Return the page below its provenance."""
    lines = [
        "| link | rows | " + ", ms | ".join(FIXED) + ", ms | rounds | chosen | trial | ratio"
        " | rounds |",
        "|---" * (len(FIXED) + 7) + "|",
    ]
    for (rate, rows), cell in cells.items():
        times = " | ".join(f"{cell.ms[split]:.1f}" for split in FIXED)
        of_all, of_two = len(cell.passes["none"]), len(cell.pair.get(AUTO, ()))
        ratio = "{:.3f} ({:.3f} to {:.3f})".format(*cell.behind) if cell.pair else "1"
        lines.append(
            f"| {rate} | {rows} | {times} | {of_all} | {cell.chosen} | {cell.trial} | {ratio}"
            f" | {of_two or ''} |"
        )
    return ["## The passes", "", *HOW_TO_READ.splitlines(), "", *lines]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, then write the page."""
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
