"""The comparison of two checkouts: its arithmetic, its order of fits, and one toy fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.commits import __main__ as commits
from benchmarks.commits.__main__ import Compared, compared, main, mean_step
from benchmarks.lab.netlab import why_unavailable

ROOT = Path(__file__).parents[2]


def test_rounds_are_compared_pair_by_pair() -> None:
    """Medians are 3 and 3.3; a round that is slow for both has the ratio 1."""
    found = compared([2.0, 3.0, 30.0], [2.2, 3.3, 30.0])
    assert found == Compared(3.0, 3.3, pytest.approx(1.1), 1.0, pytest.approx(1.1))


def test_a_folder_without_the_library_is_refused(tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path), str(ROOT)])
    assert "is not a checkout of this repository" in capsys.readouterr().err


def test_checkouts_take_turns(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lightning_commfree").mkdir()
    order: list[Path] = []

    def fit(checkout: Path, row: str, steps: int) -> float:
        order.append(checkout)
        return 0.2 if checkout == ROOT else 0.1

    monkeypatch.setattr(commits, "mean_step", fit)
    assert main([str(tmp_path), str(ROOT), "--rows", "lion_step", "--rounds", "2"]) == 0
    assert order == [ROOT, tmp_path, tmp_path, ROOT]
    assert "lion_step (1gbit): 100.0 -> 200.0 ms a step, ratio 2.000" in capsys.readouterr().out


@pytest.mark.skipif(why_unavailable() is not None, reason=f"no laboratory: {why_unavailable()}")
def test_a_fit_is_timed() -> None:
    assert mean_step(ROOT, "lion_step", 1) > 0
