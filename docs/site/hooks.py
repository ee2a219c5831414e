"""MkDocs hooks: add pages to the site that are not in docs/.

Recipes, result pages and sources stay where they are in the repository, and every page that links
to one gets it into the site. The API reference and the list of messages are generated.
See `mkdocs.yml`.
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
LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".ipynb": "json", ".toml": "toml"}
# how far results of a search come behind those of the guides
BEHIND = {"source/": 0.3, "results/": 0.5, "messages": 0.5, "api/": 0.7}
log = logging.getLogger("mkdocs.hooks")
origins: dict[str, str] = {}  # generated page -> its file in the repository


def site_path(path: str) -> str:
    """Return the path in the site of a file of the repository."""
    if path in INDEX:
        return INDEX[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.startswith("benchmarks/") and path.endswith((".md", ".png")):
        return "results/" + path.removeprefix("benchmarks/")
    return f"source/{path}.md"


def linked(origin: str, text: str) -> dict[str, str]:
    """Return a page's links to files, with the path of each from the repository's root."""
    found = {}
    for link in LINK.findall(text):
        target = link.partition("#")[0]
        if target and "://" not in link:
            found[link] = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
    return found


def text_of(path: str) -> str:
    """Return a file as Markdown: a page unchanged, anything else as a code block."""
    text = (ROOT / path).read_text("utf-8")
    if path.endswith(".md"):
        return text
    return f"# {path}\n\n````{LANGUAGES.get(Path(path).suffix, 'text')}\n{text}````\n"


def on_files(files: Files, config: Any) -> Files:
    """Add the linked files from outside docs/, recursively, and the generated pages."""
    origins.clear()
    queue = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    queue += list(INDEX)[:2]
    seen = set(queue)
    while queue:
        path = queue.pop()
        if not (ROOT / path).is_file():
            continue  # MkDocs reports the broken link
        where = site_path(path)
        if not path.startswith("docs/") and path != "README.md":
            origins[where] = path
            if path.endswith(".png"):
                files.append(File.generated(config, where, abs_src_path=str(ROOT / path)))
                continue
            files.append(File.generated(config, where, content=text_of(path)))
        if path.endswith(".md"):
            more = set(linked(path, (ROOT / path).read_text("utf-8")).values()) - seen
            queue += more
            seen |= more
    for where, content in [*reference.pages(ROOT, log), ("messages.md", messages_page(ROOT))]:
        files.append(File.generated(config, where, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links between files of the repository; let a search find the guides first."""
    here = page.file.src_uri
    for begin, boost in BEHIND.items():
        if here.startswith(begin):
            page.meta["search"] = {"boost": boost}
    origin = origins.get(here, f"docs/{here}")
    if not origin.endswith(".md"):
        page.meta["search"] = {"exclude": True}  # source code
        return markdown
    paths = linked(origin, markdown)

    def moved(match: re.Match[str]) -> str:
        link = match[1]
        if link not in paths or not (ROOT / paths[link]).is_file():
            return link
        _, mark, heading = link.partition("#")
        return posixpath.relpath(site_path(paths[link]), posixpath.dirname(here)) + mark + heading

    return LINK.sub(moved, markdown)
