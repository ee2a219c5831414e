"""The documentation builds offline and strictly, and its figures and messages match the code."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from docs.site.loss_over_bytes import TARGET as PLOT
from docs.site.loss_over_bytes import description, draw, points
from docs.site.messages import sentences
from docs.site.planner_page import page as page_with_planner
from docs.site.reference import packages
from docs.site.schedule_svg import SCHEDULE, TARGET, drawing, flights
from lightning_commfree.diloco.streaming import Landing
from lightning_commfree.lion.voting import vote_shares

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
LADDER = ROOT / "benchmarks/size_ladder/result.md"
SOURCES = [
    sentence
    for path in (ROOT / "lightning_commfree").rglob("*.py")
    for sentence in sentences(path.read_text("utf-8"))
]
# what a browser fetches on its own, unlike the `<a href>` that a reader follows
FETCHED = re.compile(
    r"<(?:script|img|iframe)[^>]*\ssrc=\"?(?:https?:)?//|<link[^>]*\shref=\"?https?://"
)


def build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = build(ROOT, folder)
    assert built.returncode == 0, built.stderr
    return folder


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    for package, names in packages(ROOT).items():
        page = site / "api" / f"{package.removeprefix('lightning_commfree.')}.html"
        text = page.read_text("utf-8")
        missing = [name for name in names if f'id="{package}.{name}"' not in text]
        assert not missing, page


def test_nothing_is_fetched_from_another_server(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    assert [page for page in pages if FETCHED.search(page.read_text("utf-8"))] == []
    for styles in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import )[\"']?https?://", styles.read_text("utf-8")), styles

    wrong = '<link rel="stylesheet" href="https://fonts.example.org/css?family=Roboto">'
    assert FETCHED.search(wrong)
    assert not FETCHED.search('<a href="https://arxiv.org/abs/2501.18512">')


def test_broken_links_and_missing_docstrings_fail_the_build(tmp_path: Path) -> None:
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("docs", "lightning_commfree", "commfree_planner"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignore)
    for name in ("benchmarks", "recipes", "examples", "mkdocs.yml"):
        (tmp_path / name).symlink_to(ROOT / name)
    with (tmp_path / "docs/limits.md").open("a") as page:
        page.write("[a](nothing.md) [b](../examples/nothing.py) [c](figures.md#nothing)\n")
    (tmp_path / "docs/forgotten.md").write_text("# A page outside of nav\n")
    package = tmp_path / "lightning_commfree/__init__.py"
    with_one_more = package.read_text("utf-8").replace("__all__ = [", '__all__ = [\n    "UNSAID",')
    package.write_text(f"{with_one_more}\nUNSAID = 1\n")
    built = build(tmp_path, tmp_path / "site")
    assert built.returncode == 1
    for said in (
        "link 'nothing.md', but the target is not found",
        "link '../examples/nothing.py', but the target is not found",
        "does not contain an anchor '#nothing'",
        "forgotten.md",
        "the public name lightning_commfree.UNSAID has no docstring",
    ):
        assert said in built.stderr, said


def test_the_planner_has_the_layout_of_the_site_and_a_legend(site: Path) -> None:
    text = (site / "planner.html").read_text("utf-8")
    assert 'class="md-header' in text
    assert '<p id="legend">' in text
    assert page_with_planner().split("<script>")[1].strip() in text, "Markdown changed the script"


def test_tables_scroll_on_a_phone(site: Path) -> None:
    """The theme's script puts tables without a class into a box that scrolls; others have one."""
    styles = "".join(f.read_text("utf-8") for f in (site / "assets").rglob("*.css"))
    assert re.search(r"\.md-typeset__scrollwrap\{[^}]*overflow-x:auto", styles)
    assert re.search(r"\.planner \.scroll \{ overflow-x: auto", page_with_planner())
    tables = 0
    for page in site.rglob("*.html"):
        text = page.read_text("utf-8")
        boxed = re.sub(r'<div class="(?:scroll|highlight)">.*?</div>', "", text, flags=re.DOTALL)
        found = re.findall(r"<table[^>]*>", boxed)
        assert set(found) <= {"<table>"}, page
        tables += len(found)
        assert '<meta name="viewport" content="width=device-width' in text
    assert tables > 100


def said_by_the_package(fragment: str) -> bool:
    return any(fragment in " ".join(sentence.split()) for sentence in SOURCES)


def test_troubleshooting_quotes_messages_of_the_package() -> None:
    page = (DOCS / "troubleshooting.md").read_text("utf-8")
    quoted = re.findall(r"^### `(.*)`$", page, re.MULTILINE)
    assert len(quoted) > 25
    assert [fragment for fragment in quoted if not said_by_the_package(fragment)] == []
    assert not said_by_the_package("The ranks do not reach one another")


def test_docstrings_and_assertions_are_no_messages() -> None:
    source = '''
def check(x):
    """A docstring of more than a few words is not a message."""
    assert x, "neither is the text of an assertion, which only a bug would print"
    raise ValueError(f"`x={x}` is a message that a user reads, with its value.")
'''
    assert list(sentences(source)) == ["`x=…` is a message that a user reads, with its value."]


def test_every_figure_is_explained() -> None:
    page = (DOCS / "figures.md").read_text("utf-8")
    outer = [f"outer/{name}_p" for name in Landing(*[0] * len(Landing._fields)).figures()]
    lion = [f"lion/{n}" for n in (*vote_shares([]), "bits_up", "bits_down", "abstentions")]
    comm = [f"comm/{name}" for name in ("bytes_per_step", "exposed_ms", "compression")]
    assert set(re.findall(r"`((?:comm|outer|lion)/\w+)`", page)) >= {*outer, *lion, *comm}


def test_the_plot_shows_the_saved_losses_and_readme_quotes_them(tmp_path: Path) -> None:
    found = points()
    draw(
        tmp_path / "again.svg", found
    )  # the file depends on matplotlib's release, its points do not
    for picture in (tmp_path / "again.svg", PLOT):
        assert description(found) in picture.read_text("utf-8"), "run docs.site.loss_over_bytes"
    assert {len(point.gaps) for point in found} == {3}, "as many seeds as README says"
    gap = {(p.model, p.replicas, p.sync_every): f"{p.mean:.1f}" for p in found}
    rows = [line.split(" | ") for line in LADDER.read_text("utf-8").splitlines()]
    # the default outer step comes last
    shown = {
        (row[0], row[5], int(row[3]), int(row[2])): f"{float(row[10].split()[0]):.1f}"
        for row in rows
        if row[0] in ("| 0.04M", "| 0.2M") and row[1] == "20" and row[6] == "adamw"
    }
    gap_of = {tuple(row[:6]): row[10].split() for row in rows if len(row) > 10}
    long = gap_of["| 0.2M", "100", "100", "2", "0.4", "gpt2"]
    longest = gap_of["| 0.04M", "100", "100", "2", "0.4", "gpt2"]
    assert long[1] == longest[1] == "±", "three seeds, as README says"
    two, gpt2_two = (gap_of["| 0.8M", "20", "100", "2", "0.4", of] for of in ("llama", "gpt2"))
    four = gap_of["| 0.8M", "20", "100", "4", "0.8", "llama"]
    assert two[1:] == gpt2_two[1:] == four[1:] == ["%"], "one seed, as README says"
    tuned = re.search(
        r"rates of longer runs:.* gpt2 at 0.04M is \+(\S+) ", LADDER.read_text("utf-8")
    )
    assert tuned is not None
    quoted = {("| 0.04M", *key): value for key, value in gap.items()}
    assert quoted.items() <= shown.items(), "the size ladder's page"
    # the ledger's formula: 4-bit codes, one scale per 256
    assert found[0].share == pytest.approx((0.5 + 1 / 256) / 30 / 4)

    readme = " ".join((ROOT / "README.md").read_text("utf-8").split())
    shares = {p.sync_every: f"1/{1 / p.share:.0f}" for p in found}
    often = f"{gap['gpt2', 2, 30]} % (GPT-2) and {gap['llama', 2, 30]} % (Llama) above DDP"
    assert f"{often} and send {shares[30]}" in readme
    gpt2, llama = (shown["| 0.2M", model, 2, 100] for model in ("gpt2", "llama"))
    assert f"the loss is {gpt2} % above DDP's" in readme
    assert f"after 100 tokens per parameter, it is {float(long[0]):.2f} % above" in readme
    largest = f"{float(gpt2_two[0]):.1f} % (GPT-2) and {float(two[0]):.2f} % (Llama) above"
    assert f"{largest}, and the Llama {float(four[0]):.1f} % with four replicas" in readme
    more = f"and {float(longest[0]):.1f} % after 100 ({tuned[1]} % with learning rates tuned"
    assert f"ends {gap['gpt2', 2, 100]} % above DDP after 20 tokens per parameter, {more}" in readme
    assert f"A Llama of the same size ends {llama} % above DDP" in readme
    assert f"{gap['gpt2', 2, 100]} and {gap['llama', 2, 100]} % with {shares[100]}" in readme
    assert f"{gap['gpt2', 4, 30]} to {gap['llama', 4, 100]} % above" in readme


def test_the_animation_follows_the_schedule() -> None:
    """Its command reproduces it; each fragment leaves and lands at its steps in the schedule."""
    assert TARGET.read_text("utf-8") == drawing(SCHEDULE)
    assert TARGET.stat().st_size < 150_000
    ElementTree.parse(TARGET)
    cycle, begin = SCHEDULE.sync_every, 2 * SCHEDULE.sync_every
    for p in range(SCHEDULE.num_fragments):
        assert list(flights(SCHEDULE, p, begin)) == [
            (SCHEDULE.offset(p), SCHEDULE.offset(p) + SCHEDULE.overlap_steps)
        ]
        assert SCHEDULE.offset(p) + SCHEDULE.overlap_steps < cycle, (
            "the flight must fit into one cycle"
        )


def test_the_newcomer_script_finds_its_commands_in_the_pages() -> None:
    """`make newcomer-test` runs them, which takes minutes."""
    listed = subprocess.run(
        [sys.executable, ROOT / ".ci/newcomer", "--list"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    for command in ("make demo", "recipes.finetune", "NODE_RANK=1", "torchrun", "make docs"):
        assert command in listed.stdout
