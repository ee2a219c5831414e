"""The comparison of two checkouts: its arithmetic, its order of fits, and one toy fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.commits import __main__ as commits
from benchmarks.commits.__main__ import Compared, compared
from benchmarks.lab.netlab import why_unavailable

ROOT = Path(__file__).parents[2]


def test_rounds_are_compared_pair_by_pair() -> None:
    """Medians are 3 and 3.3; a round that is slow for both has the ratio 1."""
    found = compared([2.0, 3.0, 30.0], [2.2, 3.3, 30.0])
    assert found == Compared(3.0, 3.3, pytest.approx(1.1), 1.0, pytest.approx(1.1))


@pytest.mark.skipif(why_unavailable() is not None, reason=f"no laboratory: {why_unavailable()}")
@pytest.mark.usefixtures("forked_lab")
def test_a_fit_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy, small = tmp_path / "job.py", commits.JOB.read_text()
    for full, less in (("n_layer=6", "n_layer=1"), ("4, 128, 4096", "1, 16, 512")):
        assert full in small
        small = small.replace(full, less)
    toy.write_text(small)
    monkeypatch.setattr(commits, "JOB", toy)
    assert commits.mean_step(ROOT, "lion_step", 1) > 0
