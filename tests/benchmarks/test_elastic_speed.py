"""The benchmark of unequal elastic replicas: its arithmetic, and one run of each kind."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.elastic_speed import __main__ as speed
from benchmarks.elastic_speed.__main__ import Curve
from benchmarks.elastic_speed.replica import run

SLOW = Curve([(10.0, 4.0), (20.0, 3.0), (30.0, 2.0)], [30, 30])
FAST = Curve([(10.0, 3.5), (20.0, 1.5)], [40, 21])


def test_the_page_has_gain_and_cost() -> None:
    costs = {"StreamingDiLoCo": [0.010, 0.011, 0.030], "ElasticDiLoCo": [0.012, 0.012, 0.010]}
    page, _ = speed.page({1: {"steps": SLOW, "time": FAST}}, costs, [])
    text = "\n".join(page)
    assert "1.60 times as fast (goal: 1.3): met" in text
    assert "1.091 times as long as under `StreamingDiLoCoStrategy` (bound: 1.05): missed" in text
    assert "| 1 | 3.000 | 20.0 s | 12.5 s | 1.60 | 30 + 30 | 40 + 21 |" in text
    missed = Curve([(10.0, 3.5)], [40, 21])
    page, _ = speed.page({1: {"steps": SLOW, "time": missed}}, costs, [])
    assert "0.00 times as fast (goal: 1.3): missed" in "\n".join(page)


@pytest.mark.skipif(
    find_spec("torchft") is None, reason="needs torchft: `pip install -e '.[elastic]'`"
)
def test_both_strategies_log_their_steps_and_the_slow_replica_skips_some(tmp_path: Path) -> None:
    words = ["data=synthetic", "data.corpus.train_characters=40000"]
    words += ["data.corpus.validation_characters=4000", "optimizer.warmup_steps=5"]
    words += ["trainer.max_steps=45", f"cache_dir={tmp_path}"]
    timed = speed.planned(words, tmp_path / "time", True, (0.03, 0.09), sync="time")
    timed = timed._replace(save_every=10)
    fast, slow = logs = run(timed)
    assert fast[-1].step == slow[-1].step == 45
    assert len(slow) < len(fast)
    curve = speed.curve_of(timed, logs)
    assert len(curve.points) == 4
    assert curve.points[-1][1] < curve.points[0][1]
    fixed = run(speed.planned(words, tmp_path / "fixed", False, (0.0, 0.0)))
    assert [[row.step for row in rows] for rows in fixed] == [[*range(1, 46)]] * 2
