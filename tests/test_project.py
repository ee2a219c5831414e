"""The files around the code: metadata, CI, packaging and the supply chain agree with each other."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def project() -> dict[str, Any]:
    return tomllib.loads(text_of("pyproject.toml"))["project"]


def test_the_citation_matches_this_release() -> None:
    citation = yaml.safe_load(text_of("CITATION.cff"))
    assert (citation["version"], citation["license"]) == (project()["version"], "Apache-2.0")
    assert citation["keywords"] == project()["keywords"]
    papers = {reference["url"] for reference in citation["references"]}
    assert papers == set(project()["urls"].values())
    for paper in papers:
        assert paper in text_of("README.md")


def test_the_public_ci_runs_the_local_commands() -> None:
    jobs = yaml.safe_load(text_of(".github/workflows/ci.yml"))["jobs"]
    run = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert sorted(run) == ["make audit", "make check", "make docs", "make test"]
    assert {command.split()[1] for command in run} <= TARGETS
    pythons = jobs["test"]["strategy"]["matrix"]["python"]
    assert pythons[0] == project()["requires-python"].removeprefix(">=")
    named = {line.rpartition(" ")[2] for line in project()["classifiers"] if ":: 3." in line}
    assert set(pythons) <= named


def test_the_image_copies_files_that_exist() -> None:
    lines = text_of("Dockerfile").replace("\\\n", " ").splitlines()
    copied = [shlex.split(line)[2:-1] for line in lines if line.startswith("COPY")]
    names = {name for words in copied for name in words}
    assert {"lightning_commfree", "commfree_planner", "recipes", "conf"} <= names
    assert [name for name in names if not (ROOT / name).exists()] == []
    ignored = text_of(".dockerignore").split()
    assert ".venv" in ignored
    assert not names & set(ignored)


def test_the_fast_tests_and_their_exclusions_exist() -> None:
    """Otherwise a renamed slow file would silently rejoin the fast ones."""
    makefile = text_of("Makefile")
    [folders] = re.findall(r"^FAST_TESTS := (.*)$", makefile, re.MULTILINE)
    [left_out] = re.findall(r"^FAST_LEFT_OUT := (.*)$", makefile, re.MULTILINE)
    names = {path.name for folder in folders.split() for path in (ROOT / folder).rglob("test_*.py")}
    for name in left_out.split():
        assert any(found.startswith(f"test_{name}") for found in names), name


def test_the_targets_in_contributing_exist() -> None:
    told = re.findall(r"^\$ make ([a-z-]+)", text_of("CONTRIBUTING.md"), re.MULTILINE)
    assert told == ["test-fast", "check", "test", "docs"]
    assert set(told) <= TARGETS
    helped = set(re.findall(r'@echo "make ([a-z-]+) ', text_of("Makefile")))
    hidden = {"help"}
    assert TARGETS - hidden == helped


# modules of packages with another name, or that come with another package
PACKAGE_OF = {"hydra": "hydra-core", "omegaconf": "hydra-core", "pydantic_core": "pydantic"}
DEMOS = ("recipes", "benchmarks/common", "benchmarks/elastic_demo", "benchmarks/lab")


def imported_at_start(path: Path) -> set[str]:
    """Libraries that importing a file imports: not those named inside functions."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
    ours = {"lightning_commfree", "commfree_planner", "recipes", "benchmarks"}
    return {name.partition(".")[0] for name in found} - sys.stdlib_module_names - ours


def test_the_demos_start_with_the_packages_that_their_set_up_installs(tmp_path: Path) -> None:
    extras = project()["optional-dependencies"]
    texts = [*project()["dependencies"], *extras["demo"]]
    named = {Requirement(text).name for text in texts}
    files = [path for folder in DEMOS for path in (ROOT / folder).rglob("*.py")]
    modules = {name for path in files for name in imported_at_start(path)}
    needed = {PACKAGE_OF.get(name, name.replace("_", "-")) for name in modules}
    assert needed - named == set()
    assert "matplotlib" in needed
    for target in ("demo", "elastic-demo", "compare"):
        assert f"\n{target}: $(DEMO_READY)\n" in text_of("Makefile")

    (tmp_path / "one.py").write_text("import wandb.sdk\ndef late():\n    import peft\n")
    assert imported_at_start(tmp_path / "one.py") == {"wandb"}


@pytest.mark.parametrize("code", [0, 1])
def test_the_set_up_counts_packages_and_fails_if_pip_does(tmp_path: Path, code: int) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(
        f"""#!/bin/sh
        for n in 1 2 3 4 5 6 7 8 9 10 11; do echo "Collecting package$n"; done
        echo "  Using cached package1.whl"
        echo "Installing collected packages: package1"
        [ "$3" = --version ] && exit
        echo "WARNING: a warning" >&2
        exit {code}
        """
    )
    python.chmod(0o755)
    stamp = tmp_path / ".demo-set-up-done"
    apart = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL")}
    made = subprocess.run(  # not as a part of `make test`, which would name its folder
        ["make", f"VENV={tmp_path}", str(stamp)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=apart,
    )
    counts = ["  10 packages collected", "  11 packages collected, installing them"]
    assert made.stdout.splitlines()[1:] == counts
    assert "WARNING: a warning" in made.stderr
    assert (made.returncode != 0) == bool(code)
    assert stamp.exists() == (code == 0)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_links_lead_somewhere(page: str) -> None:
    found = re.findall(r"\]\(([^)#]+)", text_of(page))
    assert found
    assert [x for x in found if "://" not in x and not (ROOT / x).exists()] == []


@pytest.fixture
def audit() -> ModuleType:
    """Import `.ci/audit`, which has no suffix."""
    loader = SourceFileLoader("audit", str(ROOT / ".ci/audit"))
    module = module_from_spec(spec_from_loader("audit", loader))
    loader.exec_module(module)
    return module


STOLE_CREDENTIALS = ("2.6.2", "2.6.3")  # GHSA-w37p-236h-pfx3


def test_an_install_never_takes_the_lightning_that_stole_credentials() -> None:
    [lightning] = (r for r in map(Requirement, project()["dependencies"]) if r.name == "lightning")
    assert not any(version in lightning.specifier for version in STOLE_CREDENTIALS)
    assert all(version in lightning.specifier for version in ("2.5.2", "2.6.1", "2.6.6"))


def test_no_pin_is_known_to_be_bad(audit: ModuleType, tmp_path: Path) -> None:
    bad = audit.requirements(ROOT / ".ci/known_bad.txt")
    assert audit.listed(audit.pins(ROOT / "constraints.txt"), bad) == []

    for version in STOLE_CREDENTIALS:
        for name in ("lightning", "PyTorch_Lightning"):
            wrong = tmp_path / "constraints.txt"
            wrong.write_text(
                f"{text_of('constraints.txt')}{name}=={version} ; python_version > '3'\n"
            )
            assert audit.listed(audit.pins(wrong), bad), f"{name} {version}"


def test_a_finding_of_pip_audit_fails_the_audit(audit: ModuleType, monkeypatch, capsys) -> None:
    def vulnerable(advisory: str) -> dict[str, Any]:
        return {
            **{"name": "lightning", "version": "2.6.6"},
            "vulns": [{"id": "PYSEC-1", "aliases": [advisory], "fix_versions": ["2.6.7"]}],
        }

    report = [{"name": "torch", "version": "2.13.0", "vulns": []}, vulnerable("GHSA-new")]
    monkeypatch.setattr(audit, "run_pip_audit", lambda *_: report)
    assert audit.main() == 1
    assert "lightning 2.6.6: PYSEC-1, fixed in 2.6.7" in capsys.readouterr().out

    report[1] = vulnerable(*audit.ACCEPTED)
    assert audit.main() == 0
    assert "pip-audit looked up 2 pins" in capsys.readouterr().out


def test_an_index_without_advisories_is_not_taken_for_a_clean_audit(
    audit: ModuleType, monkeypatch, capsys
) -> None:
    """Behind a mirror pip-audit skips every package and exits with 0."""
    skipped = {"name": "torch", "skip_reason": "Dependency not found on PyPI"}
    monkeypatch.setattr(audit, "run_pip_audit", lambda *_: [skipped])
    assert audit.main() == 0
    assert (
        "known_bad.txt alone; no pip-audit: the package index has no data"
        in capsys.readouterr().out
    )
