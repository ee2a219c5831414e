"""Seconds from typing a command to its first word, and to the end of its `--help`.

Run it as `python -m benchmarks.start`; `--help` lists the options. Commands take turns, so that
what else the machine does meets all of them alike. A command that would run for long is ended after
its first word. No page: what is asked is whether all of it stays below two seconds here.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import NamedTuple

MOST_S = 2.0  # that a first word may take, on an idle machine
_HELP = "--help"
_GIVEN = "--parameters 124e6 --blocks 12 --step-time 0.35 --bandwidth 0.1"
COMMANDS = (
    *(f"-m recipes.{name} {_HELP}" for name in ("pretrain", "finetune", "compare", "plan")),
    f"-m commfree_planner.command {_HELP}",
    f"-m commfree_planner.command {_GIVEN}",
    "-m recipes.pretrain trainer.max_steps=2",
    "-m recipes.finetune experiment=finetune_demo",
    "-m recipes.compare trainer.max_steps=2",
    "-m recipes.plan step_time=1 bandwidth=1",
)


class Start(NamedTuple):
    """One start of a command.

    Attributes:
        first_s: until its first word, in seconds.
        cpu_s: of the processor until it ended; None: it was ended after the first word.
    """

    first_s: float
    cpu_s: float | None


def started(words: Sequence[str], to_the_end: bool) -> Start:
    """Start a command and read its first word.

    Args:
        words: what follows `python`.
        to_the_end: wait until it ends by itself.

    Raises:
        RuntimeError: it said nothing, or failed.
    """
    begin = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # to be ended with all that it starts
    )
    assert process.stdout is not None, "it is a pipe"
    said = os.read(process.stdout.fileno(), 2**16)
    first_s = time.monotonic() - begin
    if not to_the_end:
        os.killpg(process.pid, signal.SIGKILL)
    said += process.stdout.read()
    process.stdout.close()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if not said.strip() or (to_the_end and process.returncode):
        raise RuntimeError(
            f"`python {' '.join(words)}` ended with {process.returncode} and said: {said!r}"
        )
    return Start(first_s, usage.ru_utime + usage.ru_stime if to_the_end else None)


def row(command: str, starts: Sequence[Start]) -> str:
    """Return a line of the table: medians over the rounds."""
    first_s = statistics.median(start.first_s for start in starts)
    cpu = [start.cpu_s for start in starts if start.cpu_s is not None]
    told = f"{statistics.median(cpu):6.2f}" if cpu else "     -"
    verdict = "met" if first_s <= MOST_S else "missed"
    return f"{first_s:10.2f}  {told}  {verdict:6}  python {command}"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure with the options in `argv` (None: of the command line) and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.start", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="starts of a command (%(default)s)")
    parser.add_argument("--commands", nargs="+", default=COMMANDS, help="what follows python")
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error(f"rounds={args.rounds} must be 1 or more")

    load, cores = os.getloadavg()[0], os.cpu_count()
    print(
        f"{args.rounds} rounds, {cores} cores, {load:.1f} processes at work before (an idle one: 0)"
    )
    starts: dict[str, list[Start]] = {command: [] for command in args.commands}
    with tempfile.TemporaryDirectory(prefix="start-") as folder:
        for _ in range(args.rounds):
            for command, found in starts.items():
                # its folder, which it may have made when it is ended
                place = [] if "planner" in command else [f"hydra.run.dir={folder}/run"]
                to_the_end = _HELP in command or not place
                found.append(started([*command.split(), *place], to_the_end))

    print(f"{'first word':>10}  {'CPU s':>6}  {MOST_S:g} s   command")
    for command, found in starts.items():
        print(row(command, found))


if __name__ == "__main__":
    main()
