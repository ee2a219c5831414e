"""The command that runs Lightning's tests with our strategies, on a made-up checkout of them."""

import importlib.util
import sys
from pathlib import Path

import pytest

from tests.forks import forking

PATH = Path(__file__).with_name("lightning_suite.py")
TESTS = """
import warnings

import lightning.pytorch as pl
import pytest
from lightning.pytorch.strategies import DDPStrategy


def test_alike():
    assert pl.Trainer(accelerator="cpu", logger=False).world_size == 1


def test_other_by_name():
    strategy = pl.Trainer(accelerator="cpu", strategy="ddp", logger=False).strategy
    assert type(strategy).__name__ == "DDPStrategy", f"it is {type(strategy).__name__}"


def test_other_by_class():
    assert DDPStrategy(find_unused_parameters=True)


def test_hides_what_was_raised():
    with pytest.warns(UserWarning, match="made"):
        DDPStrategy(find_unused_parameters=True)
        warnings.warn("made")


def test_fails_with_both():
    raise AssertionError("never mind")
"""
REASONS = """
[[reason]]
text = "it is another class"
said = "it is StreamingDiLoCoStrategy"
"""


@pytest.fixture(scope="module")
def suite():
    spec = importlib.util.spec_from_file_location("lightning_suite", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    module.subprocess = forking
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """The command for a made-up checkout; what it has run once is kept for all tests."""
    place = tmp_path_factory.mktemp("suite")
    folder = place / "checkout" / "tests" / "tests_pytorch"
    folder.mkdir(parents=True)
    (folder / "test_made_up.py").write_text(TESTS)
    (place / "reasons.toml").write_text(REASONS)
    command = [str(place / "checkout"), "test_made_up.py", "--strategies", "streaming_diloco"]
    command += ["--workers", "0", "--keep", "--work", str(place / "work")]
    return [*command, "--reasons", str(place / "reasons.toml")]


def test_a_difference_needs_a_reason(suite, words, capsys):
    reasons = Path(words[-1])
    assert suite.main(words) == 1
    said = capsys.readouterr().out
    assert ": 4 tests of " in said
    assert "3 of 4 tests that pass with `ddp` do not" in said
    assert "| 1 | it is another class |" in said
    assert "**none**: `tests_pytorch/test_made_up.py::test_other_by_class`: TypeError" in said
    assert "2 differences without a reason" in said
    reasons.write_text(REASONS + "[[reason]]\ntext = 'refused'\nsaid = 'find_unused_parameters'\n")
    assert suite.main(words) == 0
    reasons.write_text(REASONS)


def test_briefly_only_what_has_no_reason_runs_with_ddp(suite, words, capsys):
    work = Path(words[words.index("--work") + 1])
    (work / "ddp.jsonl").unlink(missing_ok=True)
    assert suite.main([*words, "--brief"]) == 1
    said = capsys.readouterr().out
    assert "3 of 4 tests that pass with `ddp` do not" in said
    assert "| 1 | it is another class |" in said
    assert "2 differences without a reason" in said
    assert "1 failed, 2 passed, 2 deselected" in (work / "ddp.log").read_text()


def test_no_checkout_is_said(suite, tmp_path):
    with pytest.raises(SystemExit):
        suite.main([str(tmp_path)])


def test_a_failure_at_the_end_of_a_test_counts(suite, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        '{"test": "a", "outcome": "passed", "said": ""}\n'
        '{"test": "a", "outcome": "failed", "said": "leaked"}\n'
    )
    assert suite.read_outcomes(rows) == {"a": suite.Outcome("failed", "leaked")}
