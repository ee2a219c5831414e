"""What a whole pretraining prints on a terminal of 80 columns.

Figures differ from machine to machine: numbers, paths and the progress bar's frames stand as marks.
"""

from __future__ import annotations

import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from fcntl import ioctl
from pathlib import Path

import pytest

from tests.recipes.test_compare import TOY

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden"  # what commands print; look at a change and copy it
TIMEOUT_S = 240
COLUMNS = 80
PRETRAIN = ["recipes.pretrain", *TOY, "cache_dir=cache", "trainer.devices=2"]
_ESCAPE = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|[()][A-Z0-9])")
_BAR = re.compile(r"[━╸╺█▏▎▍▌▋▊▉╴]+")
# what runs on slow machines say besides
_STAGES = "making|loading the|validating|exporting|writing|training|tokenizing|reading"
_SLOW = re.compile(rf"({_STAGES}) |loading .*, #:#$")
_LIBRARY = re.compile(rf"{re.escape(str(ROOT))}/lightning_commfree/[\w/]+\.py")
_NUMBER = re.compile(r"(?<![\w.])[+-]?\d[\d,]*(\.\d+)?(e[+-]?\d+)?%?|(?<=[\w/=:.-])\d+(\.\d+)?")


def on_terminal(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    """Return all that a command writes to a terminal of 80 columns."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    written, ends = b"", time.monotonic() + TIMEOUT_S
    while time.monotonic() < ends:
        if not select.select([ours], [], [], 1)[0]:
            if process.poll() is not None:
                break
            continue
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other end is closed: Linux's way to say so
            break
        if not part:
            break
        written += part
    os.close(ours)
    if process.poll() is None and time.monotonic() >= ends:
        process.kill()
    assert process.wait(timeout=30) == 0, written.decode()[-3000:]
    return written.decode().replace("\r\n", "\n")


def lines_of(written: str) -> list[str]:
    """Return lines as they stand in the end, frames of a bar behind each other."""
    plain = _ESCAPE.sub("", written)
    return [line.rstrip("\r").rsplit("\r", 1)[-1].rstrip() for line in plain.split("\n")]


def marked(lines: list[str]) -> str:
    """Return lines with marks for what differs from run to run.

    What repeats stands once; what was folded, by the length of a path or number, is one line; what
    is told of slow machines alone is left out.
    """
    found: list[str] = []
    for line in lines:
        folded = line.startswith("│      ")
        line = re.sub(r"\d+:\d\d:\d\d", "#:#", _LIBRARY.sub("<library>", line))
        line = _NUMBER.sub("#", _BAR.sub("━", line))
        line = re.sub(r" +", " ", re.sub(r"│ sample .*│", "│ sample │", line)).rstrip()
        if _SLOW.match(line) or (found and line == found[-1]):
            continue
        if line.startswith("step "):  # of them the last
            found = [other for other in found if not other.startswith("step ")]
        if folded:
            found[-1] = found[-1].removesuffix("│") + line.removeprefix("│ ")
        elif found and _is_text(line) and _is_text(found[-1]) and not line.startswith("<library>"):
            found[-1] += f" {line}"
        else:
            found.append(line)
    return "\n".join(found) + "\n"


def _is_text(line: str) -> bool:
    return bool(line) and not line.startswith(("│", "╭", "╰", "step ", "loading "))


def test_the_output_equals_the_golden_file_and_fits_the_terminal(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """In a folder of its own, whose paths are short and the same everywhere."""
    folder = tmp_path_factory.mktemp("printed")
    environment = {name: text for name, text in os.environ.items() if name != "COLUMNS"}
    environment |= {"PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}
    own = ["run_dir=pretrain_terminal", "print_config=false"]  # as in the demos
    command = [sys.executable, "-m", *PRETRAIN, *own]
    printed = lines_of(on_terminal(command, folder, environment))
    assert marked(printed) == (GOLDEN / "pretrain_terminal.txt").read_text()
    assert max(map(len, printed)) <= COLUMNS
