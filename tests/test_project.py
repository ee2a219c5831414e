"""What others expect of a project: its files are whole, and say what holds."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def project() -> dict[str, Any]:
    return tomllib.loads(text_of("pyproject.toml"))["project"]


def test_the_citation_is_of_this_release() -> None:
    citation = yaml.safe_load(text_of("CITATION.cff"))
    assert (citation["version"], citation["license"]) == (project()["version"], "Apache-2.0")
    assert citation["keywords"] == project()["keywords"]
    papers = {reference["url"] for reference in citation["references"]}
    assert papers == set(project()["urls"].values())
    for paper in papers:
        assert paper in text_of("README.md")


def test_the_public_ci_runs_what_one_runs_here() -> None:
    jobs = yaml.safe_load(text_of(".github/workflows/ci.yml"))["jobs"]
    run = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert sorted(run) == ["make check", "make docs", "make test"]
    assert {command.split()[1] for command in run} <= TARGETS
    pythons = jobs["test"]["strategy"]["matrix"]["python"]
    assert pythons[0] == project()["requires-python"].removeprefix(">=")
    named = {line.rpartition(" ")[2] for line in project()["classifiers"] if ":: 3." in line}
    assert set(pythons) <= named


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.name)
def test_an_issue_form_asks_something(form: Path) -> None:
    content = yaml.safe_load(form.read_text(encoding="utf-8"))
    if form.name == "config.yml":
        assert content == {"blank_issues_enabled": True}
        return
    assert content["name"]
    assert content["description"]
    ids = [part["id"] for part in content["body"]]
    assert len(ids) == len(set(ids)) > 0
    assert all(part["attributes"]["label"] for part in content["body"])


def test_the_image_takes_what_there_is() -> None:
    lines = text_of("Dockerfile").replace("\\\n", " ").splitlines()
    copied = [shlex.split(line)[2:-1] for line in lines if line.startswith("COPY")]
    names = {name for words in copied for name in words}
    assert {"lightning_commfree", "commfree_planner", "recipes", "conf"} <= names
    assert [name for name in names if not (ROOT / name).exists()] == []
    ignored = text_of(".dockerignore").split()
    assert ".venv" in ignored
    assert not names & set(ignored)


def test_the_fast_tests_are_there_and_what_they_leave_out_too() -> None:
    """A file that is renamed would else come back among the fast ones without a word."""
    makefile = text_of("Makefile")
    [folders] = re.findall(r"^FAST_TESTS := (.*)$", makefile, re.MULTILINE)
    [left_out] = re.findall(r"^FAST_LEFT_OUT := (.*)$", makefile, re.MULTILINE)
    names = {path.name for folder in folders.split() for path in (ROOT / folder).rglob("test_*.py")}
    for name in left_out.split():
        assert any(found.startswith(f"test_{name}") for found in names), name


def test_what_contributors_are_told_to_run_can_be_run() -> None:
    told = re.findall(r"^\$ make ([a-z-]+)", text_of("CONTRIBUTING.md"), re.MULTILINE)
    assert told == ["test-fast", "check", "test", "docs"]
    assert set(told) <= TARGETS
    helped = set(re.findall(r'@echo "make ([a-z-]+) ', text_of("Makefile")))
    hidden = {"help"}
    assert TARGETS - hidden == helped


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "SECURITY.md"])
def test_links_lead_somewhere(page: str) -> None:
    found = re.findall(r"\]\(([^)]+)\)", text_of(page))
    assert found
    assert [link for link in found if not (ROOT / link).exists()] == []
