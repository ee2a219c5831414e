"""The comparison of two checkouts: its arithmetic, and a toy run."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.commits.__main__ import Compared, compared, main
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


@pytest.mark.skipif(why_unavailable() is not None, reason=f"no laboratory: {why_unavailable()}")
def test_a_checkout_is_compared_with_itself(capsys) -> None:
    assert (
        main([str(ROOT), str(ROOT), "--rows", "lion_step", "--rounds", "1", "--cycles", "1"]) == 0
    )
    assert "lion_step (1gbit): " in capsys.readouterr().out
