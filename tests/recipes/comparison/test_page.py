"""Table, pictures and page from made-up runs."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from recipes.comparison.figures import (
    DRAWINGS,
    write_png,
)
from recipes.comparison.outcome import Times, bits_per_second, read_outcome, times
from recipes.comparison.page import cells, heads, table, warnings, write_html
from tests.recipes.comparison.made_up import failed, outcome, plan

GOLDEN = Path(__file__).parents[1] / "golden"  # look at a change and copy it


def test_hidden_time_is_the_links_time_less_the_wait(tmp_path: Path) -> None:
    # 1 MB at 1 Mbit/s: 8 s, of which 2 were waited for
    assert times(outcome("streaming_diloco", tmp_path, "1mbit")) == Times(50.0, 2.0, 6.0)
    # 80 MB need more than the run took: no more is hidden than there was
    assert times(outcome("ddp", tmp_path, "1mbit")) == Times(50.0, 2.0, 48.0)
    assert times(outcome("streaming_diloco", tmp_path, "1gbit")) == Times(50.0, 2.0, 0.0)
    assert times(outcome("ddp", tmp_path)) == Times(50.0, 2.0, None)
    assert [bits_per_second(rate) for rate in ("1.5gbit", "20kbit")] == [1.5e9, 2e4]


def test_the_table_fits_80_columns_and_is_as_it_is_kept(tmp_path: Path) -> None:
    runs = [outcome("ddp", tmp_path), outcome("streaming_diloco", tmp_path)]
    runs += [failed("domino_tp", tmp_path, "no")]
    console = Console(file=io.StringIO(), width=80)
    console.print(table(runs, plan(tmp_path)))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in shown
    assert shown == (GOLDEN / "compare.txt").read_text()


def test_in_the_laboratory_the_interface_stands_beside_the_ledger(tmp_path: Path) -> None:
    asked = plan(tmp_path, "100mbit")
    run = outcome("streaming_diloco", tmp_path, "100mbit")
    row = dict(zip(heads([run], asked)[1:], cells(run, None, asked), strict=True))
    assert row["a node's interface sent"] == ("1.2 MB", "")
    assert row["against streaming_diloco"] == ("-", "")


def test_the_page_needs_no_other_file_and_escapes_what_it_shows(tmp_path: Path) -> None:
    runs = [outcome("ddp", tmp_path), failed("streaming_diloco", tmp_path, "<b>no</b> corpus\n")]
    page = tmp_path / "page.html"
    write_html(runs, plan(tmp_path), "python -m recipes.compare 'a=<x>'", page)
    text = page.read_text()
    sources = re.findall(r'(?:src|href)="([^"]*)"', text)
    assert len(sources) == len(DRAWINGS) == 4
    for source in sources:
        kind, _, code = source.partition(",")
        assert kind == "data:image/svg+xml;base64"
        assert b"<svg" in base64.b64decode(code)
    assert not re.search(r"<(script|link|iframe)|@import|url\(", text)
    assert "python -m recipes.compare &#39;a=&lt;x&gt;&#39;" in text
    assert "streaming_diloco failed" in text
    assert "&lt;b&gt;no&lt;/b&gt; corpus" in text
    assert "Failed: streaming_diloco. The figures are those of the other jobs." in text
    assert "commit: abc" in text


def test_a_page_without_a_run_that_ended_well(tmp_path: Path) -> None:
    run = failed("ddp", tmp_path, "")
    write_html([run], plan(tmp_path), "", tmp_path / "page.html")
    write_png([run], "nothing", tmp_path / "page.png")
    assert "No job ended well." in (tmp_path / "page.html").read_text()
    assert "<img" not in (tmp_path / "page.html").read_text()


def test_unequal_tokens_are_said(tmp_path: Path) -> None:
    ddp, other = outcome("ddp", tmp_path), outcome("streaming_diloco", tmp_path)
    assert warnings([ddp, other]) == []
    assert other.measured is not None
    other.measured.history.tokens_per_step = 1024
    assert warnings([ddp, other]) == [
        "The jobs did not train on equally many tokens: ddp 100 steps of 2,048,"
        " streaming_diloco 100 steps of 1,024."
    ]


def test_a_run_whose_files_are_of_another_version_is_refused(tmp_path: Path) -> None:
    run = outcome("ddp", tmp_path)
    run.job.folder.mkdir()
    (run.job.folder / "summary.json").write_text('{"steps": 1}')
    with pytest.raises(ValueError, match=r"this version can read .*missing.*run_dir=\.\.\."):
        read_outcome(run.job, run.record)
