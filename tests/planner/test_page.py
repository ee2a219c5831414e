"""The planner in the documentation: its grid is the planner's, its script reads it rightly."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess

import pytest

from commfree_planner import Model, Training, methods
from docs.site.planner_page import BLOCKS, LEFT_OUT, OUTSIDE, REPLICAS, page

CASES = 20


@pytest.fixture(scope="module")
def written() -> str:
    return page()


def test_it_fetches_nothing(written) -> None:
    found = re.findall(r"""(?:src|href)=\S*|https?://|@import|fetch\(""", written)
    assert found == []


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node to run its script")
def test_the_script_finds_what_the_planner_says(written) -> None:
    """At places between the grid's, where it has to interpolate."""
    rng = random.Random(1)
    cases = [
        (10 ** rng.uniform(7, 11), 10 ** rng.uniform(-2, 2), 10 ** rng.uniform(-3, 3), replicas)
        for replicas in (rng.choice(REPLICAS) for _ in range(CASES))
    ]
    [script] = re.findall(r"<script>(.*)</script>", written, re.DOTALL)
    asked = f"{json.dumps(cases)}.map(c => plan(...c).map(r => [r.name, r.utilization, r.bytes]))"
    command = ["node", "-e", f"{script}\nconsole.log(JSON.stringify({asked}))"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for (parameters, seconds, gbit, replicas), rows in zip(cases, json.loads(printed), strict=True):
        block = round(parameters * (1 - OUTSIDE) / BLOCKS)
        model = Model((block,) * BLOCKS, round(parameters) - BLOCKS * block)
        run = Training(model, seconds, num_replicas=replicas)
        shown = [method for method in methods(run) if method.name not in LEFT_OUT]
        for (name, _, exchange), row in zip(shown, rows, strict=True):
            expected = [run.utilization(exchange, gbit), exchange.bytes_per_step]
            assert row[0] == name
            # a curve has a corner between two points; one point off would be 3 % in the steep part
            assert row[1] == pytest.approx(expected[0], abs=5e-3)
            assert row[2] == pytest.approx(expected[1], rel=1e-3)
