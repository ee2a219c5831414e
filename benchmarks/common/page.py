"""What every result page begins with, and how a page is written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from recipes.training import provenance as made


def provenance(command: str) -> list[str]:
    """Return lines of Markdown that say where the figures come from.

    Args:
        command: makes the page again, from the root of the repository.
    """
    return made.provenance(command)


def write_page(path: Path, lines: Sequence[str]) -> None:
    """Write the page and say where it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    print(f"wrote {path}")
