"""What pages tell a reader to type, and the words that bash makes of it."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted(
    path.stem for path in ROOT.glob("recipes/*.py") if "\n@application(" in path.read_text("utf-8")
)
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_TYPED = re.compile(r"^\$ ((?:.*\\\n)*.*)", re.MULTILINE)
_INLINE = re.compile(r"`((?:python|make|torchrun)\s[^`]+)`")
# what a script starts is written down, every word after their number; all else is not to be found
_NOTED = """
PATH=tools
note() { printf '%s\\0' $# "$@" >&3; }
for program in python make torchrun commfree-plan; do
  eval "$program() { note $program \\"\\$@\\"; }"
done
srun() { while [[ $1 == --* ]]; do shift; done; note "$@"; }
scontrol() { :; }
"""


def commands_of(text: str) -> list[str]:
    """Return what a page has typed into a shell; `recipes.NAME` stands for every command."""
    found = []
    for language, block in _FENCED.findall(text):
        found += {"console": _TYPED.findall(block), "bash": [block]}.get(language, [])
    found += [" ".join(code.split()) for code in _INLINE.findall(_FENCED.sub("", text))]
    named = (c.replace("recipes.NAME", f"recipes.{name}") for c in found for name in RECIPES)
    return list(dict.fromkeys(named))


def python_of(text: str) -> list[str]:
    """Return a page's blocks of Python."""
    return [block for language, block in _FENCED.findall(text) if language == "python"]


def read_by_bash(script: str) -> Iterator[list[str]]:
    """Yield the words of every program that a script starts."""
    reading, writing = os.pipe()
    with open(reading, "rb") as noted:
        ended = subprocess.run(
            ["bash", "-c", f"exec 3>&{writing}\n{_NOTED}\n{script}"],
            pass_fds=[writing],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        os.close(writing)
        words = iter(noted.read().decode().split("\0")[:-1])
    assert (ended.returncode, ended.stderr) == (0, ""), f"{script}\n{ended.stderr}"
    for count in words:
        yield [next(words) for _ in range(int(count))]
