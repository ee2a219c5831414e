"""Print docstrings and messages for a reader who does not know the project: see README.md.

python tests/outside/prose.py --seed 1 --docstrings 100    # a random sample, numbered
python tests/outside/prose.py --messages                   # all errors and warnings
"""

from __future__ import annotations

import argparse
import ast
import random
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "lightning_commfree"
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def main() -> None:
    """Print what the options ask for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--docstrings", type=int, default=100, help="size of the sample")
    parser.add_argument("--messages", action="store_true", help="print messages instead")
    options = parser.parse_args()
    files = {
        str(path.relative_to(PACKAGE)): ast.parse(path.read_text())
        for path in sorted(PACKAGE.rglob("*.py"))
    }
    if options.messages:
        found = [item for path, tree in files.items() for item in messages(path, tree)]
    else:
        every = [item for path, tree in files.items() for item in docstrings(tree, path)]
        found = random.Random(options.seed).sample(every, options.docstrings)
    for number, (place, text) in enumerate(found, 1):
        sys.stdout.write(f"[{number}] {place}\n{text}\n\n")


def docstrings(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    """Yield qualified names and docstrings, those of nested functions too."""
    if isinstance(node, DOCUMENTED):
        text = ast.get_docstring(node)
        if text:
            yield name, text
    for child in ast.iter_child_nodes(node):
        own = getattr(child, "name", None) if isinstance(child, DOCUMENTED) else None
        yield from docstrings(child, f"{name}:{own}" if own else name)


def messages(path: str, tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield line numbers and texts of exceptions and warnings; `{}` stands for a value."""
    for node in ast.walk(tree):
        call = node.exc if isinstance(node, ast.Raise) else node
        if not isinstance(call, ast.Call):
            continue
        warns = "warn" in ast.unparse(call.func) and isinstance(node, ast.Call)
        if call.args and (isinstance(node, ast.Raise) or warns):
            text = _text(call.args[0])
            if text:
                yield f"{path}:{call.lineno}", text


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = (_text(part) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        return "".join(parts)
    if isinstance(node, ast.BinOp):
        return _text(node.left) + _text(node.right)
    return ""


if __name__ == "__main__":
    main()
