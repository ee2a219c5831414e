"""The planner page of the documentation: its script computes what the planner does."""

from __future__ import annotations

import json
import random
import re
import shlex
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from commfree_planner import Model, Training, advise, choose, methods
from commfree_planner.command import main
from commfree_planner.methods import BF16, DATA_PARALLEL
from commfree_planner.pace import SYNC_EVERY, auto_pace

DOCS = Path(__file__).parents[2] / "docs"
SCRIPT = DOCS / "assets/planner.js"
TARGET = 0.95  # of `commfree-plan` too
AUTO = 'sync_every="auto"'
# rounding, and cycles that repeat to 1e-9 of a step
CLOSE = 1e-6
ACCUMULATION = "DDP, accumulation"  # of the page only
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")


def evaluated(expression: str) -> Any:
    """Return the value of a JavaScript expression in which `page` is the page's script."""
    program = (
        f"const page = require({json.dumps(str(SCRIPT))});console.log(JSON.stringify({expression}))"
    )
    command = ["node", "-e", program]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def random_run(rng: random.Random) -> dict[str, Any]:
    """Return the page's inputs: numbers that its fields accept."""
    parameters = round(10 ** rng.uniform(6, 11))
    return {
        "parameters": parameters,
        "outside": round(parameters * rng.choice([0, 0.01, 0.1, 0.3145, 0.9, 0.99])),
        "blocks": rng.choice([1, 2, 3, 7, 12, 24, 96, 200]),
        "seconds": 10 ** rng.uniform(-3, 3),
        "gbit": 10 ** rng.uniform(-3, 3),
        "replicas": rng.choice([2, 3, 4, 5, 8, 16, 100]),
        "every": rng.choice([2, 3, 10, 30, 100, 300]),
        "accumulated": rng.choice([1, 2, 8, 100]),
        "steps": 10_000,
    }


def training(run: dict[str, Any]) -> Training:
    blocks, inside = run["blocks"], run["parameters"] - run["outside"]
    sizes = [inside * (i + 1) // blocks - inside * i // blocks for i in range(blocks)]
    return Training(
        Model(tuple(sizes), run["outside"]),
        run["seconds"],
        num_replicas=run["replicas"],
        sync_every=run["every"],
    )


def barely_too_slow(run: dict[str, Any]) -> dict[str, Any]:
    """Return the run with a link whose backlog grows for longer than the simulation lasts."""
    longest = replace(training(run), sync_every=SYNC_EVERY[-1])
    sent = longest.diloco(longest.fragment_count, 1, "fp4").bytes_per_step
    return {**run, "gbit": 0.9995 * sent * 8e-9 / run["seconds"]}


def expected(run: dict[str, Any]) -> dict[str, tuple[str, float, float]]:
    """Return setting, utilization and bytes per step of each row, from the planner."""
    planned, gbit, found = training(run), run["gbit"], {}
    for name, setting, exchange in methods(planned):
        shown = f"H={run['every']}, {setting}" if setting.startswith("P=") else setting
        found[name] = (shown, planned.utilization(exchange, gbit), exchange.bytes_per_step)
    # the gradients of several steps leave in one of them
    summed = replace(planned.data_parallel(), sync_every=run["accumulated"])
    setting = f"every {run['accumulated']} steps, fp32"
    found[ACCUMULATION] = (setting, planned.utilization(summed, gbit), summed.bytes_per_step)
    every, overlap = auto_pace(planned, gbit)
    paced, count = replace(planned, sync_every=every), planned.fragment_count
    exchange = paced.diloco(count, overlap, "fp4")
    setting = f"H={every}, P={count}, tau={overlap}, fp4"
    found[AUTO] = (setting, paced.utilization(exchange, gbit), exchange.bytes_per_step)
    return found


def test_it_fetches_nothing_but_its_script() -> None:
    fetched = re.compile(r"""(?:src|href)="?([^"\s>]+)|https?://|@import|\b(?:fetch|import)\(""")
    assert fetched.findall((DOCS / "planner.md").read_text("utf-8")) == ["assets/planner.js"]
    assert fetched.findall(SCRIPT.read_text("utf-8")) == []


@needs_node
def test_the_script_leaves_no_global_names() -> None:
    """The theme's scripts have some, and a page whose name is declared twice stays empty."""
    run = (
        "code => { const vm = require('vm'), context = vm.createContext({module: {}});"
        " vm.runInContext(code, context); return vm.runInContext('typeof sum', context); }"
    )
    script = SCRIPT.read_text()
    assert evaluated(f"({run})({json.dumps(script)})") == "undefined"
    assert evaluated(f"({run})({json.dumps('const sum = 1;')})") == "number"


@needs_node
def test_the_script_equals_the_planner() -> None:
    """Every row and figure, for random inputs; the hours too."""
    rng = random.Random(1)
    runs = [random_run(rng) for _ in range(60)]
    runs += [barely_too_slow(run) for run in runs[:5]]
    asked = (
        f"{json.dumps(runs)}.map(run => page.plan(run).map(row =>"
        " [row.name, row.setting, row.utilization, row.bytes, page.hours(run, row)]))"
    )
    waits, paces = 0, set()
    for run, shown in zip(runs, evaluated(asked), strict=True):
        rows = expected(run)
        assert {row[0] for row in shown} == rows.keys()
        for name, *figures in shown:
            setting, reached, sent = rows[name]
            hours = run["steps"] * run["seconds"] / reached / 3600
            assert figures[0] == setting, (run, name)
            assert figures[1:] == pytest.approx([reached, sent, hours], rel=CLOSE), (run, name)
            waits += 0.01 < reached < 0.99
        paces.add(rows[AUTO][0].partition(",")[0])
    assert waits > 100, "most links must be neither too slow nor fast enough for all"
    assert len(paces) > 3


@needs_node
def test_the_command_on_the_page_prints_the_same_figures(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = {"parameters": 124_000_000, "outside": 38_998_000, "blocks": 12, "seconds": 0.35}
    run |= {"gbit": 0.1, "replicas": 4, "every": 30, "accumulated": 8, "steps": 10_000}
    shown, command = evaluated(f"[page.plan({json.dumps(run)}), page.command({json.dumps(run)})]")
    main(shlex.split(" ".join(command))[1:])
    table, _, rest = capsys.readouterr().out.partition("\n\n")
    for row in shown:
        reached = f"{row['utilization']:.1%}"
        if row["name"] == AUTO:
            assert f"would exchange every {row['every']} steps" in " ".join(rest.split())
            assert f"utilization {reached}" in " ".join(rest.split())
        elif row["name"] != ACCUMULATION:
            [line] = [line for line in table.splitlines() if line.startswith(f"{row['name']}  ")]
            assert f" {reached} " in line, row["name"]


@needs_node
def test_the_command_on_the_page_fixes_h_only_if_the_reader_has_changed_it() -> None:
    run = {**random_run(random.Random(3)), "every": 100}
    runs = [run, {**run, "every": 30}]
    shown = evaluated(f"{json.dumps(runs)}.map(run => page.command(run).join(' '))")
    assert ["--sync-every" in command for command in shown] == [False, True]
    [html] = re.findall(r'<input id="every".* value="(\d+)">', (DOCS / "planner.md").read_text())
    assert int(html) == run["every"] == Training.sync_every, "the page begins with the default"


@needs_node
def test_a_number_out_of_range_is_named() -> None:
    whole = {"min": "1", "max": "200", "step": "1"}
    texts = ["12", "0", "1.5", "", "201"]
    said = evaluated(
        f"{json.dumps(texts)}.map(text => page.complaint('blocks', text, {json.dumps(whole)}))"
    )
    advice = "Enter a whole number from 1 to 200."
    assert said == [
        "",
        f'"blocks" is 0. {advice}',
        f'"blocks" is 1.5. {advice}',
        f'"blocks" is not a number. {advice}',
        f'"blocks" is 201. {advice}',
    ]
    some = {"min": "0.001", "max": "1000", "step": "any"}
    assert evaluated(f"page.complaint('Gbit/s', '0.35', {json.dumps(some)})") == ""


@needs_node
def test_the_page_the_command_and_choose_md_recommend_the_same() -> None:
    """For links around those at which data parallelism reaches the target, and slower ones."""
    rows = (DOCS / "choose.md").read_text().partition("## 2. Which method?")[2].splitlines()
    table = [row.split("|")[1:3] for row in rows if re.match(r"\| (DDP|only|a slow)", row)]
    (ddp, its), (bf16, hook), (_, slower) = table
    assert re.findall(r"(\d+) % or more", ddp) == ["95"]
    assert BF16 in bf16
    assert ("`ddp`" in its, "bf16_compress_hook" in hook, "StreamingDiLoCo" in slower) == (
        True,
    ) * 3
    rng, runs = random.Random(2), []
    for share in (0.2, 0.4, 0.8, 1.2):
        run = {**random_run(rng), "replicas": rng.choice((2, 4)), "every": 100}
        planned = training(run)
        needed = planned.needed_gbit_per_s(planned.data_parallel(), TARGET)
        runs.append({**run, "gbit": share * needed})
    said = evaluated(f"{json.dumps(runs)}.map(run => page.take(page.plan(run)))")
    chosen = []
    for inputs, sentence in zip(runs, said, strict=True):
        run, gbit = training(inputs), inputs["gbit"]
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
        assert sentence.startswith(f"Use {choice.strategy}"), inputs
        assert (AUTO in sentence) == (choice.setting == AUTO), inputs
        if AUTO in sentence:
            every, overlap = auto_pace(run, gbit)
            said_pace = f"every {every} steps on this link, with overlap_steps={overlap}."
            assert said_pace in sentence, inputs
            assert said_pace in choice.reasons[0], inputs
        assert ("bf16_compress_hook" in sentence) == ("bf16" in choice.setting), inputs
        chosen.append(table_says[:1] + (bool(table_says[1]),))
    assert len(set(chosen)) == 3, "all three recommendations occur"
