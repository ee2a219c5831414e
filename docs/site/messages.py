"""Generate the page that lists every error, warning and log message of the package."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "lightning_commfree"
SHORTEST = 40  # characters; shorter strings are fragments of a sentence
OPENING = """# Every message

All messages of the package, with … in place of values. Search for a few words of the message you
got. [Troubleshooting](troubleshooting.md) explains those that need more than a sentence. This list
is generated from the source code.

"""
TITLES = {
    "comm": "Ranks and network",
    "diloco": "Streaming DiLoCo",
    "domino": "Domino",
    "lion": "Distributed Lion",
    "lightning_internals": "Compatibility with Lightning",
    "model": "Sharded and shared weights",
    "resume": "Checkpoints and exact resume",
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
    """Return a sentence as inline code, which Markdown does not interpret."""
    return f"``` {' '.join(sentence.split())} ```"


def sentences(source: str) -> Iterator[str]:
    """Yield the strings of a module that a user may read: no docstrings, no assertions."""
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
