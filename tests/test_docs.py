"""The documentation builds offline and strictly, and its figures and messages match the code."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from commfree_planner import Training, payload_bytes
from commfree_planner.advice import MOST_OVERLAP_STEPS
from commfree_planner.command import main as plan
from commfree_planner.pace import OVERLAP_STEPS, SYNC_EVERY
from docs.site.loss_over_bytes import TARGET as PLOT
from docs.site.loss_over_bytes import description, draw, points
from docs.site.messages import sentences
from docs.site.reference import MODULES, SHOWN, STRATEGIES, packages
from docs.site.schedule_svg import SCHEDULE, TARGET, drawing, flights
from lightning_commfree import StreamingDiLoCoStrategy
from lightning_commfree.diloco.messages import _MIN_EXCHANGES
from lightning_commfree.diloco.settings import DiLoCoSettings, default_outer_optimizer
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


def test_the_reference_shows_every_public_name_and_the_strategies_first(site: Path) -> None:
    shown = {
        page.stem: [
            name.rpartition(".")[2]
            for name in re.findall(r'<h\d id="([\w.]+)"', page.read_text("utf-8"))
        ]
        for page in (site / "api").glob("*.html")
    }
    assert shown.keys() == {"lightning_commfree", "commfree_planner", *SHOWN, *MODULES}
    for page, exported in packages(ROOT).items():
        if page in shown and page not in SHOWN:
            assert {*exported} <= {*shown[page]}, page
    for page, names in SHOWN.items():
        assert {name.rpartition(".")[2] for name in names} <= {*shown[page]}, page
    first = shown["lightning_commfree"]
    assert [name for name in first if name.endswith("Strategy")] == [*STRATEGIES]
    assert first.index("DistributedLion") > first.index(STRATEGIES[-1])
    assert "join" not in first, "members that nobody should call"
    calls = {"fragments", "outer_weights", "figures", "traffic", "grad_norm"}
    members = {name for name in first if name[0].islower()} - {"lightning_commfree"}
    assert members == calls | {"from_pretrained_on_meta"}, "no hooks that Lightning calls"
    guide = (DOCS / "planner.md").read_text("utf-8")
    planner = {name.rpartition(".")[2] for name in SHOWN["commfree_planner"]}
    assert {name for name in planner if f"`{name}`" in guide} == planner
    assert {*shown["commfree_planner"]} == {
        *planner,
        "commfree_planner",
        "utilization",
        "needed_gbit_per_s",
        "lines",
    }


def test_a_search_finds_guides_before_results_and_no_source_code(site: Path) -> None:
    index = json.loads((site / "search/search_index.json").read_text("utf-8"))
    boosts = {entry["location"]: entry.get("boost", 1) for entry in index["docs"]}
    assert boosts["choose.html"] == 1
    assert boosts["results/size_ladder/result.html"] < 1
    assert boosts["messages.html"] < 1
    assert (site / "source/lightning_commfree/diloco/streaming.py.html").is_file()
    assert [found for found in boosts if ".py.html" in found] == []


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


def test_the_planner_has_the_layout_of_the_site_and_what_its_script_looks_for(site: Path) -> None:
    text = (site / "planner.html").read_text("utf-8")
    script = (site / "assets/planner.js").read_text("utf-8")
    assert 'class="md-header' in text
    assert '<script src="assets/planner.js">' in text
    fields = set(re.findall(r'<input id="(\w+)" type="number"', text))
    computed = {"parameters", "outside"}
    assert fields == set(re.findall(r"\brun\.(\w+)", script)) - computed
    for found in re.findall(r'\bat\("(\w+)"\)', script) + re.findall(r'data-of="(\w+)"', text):
        assert f'id="{found}"' in text, found


def test_tables_scroll_on_a_phone(site: Path) -> None:
    """The theme's script puts tables without a class into a box that scrolls; others have one."""
    styles = "".join(f.read_text("utf-8") for f in (site / "assets").rglob("*.css"))
    assert re.search(r"\.md-typeset__scrollwrap\{[^}]*overflow-x:auto", styles)
    assert re.search(r"\.planner \.scroll \{ overflow-x: auto", styles)
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


def rows_of(page: Path, heading: str) -> list[list[str]]:
    """Return the cells of the first table under a heading of a page, without its two head rows."""
    under = page.read_text("utf-8").partition(f"\n{heading}\n")[2]
    table = re.search(r"(?:^\|.*\n)+", under, re.MULTILINE)
    assert table, f"{page} has no table under {heading}"
    return [[c.strip() for c in row.split("|")[1:-1]] for row in table[0].splitlines()[2:]]


def test_the_price_is_what_the_size_ladder_measured() -> None:
    """In figures.md, every cell; in README, two replicas with H = 10 and 100."""
    steps: dict[tuple[str, str, str], tuple[str, str]] = {}  # by model, size, tokens per parameter
    for size, model, _, _, _, tokens, short, long in rows_of(LADDER, "## The runs"):
        for per_parameter, cell in (("20", short), ("100", long)):
            steps[model, size, per_parameter] = cell.split()[0], tokens
    gaps = {}  # the default outer step comes last
    for row in rows_of(LADDER, "## Gap by size, M and H"):
        size, per_parameter, every, replicas, _, model, optimizer, seeds, _, _, gap, _ = row
        if optimizer == "adamw":
            key = (model, size, *steps[model, size, per_parameter], replicas, every)
            gaps[key] = gap.split()[0].removeprefix("+")
            if replicas in ("2", "4"):
                assert (seeds == "1") == (size == "0.8M"), "as the page says"

    shown = {}
    columns = [("2", "100"), ("2", "30"), ("4", "100"), ("4", "30")]
    for run, taken, tokens, *cells in rows_of(DOCS / "figures.md", "## The price"):
        model, size = run.split()
        for (replicas, every), cell in zip(columns, cells, strict=True):
            key = model.lower().replace("-", ""), size, taken, tokens, replicas, every
            assert gaps.get(key, "") == cell, key
            if cell:
                shown[key] = cell
    assert {key for key in gaps if key[4:] in columns} == shown.keys(), "the page leaves out none"

    two = sorted(float(gap) for key, gap in gaps.items() if key[4:] == ("2", "100"))
    readme = " ".join((ROOT / "README.md").read_text("utf-8").split())
    often = {
        tuple(row[:3]): row for row in rows_of(LADDER, "## Exchanges as often as a link hides")
    }
    gap, factor = (often["gpt2", "2", "10"][place].removeprefix("+") for place in (8, 9))
    four = often["gpt2", "4", "10"][8].removeprefix("+").split()[0]
    assert f"| **{gap}**: DDP's loss after {factor.split()[0]} times the tokens |" in readme
    twenty = often["gpt2", "2", "20"][8].removeprefix("+").split()[0]
    assert f"every 20 steps, ours ends {float(twenty):.1f} % above it, every 100 steps" in readme
    prices = f"every 100 steps {two[-1]:.0f} %; four machines, every 10 steps, {float(four):.1f} %."
    assert prices in readme
    page = " ".join((DOCS / "figures.md").read_text("utf-8").split())
    assert f"end {gap} above DDP" in page
    assert f"reaches that loss with 1/{factor.split()[0]} of the tokens" in page
    assert f"to {two[-1]:.1f} % above DDP" in page
    alone = sorted(float(gap) for key, gap in gaps.items() if key[4] == "1")
    assert f"ends {alone[0]:.1f} to {alone[-1]:.1f} % above DDP" in page
    found = LADDER.read_text("utf-8")
    tuned = re.search(r"rates of longer runs:.* gpt2 at 0.04M is \+(\S+) ", found)
    assert tuned
    assert f"two replicas end {tuned[1]} % above DDP" in page


def test_pages_name_the_values_of_the_code() -> None:
    """Of settings that a page explains; `test_readme.py` compares the signatures that are shown."""
    pages = {p.stem: " ".join(p.read_text("utf-8").split()) for p in DOCS.glob("*.md")}
    lengths = f"{', '.join(map(str, SYNC_EVERY[:-1]))} and {SYNC_EVERY[-1]} steps"
    assert lengths in " ".join(str(StreamingDiLoCoStrategy.__doc__).split())
    for page in ("streaming_diloco", "tuning"):
        assert lengths in pages[page]
        assert f"{_lr(4, 100)} for four replicas or more with" in pages[page]
        assert (_lr(3, 100), _lr(4, 99)) == (0.4, 0.4), "as the pages say"
    for page, saying in (
        ("choose", "exchanged fewer than {} times"),
        ("figures", "A fit warns below {} for each"),
        ("streaming_diloco", "Below {} times it warns"),
        ("troubleshooting", "Below {} times it is a warning"),
    ):
        assert saying.format(_MIN_EXCHANGES) in pages[page]
    docstring = " ".join(str(StreamingDiLoCoStrategy.__doc__).split())
    assert f"learning rate is {_lr(4, 100)} with at least four replicas" in docstring
    assert f"of at least 100, otherwise {_lr(2, 100)};" in docstring
    conf = (ROOT / "conf/strategy/streaming_diloco.yaml").read_text("utf-8")
    assert f"lr {_lr(2, 100)} (4 replicas and 100 steps or more: {_lr(4, 100)})" in conf
    for row in rows_of(DOCS / "tuning.md", "## Which wire"):
        wire, bits = row[0].strip('`"'), float(row[1])
        many = 1 << 20
        assert 8 * payload_bytes(many, wire) / many == pytest.approx(bits, abs=0.006), wire


# Where pages say how to begin


def started(page: Path, heading: str) -> dict[str, list[str]]:
    """Return the rows of a page's table of starting values, by setting without its symbol."""
    return {row[0].split(" (")[0]: row[1:] for row in rows_of(page, heading)}


def words(path: Path) -> str:
    return " ".join(path.read_text("utf-8").split())


def test_pages_recommend_the_same_overlap() -> None:
    """`docs/tuning.md` gives the reasons; the other pages say the same or link to it."""
    most = f"to {MOST_OVERLAP_STEPS} at most with a fixed `sync_every`"
    docstring = " ".join(str(StreamingDiLoCoStrategy.__doc__).split())
    shown = {name: words(DOCS / f"{name}.md") for name in ("choose", "figures", "tuning")}
    for page, text in {**shown, "docstring": docstring}.items():
        assert most in text, page
    conf = words(ROOT / "conf/strategy/streaming_diloco.yaml")
    assert f"overlap_steps: {Training.overlap_steps} # tau, default 1" in conf
    assert f"{MOST_OVERLAP_STEPS} at most with a fixed sync_every" in conf
    store = "with a bucket and a fixed sync_every, a second of training"
    assert store in words(ROOT / "conf/strategy/elastic_diloco.yaml")
    assert "With a fixed `sync_every`, choose `overlap_steps`" in words(DOCS / "elastic.md")
    assert "a bucket, with a fixed `sync_every`:* a second of training" in shown["tuning"]
    for page in ("elastic", "figures", "limits", "planner"):
        assert "tuning.md#how-many-steps-an-exchange-may-take" in words(DOCS / f"{page}.md")

    least, limit = OVERLAP_STEPS[0], SYNC_EVERY[0] - 2
    choices = f"{', '.join(map(str, OVERLAP_STEPS[:-1]))} and {OVERLAP_STEPS[-1]} steps"
    assert f"begins with {least}, and takes the smallest of {choices}" in shown["tuning"]
    assert f"at most {limit}, because a fit begins with a cycle of {limit + 2}" in shown["tuning"]
    assert f"tau is {least} at first" in docstring
    assert f"this is its smallest value, at most {limit}" in docstring
    DiLoCoSettings(overlap_steps=limit)
    with pytest.raises(ValueError, match=f"must be at most {limit}"):
        DiLoCoSettings(overlap_steps=limit + 1)

    begins = f"With a fixed `sync_every`:* begin with the default of {Training.overlap_steps}. "
    assert begins in shown["tuning"]
    assert DiLoCoSettings().overlap_steps == Training.overlap_steps
    assert f"an overlap of {MOST_OVERLAP_STEPS}, learning rates tuned" in shown["figures"]
    assert f"the overlap of the bandwidth page ({MOST_OVERLAP_STEPS})" in words(LADDER)

    # no page has another limit, whichever way it words it
    limits = {
        number
        for path in [ROOT / "README.md", *DOCS.glob("*.md"), ROOT / "recipes/README.md"]
        for sentence in re.split(r"(?<=[.|;]) ", words(path))
        if "overlap" in sentence
        for number in re.findall(r"(\d+) at most|[Aa]t most (\d+)", sentence)
    }
    assert {int(first or second) for first, second in limits} == {MOST_OVERLAP_STEPS}


def test_pages_start_with_the_same_settings() -> None:
    """The tables of `docs/choose.md` and `docs/tuning.md`, and what others say about rates."""
    chosen = started(DOCS / "choose.md", "## 4. Which settings?")
    tuned = started(DOCS / "tuning.md", "## Starting points")
    for here, there in (("`sync_every`",) * 2, ("`overlap_steps`",) * 2, INNER_RATES):
        assert chosen[here][0].startswith(tuned[there][0]), here
    assert tuned["`sync_every`"][0] == f'`"{DiLoCoSettings().sync_every}"`'
    assert tuned["`overlap_steps`"][0] == 'the default; `"auto"` raises it'
    assert tuned["`mix`"][0] == str(DiLoCoSettings().mix)
    assert tuned["`wire_dtype`"][0] == f'`"{DiLoCoSettings().wire_dtype}"`'
    assert tuned["outer learning rate"][0] == "the default"
    shortest = f"as low as the link can hide, but not below {SYNC_EVERY[0]}"
    assert shortest in chosen["`sync_every`"][1]
    assert shortest in tuned["`sync_every`"][1]

    two, eight = "DDP's, and half of it", "with eight replicas a half and a quarter"
    assert tuned["inner learning rate"][0] == chosen["learning rate"][0] == two
    assert tuned["inner learning rate"][1].startswith(eight)
    assert chosen["learning rate"][1] == eight
    assert "Try DDP's learning rate and half of it." in words(ROOT / "README.md")
    linked = "(tuning.md#the-inner-learning-rate)"
    assert f"[inner DDP's and half of it]{linked}" in words(DOCS / "troubleshooting.md")
    coming = started(DOCS / "coming_from.md", "## Lightning's `ddp`")
    assert coming["your learning rate"][0] == f"DDP's, and [half of it]{linked}"


INNER_RATES = ("learning rate", "inner learning rate")
RATES = {"2": (1.0, 0.5), "4": (1.0, 0.5), "8": (0.5, 0.25)}  # times DDP's, by replicas


def test_the_inner_rates_to_start_with_are_close_to_the_best_ones() -> None:
    ddp, ratios = {}, []  # of AdamW
    for size, tokens, model, optimizer, method, tried, _ in rows_of(LADDER, "## Learning rates"):
        losses = {
            float(loss): float(rate) for rate, loss in re.findall(r"([\d.]+): ([\d.]+)", tried)
        }
        best = losses[min(losses)]
        if optimizer == "adamw" and method == "DDP":
            ddp[size, tokens, model] = best
        elif optimizer == "adamw" and method != "M = 1":
            ratios.append((method.removeprefix("M = "), best / ddp[size, tokens, model]))
    often = rows_of(LADDER, "## Exchanges as often as a link hides")
    frequent = [(row[1], row[0], float(row[6]) / float(row[4])) for row in often]
    exception = ("8", "llama", 1.0)
    assert exception in frequent, "as the page says"
    ratios += [(m, r) for m, model, r in frequent if (m, model, r) != exception]
    assert {m for m, _ in ratios} == RATES.keys()
    distances = [min(max(r / s, s / r) for s in RATES[m]) for m, r in ratios]
    assert f"a factor of {max(distances):.2f} of DDP's" in words(DOCS / "tuning.md")


def test_pages_and_planner_advise_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    [shown] = re.findall(r"\$ (commfree-plan [^`]+)", (DOCS / "choose.md").read_text("utf-8"))
    plan(shown.replace("\\\n", " ").split()[1:])
    said = " ".join(capsys.readouterr().out.split())
    auto = re.search(r"exchanges every (\d+) steps on this link, with overlap_steps=(\d+)", said)
    assert 'Use strategy=streaming_diloco (sync_every="auto")' in said
    assert auto
    tuning = words(DOCS / "tuning.md")
    assert f'`"auto"` exchanges every {auto[1]} steps with an overlap of {auto[2]}.' in tuning
    readme = words(ROOT / "README.md")
    assert f"--sync-every {auto[1]} --overlap-steps {auto[2]} " in readme
    assert re.search(rf"\| predicted: 124M, 100 Mbit/s \| {auto[1]} steps \|", readme)
    # the alternative is within the limits that the pages name
    fixed = re.search(r"fixed sync_every.*: sync_every=(\d+) .* overlap_steps=(\d+)", said)
    assert fixed
    assert int(fixed[1]) in SYNC_EVERY
    assert Training.overlap_steps <= int(fixed[2]) <= MOST_OVERLAP_STEPS
    assert "the smallest H of this list, or 300, that computes for 95 % of the time" in tuning


def _lr(replicas: int, sync_every: int) -> float:
    return default_outer_optimizer(replicas, sync_every).keywords["lr"]


def sizes(cell: str) -> list[float]:
    """Return the seconds and bytes in a cell of README's table."""
    scale = {"s": 1.0, "kB": 1e3, "MB": 1e6}
    found = re.findall(r"([\d.]+) (s|kB|MB)\b", cell)
    return [float(number) * scale[unit] for number, unit in found]


def test_the_bandwidths_in_tuning_are_what_the_planner_says(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Those of the GPT-2; the Llama's parameters would have to be counted first."""
    [command] = re.findall(
        r"\$ commfree-plan ((?:.*\\\n)*.*)", (DOCS / "choose.md").read_text("utf-8")
    )
    plan(command.replace("\\", " ").split())
    planned = capsys.readouterr().out.partition("Gbit/s needed")[2]
    shown = rows_of(DOCS / "tuning.md", "## How many steps between exchanges")
    for name, (_, *cells) in zip(("data parallel", "DiLoCo", "+ fp4"), shown, strict=True):
        [found] = re.findall(rf"^{re.escape(name)} +.*?fp\d+ +(.*)$", planned, re.MULTILINE)
        assert found.split() == cells[:3], name


def test_the_table_in_readme_is_what_was_measured_and_predicted() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    table = re.findall(r"^\| (?:measured|predicted): .*$", readme, re.MULTILINE)
    large = {row[0]: row for row in rows_of(ROOT / "benchmarks/bandwidth/often.md", "## 100mbit")}
    assert "100 Mbit/s" in table[0]
    rows = [large[method] for method in ("no communication", "DDP", '`sync_every="auto"`, fp4')]
    ms = [float(row[1]) / 1000 for row in rows]
    sent = [float(row[8].replace(",", "")) for row in rows]
    expected = [[ms[0], ms[1], sent[1], ms[2], sent[2]]]
    planned = [
        re.findall(rf"^{re.escape(method)} .*% +([\d.]+) +([\d.]+)$", readme, re.MULTILINE)[0]
        for method in ("data parallel", "+ fp4")
    ]
    [computing] = re.findall(r"--step-time (\S+)", readme)
    pairs = (figure for s, mb in planned for figure in (float(s), 1e6 * float(mb)))
    expected.append([float(computing), *pairs])
    for row, figures in zip(table, expected, strict=True):
        assert sizes(row.partition("|")[2].partition("|")[2]) == pytest.approx(figures, rel=0.03)


def test_the_alternatives_are_what_was_measured() -> None:
    page = ROOT / "benchmarks/bandwidth/small.md"
    slow, *faster = (
        {row[0]: row for row in rows_of(page, f"## {rate}")}
        for rate in ("20mbit", "100mbit", "1gbit")
    )
    shown = rows_of(DOCS / "figures.md", "## What people would do instead")
    assert len(shown) == 8
    heading, ladder = "## Exchanges as often as a link hides", LADDER.read_text("utf-8")
    often = {tuple(row[:3]): row[8] for row in rows_of(LADDER, heading)}
    [added] = re.findall(r"gradients of 8 batches:\*\* (\S+ ± \S+ %) above", ladder)
    losses = {'`sync_every="auto"`, fp4': often["gpt2", "2", "10"], "DDP": "0"}
    losses["DDP, gradients of 8 batches"] = added
    for method, _, seeds, *_, gap in rows_of(LADDER, "## What people would do instead"):
        assert seeds == "3"
        losses[method] = gap
    for method, *figures, loss in shown:
        ms = [link[method][1] for link in (slow, *faster)]
        assert figures == [*ms, slow[method][7], slow[method][8]]
        assert loss == losses[method]
    alone = re.findall(r"one worker, 0.5 .*?:\*\* (\S+ ± \S+ %) above", ladder)
    told = "it ends {} above DDP; after twice as many, with all tokens, {}"
    assert told.format(*alone) in prose_of_figures()
    price = f"In as many steps, one machine alone ends {float(alone[0].split()[0]):.1f} % above DDP"
    assert price in (ROOT / "README.md").read_text("utf-8")
    late = losses["DDP, PowerSGD rank 4 after 10 % of the steps"]
    assert f"rank 4 then ends {late} above DDP" in prose_of_figures()


def test_the_alternatives_in_readme_are_those_of_the_page() -> None:
    page = {row[0]: row for row in rows_of(DOCS / "figures.md", "## What people would do instead")}
    names = {
        "DDP": "DDP",
        "**Streaming DiLoCo, every 10 steps**": '`sync_every="auto"`, fp4',
        "torchft's DiLoCo, every 10 steps": "torchft DiLoCo every 10 steps, delay 4, alpha 0.5",
        "averaging every 10 steps": "local SGD (plain mean every 10 steps, fp32)",
        "DDP, PowerSGD rank 4": "DDP, PowerSGD rank 4",
        "DDP, 8 batches accumulated: an eighth of the updates": "DDP, gradients of 8 batches",
    }
    readme = (ROOT / "README.md").read_text("utf-8")
    [heading] = re.findall(r"^\*\*The price is loss\.\*\*.*$", readme, re.MULTILINE)
    shown = rows_of(ROOT / "README.md", heading)
    assert [row[0] for row in shown] == list(names)
    for name, *cells in shown:
        _, slow, fast, _, _, num_bytes, loss = page[names[name]]
        figures = [float(slow) / 1000, float(fast) / 1000, float(num_bytes.replace(",", ""))]
        bare = [cell.replace("*", "") for cell in cells]
        assert [f"{s:.3f}" for s in figures[:2]] == bare[:2]
        assert f"{figures[2] / 1000:.3g}" == bare[2]
        assert bare[3].partition(":")[0] == loss.lstrip("+")


def test_what_a_batch_and_an_outer_step_change_is_what_was_measured() -> None:
    batches = rows_of(LADDER, "## More tokens in a step")
    for m, words in (("2", "from {} to {} % with M = 2"), ("4", "{} to {} % with M = 4")):
        small, large = (row[8] for row in batches if row[0] == m)
        assert words.format(small[1:5], large[1:5]) in prose_of_figures()
    mixed = re.findall(r"batch x \d: \+([\d.]+) %", LADDER.read_text("utf-8"))
    told = "ends {} % above the default outer step at H = 10, and {} % with four times the batch"
    assert told.format(*mixed) in prose_of_figures()


def prose_of_figures() -> str:
    return " ".join((DOCS / "figures.md").read_text("utf-8").split())


def test_top_k_costs_what_was_measured() -> None:
    [gap] = re.findall(
        r"top-k in its own regime.*?:\*\* (\S+ ± \S+ %) above", LADDER.read_text("utf-8")
    )
    assert f'ends {gap} above `"fp4"`' in " ".join((DOCS / "tuning.md").read_text("utf-8").split())


def test_the_plot_shows_the_saved_losses(tmp_path: Path) -> None:
    found = points()
    draw(
        tmp_path / "again.svg", found
    )  # the file depends on matplotlib's release, its points do not
    for picture in (tmp_path / "again.svg", PLOT):
        assert description(found) in picture.read_text("utf-8"), "run docs.site.loss_over_bytes"
    assert {len(point.gaps) for point in found} == {3}, "as many seeds as the page says"
    # the ledger's formula: 4-bit codes, one scale per 256
    assert found[0].share == pytest.approx((0.5 + 1 / 256) / 30 / 4)
    two = {p.sync_every: f"1/{1 / p.share:.0f}" for p in found if p.replicas == 2}
    page = " ".join((DOCS / "figures.md").read_text("utf-8").split())
    assert f"{two[30]} of DDP's bytes with H = 30, and {two[100]} with H = 100" in page


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
