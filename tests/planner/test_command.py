"""`commfree-plan` prints the planner's figures, and a message for invalid arguments."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from commfree_planner import Model, Training, advise, choose, methods
from commfree_planner.command import main

GIVEN = ["--parameters", "124e6", "--blocks", "12", "--step-time", "0.35", "--bandwidth", "0.1"]


def printed(capsys: pytest.CaptureFixture[str], *more: str) -> str:
    main([*GIVEN, *more])
    return capsys.readouterr().out


def test_tables_and_advice_are_the_planners(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--outside", "39000004", "--overlap-steps", "2")

    sizes = [84_999_996 // 12] * 12
    training = Training(Model(tuple(sizes), 39_000_004), 0.35, overlap_steps=2)
    lines: dict[str, list[list[str]]] = {}
    for line in text.splitlines():
        name, *cells = re.split(r"\s{2,}", line.strip())
        lines.setdefault(name, []).append([name, *cells])
    for name, setting, exchange in methods(training):
        reached = training.utilization(exchange, 0.1)
        of_link, needed = lines[name]
        assert of_link[:3] == [name, setting, f"{reached:.1%}"]
        assert of_link[3:] == [f"{0.35 / reached:.4g}", f"{exchange.bytes_per_step / 1e6:.4g}"]
        targets = (0.5, 0.9, 0.99)
        gbits = [f"{training.needed_gbit_per_s(exchange, t):.3g}" for t in targets]
        assert needed == [name, setting, *gbits]
    assert max(map(len, text.splitlines())) <= 80

    advice = advise(training, 0.1, 0.95)
    flat = " ".join(text.split())
    found = f"sync_every={advice.sync_every} num_fragments={advice.num_fragments}"
    assert f"Advice for streaming_diloco: {found}" in flat
    choice = choose(training, 0.1, 0.95, advice)
    assert f"Use strategy=streaming_diloco ({choice.setting}): " in flat
    assert all(f"- {reason}" in flat for reason in advice.reasons + choice.reasons)


def test_the_output_equals_the_golden_file(capsys: pytest.CaptureFixture[str]) -> None:
    golden = Path(__file__).parent / "golden" / "command.txt"
    more = ("--outside", "39e6", "--latency", "0.02", "--tokens-per-step", "8192")
    text = printed(capsys, *more)
    assert max(map(len, text.splitlines())) <= 80
    assert text == golden.read_text()


def test_a_replica_of_several_ranks_gets_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """124e6 values of 4 bytes; 4 ranks send 3/4 of them, twice with DDP, 3 times with FSDP."""
    lines = printed(capsys, "--replica-size", "4").splitlines()
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    assert (
        "Within a replica of 4 ranks, each rank sends per step 744 MB with inside=ddp, 1,116 MB"
        " with inside=fsdp." in text
    )
    assert "Within a replica" not in printed(capsys)


def test_the_command_does_not_import_torch() -> None:
    """Importing Lightning takes four seconds of CPU time."""
    code = "import sys, commfree_planner.command; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert "commfree_planner.simulation" in loaded
    assert not {"torch", "lightning", "lightning_commfree", "numpy"} & set(loaded)


def test_no_parameter_is_lost_by_rounding(capsys: pytest.CaptureFixture[str]) -> None:
    """124e6 parameters do not divide evenly into 12 blocks."""
    text = printed(capsys)
    training = Training(Model((124_000_000,), 0), 0.35)
    everything = training.data_parallel().bytes_per_step / 1e6
    assert re.search(rf"data parallel .* {everything:.4g}$", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--bandwidth", "-1"], "`bandwidth=-1.0` Gbit/s must be positive"),
        (["--step-time", "0"], "`step_time=0.0` must be a positive number of seconds"),
        (["--blocks", "0"], "at least one in each of 0 blocks"),
        (["--outside", "125e6"], "too few for 125,000,000 outside of blocks"),
        (["--parameters", "124M"], "'124M' is not a number: write 124e6"),
        (["--parameters", "inf"], "'inf' is not a whole number"),
        (["--parameters", "1.5"], "'1.5' is not a whole number"),
        (["--wire-dtype", "fp5"], "invalid choice: 'fp5'"),
        (["--latency", "-1"], "`latency=-1.0` must be a number of seconds of at least 0"),
        (["--tokens-per-step", "0"], "`tokens_per_step=0` must be at least 1"),
        (["--replica-size", "0"], "`replica_size=0` must be at least 1: it counts the ranks"),
        (["--target", "2"], "`advice_target=2.0` must be strictly between 0 and 1"),
    ],
)
def test_invalid_arguments_end_with_a_message(
    more: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*GIVEN, *more])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert said in " ".join(error.split())
    assert "Traceback" not in error


def test_pip_installs_the_command() -> None:
    """Checks the declaration, as the installed package may be of another commit."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    declared = re.search(r'^commfree-plan = "(.*)"$', text, re.MULTILINE)
    assert declared is not None
    assert EntryPoint("commfree-plan", declared[1], "console_scripts").load() is main
