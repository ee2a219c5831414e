"""The script that cuts a link: a true cut at toy size, and what it says."""

from __future__ import annotations

import pytest

from benchmarks.lab import why_unavailable
from benchmarks.outage import __main__ as outage


@pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
def test_a_fit_goes_on_after_a_cut_that_is_short_for_its_timeout(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By hand: `--down 7 --timeout 9` ends it, `--timeout 20` does not."""
    assert outage.main(["--down", "2", "--timeout", "30", "--strategies", "lion"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("lion: step 40, +"), "it ended after the link's return"
    assert said.endswith("s from the link's return, went on\n")


def test_an_outcome_in_a_line() -> None:
    ended = outage.Outcome(12, -3.0, "The exchange failed.")
    assert ended.line("diloco") == (
        "diloco: step 12, -3.0 s from the link's return, ended: The exchange failed."
    )


def test_without_a_laboratory_it_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.lab.netlab.why_unavailable", lambda: "It needs root.")
    with pytest.raises(SystemExit):
        outage.main(["--strategies", "lion"])
    assert capsys.readouterr().err == "It needs root.\n"
