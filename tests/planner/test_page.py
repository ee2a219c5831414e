"""The planner page of the documentation: its data and its script equal the planner."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from commfree_planner import Model, Training, advise, choose, methods
from commfree_planner.methods import BF16, DATA_PARALLEL
from commfree_planner.pace import auto_pace
from docs.site.planner_page import BLOCKS, LEFT_OUT, LINKS, OUTSIDE, REPLICAS, page

CASES = 20
CHOOSE = Path(__file__).parents[2] / "docs" / "choose.md"
TARGET = 0.95  # of `commfree-plan` too


@pytest.fixture(scope="module")
def written() -> str:
    return page()


def test_it_fetches_nothing(written) -> None:
    found = re.findall(r"""(?:src|href)=\S*|https?://|@import|fetch\(""", written)
    assert found == []


def evaluated(written: str, expression: str) -> Any:
    """Return the value of a JavaScript expression after the page's script has run."""
    [script] = re.findall(r"<script>(.*)</script>", written, re.DOTALL)
    command = ["node", "-e", f"{script}\nconsole.log(JSON.stringify({expression}))"]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def training(parameters: float, seconds: float, replicas: int) -> Training:
    block = round(parameters * (1 - OUTSIDE) / BLOCKS)
    model = Model((block,) * BLOCKS, round(parameters) - BLOCKS * block)
    return Training(model, seconds, num_replicas=replicas)


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_script_equals_the_planner(written) -> None:
    """Between points of the grid, where the script interpolates."""
    rng = random.Random(1)
    cases = [
        (10 ** rng.uniform(7, 11), 10 ** rng.uniform(-2, 2), 10 ** rng.uniform(-3, 3), replicas)
        for replicas in (rng.choice(REPLICAS) for _ in range(CASES))
    ]
    asked = f"{json.dumps(cases)}.map(c => plan(...c).map(r => [r.name, r.utilization, r.bytes]))"
    shown_by_case = evaluated(written, asked)
    for (parameters, seconds, gbit, replicas), rows in zip(cases, shown_by_case, strict=True):
        run = training(parameters, seconds, replicas)
        shown = [method for method in methods(run) if method.name not in LEFT_OUT]
        for (name, _, exchange), row in zip(shown, rows, strict=True):
            expected = [run.utilization(exchange, gbit), exchange.bytes_per_step]
            assert row[0] == name
            # a curve may have a corner between points; being off by one point would be 3 %
            assert row[1] == pytest.approx(expected[0], abs=5e-3)
            assert row[2] == pytest.approx(expected[1], rel=1e-3)


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_script_says_what_auto_would_choose(written) -> None:
    """At points of the grid: between them, it may be the choice of the next slower link."""
    links = [LINKS[i] for i in range(0, len(LINKS), 9)]
    shown = evaluated(written, f"{json.dumps(links)}.map(link => pace(1.0001 * link, 4))")
    found = [tuple(map(int, re.findall(r"\d+", sentence))) for sentence in shown]
    assert found == [auto_pace(training(1e9, 1.0, 4), link) for link in links]
    assert len({*found}) > 4


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_page_the_command_and_choose_md_recommend_the_same(written) -> None:
    """For links around those at which data parallelism reaches the target, and slower ones."""
    rows = CHOOSE.read_text().partition("## 2. Which method?")[2].splitlines()
    table = [row.split("|")[1:3] for row in rows if re.match(r"\| (DDP|only|a slow)", row)]
    (ddp, its), (bf16, hook), (_, slower) = table
    assert re.findall(r"(\d+) % or more", ddp) == ["95"]
    assert BF16 in bf16
    assert ("`ddp`" in its, "bf16_compress_hook" in hook, "StreamingDiLoCo" in slower) == (
        True,
    ) * 3
    rng, cases = random.Random(2), []
    for share in (0.2, 0.4, 0.8, 1.2):
        parameters, seconds = 10 ** rng.uniform(7, 11), 10 ** rng.uniform(-1, 1)
        run = training(parameters, seconds, replicas=rng.choice((2, 4)))
        gbit = share * run.needed_gbit_per_s(run.data_parallel(), TARGET)
        cases.append((parameters, seconds, gbit, run.num_replicas))
    said = evaluated(written, f"{json.dumps(cases)}.map(c => take(plan(...c)))")
    chosen = []
    for case, sentence in zip(cases, said, strict=True):
        run, gbit = training(case[0], case[1], case[3]), case[2]
        reached = {m.name: run.utilization(m.exchange, gbit) for m in methods(run)}
        choice = choose(run, gbit, TARGET, advise(run, gbit, TARGET))
        table_says = (
            ("ddp", "")
            if reached[DATA_PARALLEL] >= TARGET
            else ("ddp", "ddp_comm_hook=bf16_compress_hook")
            if reached[BF16] >= TARGET
            else ("streaming_diloco", choice.setting)
        )
        assert (choice.strategy, choice.setting) == table_says
        assert sentence.startswith(f"Use {choice.strategy}"), case
        assert ("bf16_compress_hook" in sentence) == ("bf16" in choice.setting), case
        chosen.append(table_says[:1] + (bool(table_says[1]),))
    assert len(set(chosen)) == 3, "all three recommendations occur"
