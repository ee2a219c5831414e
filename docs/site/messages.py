"""A page with every message that the package raises, warns with or logs, read off the sources."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "lightning_commfree"
SHORTEST = 40  # characters; what is shorter is a part of a sentence
OPENING = """# Every message

What the package can say, with … for what it fills in. Search for a few words of yours. Those that
need more than their sentence stand in [Troubleshooting](troubleshooting.md). The list is read off
the sources when the site is built.

"""
TITLES = {
    "checkpoint": "Files of checkpoints",
    "comm": "Ranks and network",
    "diloco": "Streaming DiLoCo",
    "domino": "Domino",
    "lion": "Distributed Lion",
    "lightning_internals": "Lightning's own release",
    "resume": "Exact resume",
    "strategies": "All strategies",
}


def messages_page(root: Path) -> str:
    """Return the page as Markdown."""
    by_folder: dict[str, list[str]] = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        folder = path.relative_to(root / PACKAGE).parts[0].removesuffix(".py")
        found = dict.fromkeys(sentences(path.read_text("utf-8")))
        by_folder.setdefault(folder, []).extend(found)
    parts = [
        f"## {TITLES.get(folder, folder)}\n\n" + "\n".join(f"- {quoted(s)}" for s in found) + "\n\n"
        for folder, found in by_folder.items()
        if found
    ]
    return OPENING + "".join(parts)


def quoted(sentence: str) -> str:
    """Return a sentence so that Markdown shows it letter by letter."""
    return f"``` {' '.join(sentence.split())} ```"


def sentences(source: str) -> Iterator[str]:
    """Yield the texts of a module that are said to a user: no docstrings, no assertions."""
    tree = ast.parse(source)
    skipped = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            skipped |= {id(value) for value in node.values}
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.add(id(node.value))
        elif isinstance(node, ast.Assert) and node.msg is not None:
            skipped.add(id(node.msg))
    for node in ast.walk(tree):
        if id(node) not in skipped:
            text = _text(node)
            if len(text) >= SHORTEST and text.count(" ") > 4 and "\n" not in text.strip():
                yield text


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(v) if isinstance(v, ast.Constant) else "…" for v in node.values)
    return ""
