"""Build the corpus: `python -m benchmarks.size_ladder.corpus`.

The text is the English documentation in three Debian packages: paragraphs, lists, definitions and
headings of their HTML pages, without code and navigation. A paragraph that occurs more than once is
kept once. A page is a document; one in 32, by the hash of its path, is held out for validation. The
packages are downloaded with apt; the text stays out of git, and `corpus.json` has its hash.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import subprocess
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from typing_extensions import override

PACKAGES = {  # and their licenses; details are in /usr/share/doc/PACKAGE/copyright
    "linux-doc-6.1": "GPL-2.0",
    "python3.11-doc": "PSF-2.0",
    "postgresql-doc-15": "PostgreSQL",
}
FOLDER = Path("outputs/size_ladder")
RECIPE = Path(__file__).with_name("corpus.json")
SEPARATOR = "\f\n"  # between documents; not in the text, whose white space is collapsed
SPLITS = ("train", "validation")
HELD_OUT = 32  # one page in so many
MIN_WORDS = 4  # of a paragraph; shorter ones are mostly names in tables and indexes

_TEXT = {"p", "li", "dd", "dt", "h1", "h2", "h3", "h4", "h5", "h6", "blockquote", "td"}
_IGNORED = {"script", "style", "pre", "nav", "head", "footer", "form"}


class _Paragraphs(HTMLParser):
    """Collects the paragraphs of an HTML page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._words: list[str] = []
        self._ignored = 0

    @override
    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _IGNORED:
            self._ignored += 1
        elif tag in _TEXT:
            self._end()

    @override
    def handle_endtag(self, tag: str) -> None:
        if tag in _IGNORED:
            self._ignored = max(self._ignored - 1, 0)
        elif tag in _TEXT:
            self._end()

    @override
    def handle_data(self, data: str) -> None:
        if not self._ignored:
            self._words.append(data.replace("¶", ""))  # the link beside a heading

    def _end(self) -> None:
        words = "".join(self._words).split()
        self._words = []
        if len(words) >= MIN_WORDS:
            self.found.append(" ".join(words))


def pages(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the path and the paragraphs of each English HTML page, in order of their paths."""
    for path in sorted(folder.rglob("*.html*")):
        name = path.relative_to(folder).as_posix()
        if "/translations/" in name or not path.is_file():
            continue
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        parser = _Paragraphs()
        parser.feed(raw.decode("utf-8", "replace"))
        parser.close()
        yield name, parser.found


def documents(found: Iterator[tuple[str, list[str]]]) -> dict[str, list[str]]:
    """Return the documents of each split; a paragraph is kept where it occurs first."""
    seen: set[bytes] = set()
    split: dict[str, list[str]] = {name: [] for name in SPLITS}
    for name, paragraphs in found:
        kept = []
        for paragraph in paragraphs:
            digest = hashlib.sha256(paragraph.lower().encode()).digest()
            if digest not in seen:
                seen.add(digest)
                kept.append(paragraph)
        if kept:
            held_out = hashlib.sha256(name.encode()).digest()[0] % HELD_OUT == 0
            split[SPLITS[held_out]].append("\n\n".join(kept) + "\n")
    return split


def build(folder: Path) -> dict[str, Any]:
    """Download the packages and write train.txt and validation.txt; return the recipe."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe: dict[str, Any] = {"packages": []}
    for package, license_ in PACKAGES.items():
        subprocess.run(["apt-get", "download", package], cwd=folder, check=True)
        archive = max(folder.glob(f"{package}_*.deb"), key=lambda path: path.stat().st_mtime)
        subprocess.run(["dpkg-deb", "-x", archive.name, "packages"], cwd=folder, check=True)
        command = ["dpkg-deb", "-f", archive.name, "Version"]
        found = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
        version = found.stdout.strip()
        recipe["packages"].append({"name": package, "version": version, "license": license_})
    for name, texts in documents(pages(folder / "packages")).items():
        text = SEPARATOR.join(texts).encode()
        (folder / f"{name}.txt").write_bytes(text)
        recipe[name] = {
            "documents": len(texts),
            "bytes": len(text),
            "sha256": hashlib.sha256(text).hexdigest(),
        }
    return recipe


def check(folder: Path) -> None:
    """Raise a `SystemExit` if the corpus in `folder` is missing or not that of `corpus.json`."""
    recipe = json.loads(RECIPE.read_text())
    for name in SPLITS:
        path = folder / f"{name}.txt"
        text = path.read_bytes() if path.exists() else b""
        if hashlib.sha256(text).hexdigest() != recipe[name]["sha256"]:
            raise SystemExit(
                f"{path} is missing or not the corpus of benchmarks/size_ladder/corpus.json. Build"
                " it with `python -m benchmarks.size_ladder.corpus`."
            )


def main(arguments: Sequence[str] | None = None) -> None:
    """Build the corpus and write its recipe."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args(arguments)
    recipe = build(options.folder)
    RECIPE.write_text(json.dumps(recipe, indent=1) + "\n")
    print(RECIPE.read_text())


if __name__ == "__main__":
    main()
