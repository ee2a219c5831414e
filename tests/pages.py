"""Find the commands and Python blocks in the pages, and split a command into programs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted(
    path.stem for path in ROOT.glob("recipes/*.py") if "\n@application(" in path.read_text("utf-8")
)
PROGRAMS = ("python", "make", "torchrun", "commfree-plan", "commfree-store")
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_TYPED = re.compile(r"^\$ ((?:.*\\\n)*.*)", re.MULTILINE)
_INLINE = re.compile(r"`((?:python|make|torchrun|commfree-plan --parameters)\s[^`]+)`")
_EXPANSION = re.compile(r"\$\([^)]*\)|\$\w+")


def commands_of(text: str) -> list[str]:
    """Return a page's commands and shell scripts, with `recipes.NAME` once per recipe."""
    found = []
    for language, block in _FENCED.findall(text):
        found += {"console": _TYPED.findall(block), "bash": [block]}.get(language, [])
    found += [" ".join(code.split()) for code in _INLINE.findall(_FENCED.sub("", text))]
    named = (c.replace("recipes.NAME", f"recipes.{name}") for c in found for name in RECIPES)
    return list(dict.fromkeys(named))


def python_of(text: str) -> list[str]:
    """Return a page's Python blocks."""
    return [block for language, block in _FENCED.findall(text) if language == "python"]


def on_machines(command: str, address: str) -> list[str]:
    """Return what a reader runs on each of two machines, from the command for the first one.

    Args:
        command: a page's command with `NODE_RANK=0` or `--node-rank 0`.
        address: of the first machine, which is HOST or 10.0.0.1 in the pages.
    """
    command = re.sub(r"HOST|10\.0\.0\.1", address, command.partition("  #")[0])
    second, found = re.subn(r"(NODE_RANK=|--node-rank )0", r"\g<1>1", command)
    assert found == 1, command
    return [command, second]


def programs_in(script: str) -> Iterator[list[str]]:
    """Yield the words of every program of ours that a command or script starts.

    Variables and `$(...)` become the word "expanded". Other lines of a batch script are skipped.
    """
    for line in _EXPANSION.sub("expanded", script).replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.match(r"srun$|-|[A-Z_]+=", words[0]):  # launcher, its options, variables
            del words[0]
        if words and Path(words[0]).name in PROGRAMS:
            yield [Path(words[0]).name, *words[1:]]
