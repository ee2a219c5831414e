"""What MkDocs is told while it builds the site: pages that stand elsewhere in the repository.

Recipes, result pages and sources are written once, where they belong, and linked from there; the
pages of the API reference and the list of messages are read off the sources. See `mkdocs.yml`.
"""

from __future__ import annotations

import logging
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))

import reference
from messages import messages_page

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
INDEX = {
    "recipes/README.md": "recipes.md",
    "benchmarks/README.md": "results/index.md",
    "README.md": "index.md",
}
LANGUAGES = {".py": "python", ".yaml": "yaml", ".ipynb": "json", ".toml": "toml"}
log = logging.getLogger("mkdocs.hooks")
origins: dict[str, str] = {}  # of the pages that are made here: where they stand in the repository


def site_path(path: str) -> str:
    """Return where the site has a file of the repository, by its path from the root."""
    if path in INDEX:
        return INDEX[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.startswith("benchmarks/") and path.endswith((".md", ".png")):
        return "results/" + path.removeprefix("benchmarks/")
    return f"source/{path}.md"


def linked(origin: str, text: str) -> dict[str, str]:
    """Return the links of a page to files, and their paths from the repository's root."""
    found = {}
    for link in LINK.findall(text):
        target = link.partition("#")[0]
        if target and "://" not in link:
            found[link] = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
    return found


def text_of(path: str) -> str:
    """Return the Markdown of a file: a page as it is, all else as a block of code."""
    text = (ROOT / path).read_text("utf-8")
    if path.endswith(".md"):
        return text
    return f"# {path}\n\n````{LANGUAGES.get(Path(path).suffix, 'text')}\n{text}````\n"


def on_files(files: Files, config: Any) -> Files:
    """Add what is linked and stands outside of docs/, and what it links; the reference."""
    origins.clear()
    ways = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    ways += list(INDEX)[:2]
    seen = set(ways)
    while ways:
        path = ways.pop()
        if not (ROOT / path).is_file():
            continue  # MkDocs tells of the link
        where = site_path(path)
        if not path.startswith("docs/") and path != "README.md":
            origins[where] = path
            if path.endswith(".png"):
                files.append(File.generated(config, where, abs_src_path=str(ROOT / path)))
                continue
            files.append(File.generated(config, where, content=text_of(path)))
        if path.endswith(".md"):
            more = set(linked(path, (ROOT / path).read_text("utf-8")).values()) - seen
            ways += more
            seen |= more
    for where, content in [*reference.pages(ROOT, log), ("messages.md", messages_page(ROOT))]:
        files.append(File.generated(config, where, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links between files of the repository lead to where the site has them."""
    here = page.file.src_uri
    origin = origins.get(here, f"docs/{here}")
    if not origin.endswith(".md"):
        return markdown
    paths = linked(origin, markdown)

    def moved(match: re.Match[str]) -> str:
        link = match[1]
        if link not in paths or not (ROOT / paths[link]).is_file():
            return link
        _, mark, heading = link.partition("#")
        return posixpath.relpath(site_path(paths[link]), posixpath.dirname(here)) + mark + heading

    return LINK.sub(moved, markdown)
