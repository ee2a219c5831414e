"""A few seeds of `random_resumes`, whose script runs as many as there is time for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.resume.random_resumes import draw, run

SEEDS = (1, 3, 4, 7, 8, 5051, 99, 134, 278, 5065, 5066, 11013)  # the last six were silent once
BY_RANKS = {ranks: [seed for seed in SEEDS if draw(seed).ranks == ranks] for ranks in (1, 2, 3, 4)}


@pytest.mark.parametrize("ranks", [ranks for ranks, seeds in BY_RANKS.items() if seeds])
def test_a_resume_is_exact_or_says_that_it_is_not(ranks: int, tmp_path: Path) -> None:
    for seed, result in zip(BY_RANKS[ranks], run(BY_RANKS[ranks], tmp_path), strict=True):
        assert result.outcome in ("exact", "said not to be"), (draw(seed), result)
