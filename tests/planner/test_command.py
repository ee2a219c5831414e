"""`commfree-plan` prints the planner's figures, and a message for invalid arguments."""

from __future__ import annotations

import re
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from commfree_planner import Model, Training
from commfree_planner.command import main

GIVEN = ["--parameters", "124e6", "--blocks", "12", "--step-time", "0.35", "--bandwidth", "0.1"]


def printed(capsys: pytest.CaptureFixture[str], *more: str) -> str:
    main([*GIVEN, *more])
    return capsys.readouterr().out


def test_the_output_equals_the_golden_file(capsys: pytest.CaptureFixture[str]) -> None:
    golden = Path(__file__).parent / "golden" / "command.txt"
    more = ("--outside", "39e6", "--latency", "0.02", "--tokens-per-step", "8192")
    text = printed(capsys, *more)
    assert max(map(len, text.splitlines())) <= 80
    assert text == golden.read_text()


def test_readmes_own_command_keeps_its_settings(capsys: pytest.CaptureFixture[str]) -> None:
    """And without them, it recommends the default."""
    readme = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    [command] = re.findall(r"^\$ commfree-plan (.*)$", readme, re.MULTILINE)
    given = dict(re.findall(r"--(sync-every|overlap-steps) (\d+)", command))
    main(command.split())
    said = " ".join(capsys.readouterr().out.split())
    every, overlap = given["sync-every"], given["overlap-steps"]
    said_every, said_overlap = (
        re.findall(rf"{name}=(\d+)", said.partition('sync_every="auto"')[0])
        for name in ("sync_every", "overlap_steps")
    )
    assert (set(said_every), set(said_overlap)) == ({every}, {overlap})
    main(re.sub(r"--(?:sync-every|overlap-steps) \d+", "", command).split())
    said = " ".join(capsys.readouterr().out.split())
    assert 'Use strategy=streaming_diloco (sync_every="auto"): 100.0%.' in said
    assert f"It exchanges every {every} steps on this link, with overlap_steps={overlap}." in said


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


def test_no_parameter_is_lost_by_rounding(capsys: pytest.CaptureFixture[str]) -> None:
    """124e6 parameters do not divide evenly into 12 blocks."""
    text = printed(capsys)
    training = Training(Model((124_000_000,), 0), 0.35)
    everything = training.data_parallel().bytes_per_step / 1e6
    assert re.search(rf"data parallel .* {everything:.4g}$", text, re.MULTILINE)


def test_large_figures_have_no_exponent(capsys: pytest.CaptureFixture[str]) -> None:
    """A fragment of a 100B model takes more than 100 steps on such a link, in 12,345 s steps."""
    more = ("--parameters", "100e9", "--sync-every", "5000", "--step-time", "12345")
    text = printed(capsys, *more, "--bandwidth", "0.0001") + printed(capsys, "--blocks", "1")
    assert not re.search(r"\de[+-]\d", text)
    assert "The only fragment takes" in " ".join(text.split())


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--bandwidth", "-1"], "`bandwidth=-1.0` Gbit/s must be positive"),
        (["--blocks", "0"], "at least one in each of 0 blocks"),
        (["--outside", "125e6"], "too few for 125,000,000 outside of blocks"),
        (["--parameters", "124M"], "'124M' is not a number: write 124e6"),
        (["--parameters", "inf"], "'inf' is not an integer"),
        (["--parameters", "1.5"], "'1.5' is not an integer"),
        (["--wire-dtype", "fp5"], "invalid choice: 'fp5'"),
        (["--tokens-per-step", "0"], "`tokens_per_step=0` must be at least 1"),
        (["--replica-size", "0"], "`replica_size=0` must be at least 1: it counts the ranks"),
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
