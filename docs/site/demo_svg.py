"""Run the demo and draw what it prints into docs/assets/demo.svg; two minutes on two cores.

python -m docs.site.demo_svg
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "docs/assets/demo.svg"
COLUMNS = 80
COMMAND = ["-m", "recipes.pretrain", "experiment=demo", "hydra.run.dir=outputs/pretrain/demo"]
_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)  # on a server; any monospaced font will do
_PROGRESS = re.compile(r"step |(loading|training|tokenizing|validating|exporting|writing)[ ,]")


def run_demo() -> list[str]:
    """Return the lines that the demo prints into a pipe, with its last progress line only."""
    variables = {**os.environ, "COLUMNS": str(COLUMNS), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, *COMMAND],
        cwd=ROOT,
        env=variables,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    lines = ran.stdout.splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    end = lines.index(steps[-1])
    return [line for n, line in enumerate(lines) if n == end or not _PROGRESS.match(line)]


def draw(lines: list[str]) -> str:
    """Return an SVG of a terminal with the command and its output."""
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere)
        for line in ["$ make demo", *lines]:
            console.print(Text(line))
        return _FONTS.sub("", console.export_svg(title="make demo", unique_id="demo"))


def main() -> None:
    """Run the demo and write the picture."""
    TARGET.write_text(draw(run_demo()), encoding="utf-8")


if __name__ == "__main__":
    main()
