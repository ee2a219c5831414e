"""Does `split="auto"` of Domino lose to a fixed split? `python -m benchmarks.auto_split`.

Two nodes of the laboratory share a GPT-2. For each size of batch "auto" is given its trial first.
Then passes of all four settings follow, in an order that is drawn for every round. It takes root
and iproute2.
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

from benchmarks.auto_split.job import FIXED, LAYERS, MOST, SPLITS, TOKENS, WIDTH
from benchmarks.common.page import provenance, result_page, write_page
from benchmarks.lab import LaboratoryUnavailable, NetLab, exit_on_signals

PAGE = Path(__file__).with_name("result.md")
TITLE = 'Does `split="auto"` choose well?'
MOST_LOST = 1.02  # of the best fixed split's time
HOW_TO_READ = f"""\
Milliseconds of a forward and backward of a GPT-2 with {LAYERS} blocks of width {WIDTH}, divided
among two nodes with one thread each; medians over the rounds of the slower node. Batches have rows
of {TOKENS} tokens. *Chosen* is what "auto" has taken, by its own measurements, after so many passes
(*trial*). *Ratio*: in every round, the time of the chosen split over that of the best one, which is
the one with the smallest median; then the median over rounds, and between which values 95 % of such
medians lie. *Itself*: the same for "auto" over the chosen split. Both run the same events, which
the job asserts: it says what choosing costs, and what this machine cannot tell. The rule, written
before the run: met if every ratio is at most {MOST_LOST:g}."""


class Cell(NamedTuple):
    """What was found for a rate and a number of rows."""

    passes: Mapping[str, Sequence[float]]  # seconds, round by round
    chosen: str
    trial: int  # passes until it was chosen

    @property
    def rounds(self) -> int:
        """Passes of every split."""
        return len(self.passes["auto"])

    @property
    def ms(self) -> dict[str, float]:
        """The medians in milliseconds."""
        return {split: 1e3 * statistics.median(each) for split, each in self.passes.items()}

    @property
    def best(self) -> str:
        """The fixed split that took least."""
        return min(FIXED, key=self.ms.__getitem__)

    def beside(self, split: str, other: str) -> tuple[float, float, float]:
        """Return a split's time over another's: the median over rounds, and its 95 % interval."""
        pairs = zip(self.passes[split], self.passes[other], strict=True)
        ratios = sorted(mine / its for mine, its in pairs)
        half = 0.98 * len(ratios) ** 0.5  # of the ranks between which a median lies
        low, high = round(len(ratios) / 2 - half), round(len(ratios) / 2 + half)
        ends = ratios[max(low, 0)], ratios[min(high, len(ratios) - 1)]
        return statistics.median(ratios), *ends

    @property
    def ratio(self) -> float:
        """Time of the chosen split over that of the best one."""
        return self.beside(self.chosen, self.best)[0]


Cells = Mapping[tuple[str, int], Cell]


def cells_of(nodes: Sequence[Sequence[tuple[int, str, float | str]]]) -> dict[int, Cell]:
    """Return the cells by rows, of what each node has written."""
    found: dict[int, Cell] = {}
    for rows in dict.fromkeys(rows for rows, *_ in nodes[0]):
        lines = [[line for line in node if line[0] == rows] for node in nodes]
        (chosen,) = {str(value) for node in lines for _, what, value in node if what == "chosen"}
        (trial,) = {int(value) for node in lines for _, what, value in node if what == "trial"}
        passes = {
            split: [[float(s) for _, what, s in node if what == split] for node in lines]
            for split in SPLITS
        }
        slower = {
            split: [max(pair) for pair in zip(*by_node, strict=True)]
            for split, by_node in passes.items()
        }
        found[rows] = Cell(slower, chosen, trial)
    return found


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
            results = lab.run(commands, timeout_s=1500, env={"OMP_NUM_THREADS": "1"})
            for result in results:
                if result.returncode:
                    raise RuntimeError(f"A node failed:\n{result.output}")
            print(results[0].output, flush=True)
            written = [
                [json.loads(line) for line in file.read_text().splitlines()] for file in files
            ]
        found |= {(rate, number): cell for number, cell in cells_of(written).items()}
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
        "| link | rows | " + ", ms | ".join(SPLITS) + ", ms | chosen | trial | ratio | itself"
        " | rounds |",
        "|---" * (len(SPLITS) + 7) + "|",
    ]
    for (rate, rows), cell in cells.items():
        times = " | ".join(f"{cell.ms[split]:.1f}" for split in SPLITS)
        pairs = [(cell.chosen, cell.best), ("auto", cell.chosen)]
        ratio, itself = ("{:.3f} ({:.3f} to {:.3f})".format(*cell.beside(*pair)) for pair in pairs)
        if cell.chosen == cell.best:
            ratio = "1"
        lines.append(
            f"| {rate} | {rows} | {times} | {cell.chosen} | {cell.trial} | {ratio} | {itself}"
            f" | {cell.rounds} |"
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
