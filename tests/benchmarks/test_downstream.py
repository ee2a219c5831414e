"""The verdict on downstream results follows its criterion, and the runs' configurations compose."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.downstream.__main__ import Losses, table, verdict

STAGES = ("pretrained", "untuned", "tuned")


def losses(before: float, after: float) -> Losses:
    """Losses with DiLoCo so many percent above a DDP loss of 2."""
    above = {"pretrained": before, "untuned": before, "tuned": after}
    return {stage: {"ddp": 2.0, "diloco": 2.0 * (1 + above[stage] / 100)} for stage in STAGES}


@pytest.mark.parametrize(
    ("differences", "says"),
    [
        ([(0.1, 1.0), (0.0, 0.8), (-0.1, 1.2)], "the reported gap shows: "),
        ([(0.1, 0.2), (0.0, 0.1), (-0.1, 0.0)], "does not show"),  # too small
        ([(0.1, 3.0), (0.0, -2.0), (-0.1, 0.5)], "does not show"),  # within the spread
        ([(0.9, 3.0), (0.8, 3.0), (0.7, 3.0)], "not judged"),
        ([(0.0, 3.0)], "one seed gives no verdict"),
    ],
)
def test_the_verdict_follows_the_criterion(differences: Any, says: str) -> None:
    by_seed = {seed: losses(*pair) for seed, pair in enumerate(differences, 1)}
    assert says in verdict(by_seed)
    assert table(by_seed)[2].startswith("| 1 | 2.0000 |")
