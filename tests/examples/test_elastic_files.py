"""The script of a replica runs, and the files for SLURM, Kubernetes and SkyPilot fit the code.

None of these systems runs here. The manifest is validated against the schema of Kubernetes where
the package `kubernetes-validate` is installed.
"""

from __future__ import annotations

import ast
import multiprocessing
import os
import re
import runpy
import signal
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import yaml

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "elastic"
SCRIPT = (FOLDER / "train.py").read_text("utf-8")
PORT = 29510
KUBERNETES = "1.33"  # whose `backoffLimitPerIndex` is stable


def manifests() -> dict[str, Any]:
    text = (FOLDER / "kubernetes.yaml").read_text("utf-8")
    return {manifest["kind"]: manifest for manifest in yaml.safe_load_all(text)}


def container(manifest: dict[str, Any]) -> dict[str, Any]:
    (found,) = manifest["spec"]["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def constants(name: str) -> list[Any]:
    """Return the constant values of a keyword in the script."""
    return [
        keyword.value.value
        for keyword in ast.walk(ast.parse(SCRIPT))
        if isinstance(keyword, ast.keyword)
        and keyword.arg == name
        and isinstance(keyword.value, ast.Constant)
    ]


def replica(folder: Path, number: int) -> None:
    os.chdir(folder)
    os.environ |= {"MAX_STEPS": "300"}
    with (folder / f"log{number}").open("w") as log, redirect_stdout(log):
        runpy.run_path(str(FOLDER / "train.py"), run_name="__main__")


def test_replicas_of_the_script_meet_and_end_with_equal_weights(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    replicas = [context.Process(target=replica, args=(tmp_path, number)) for number in range(2)]
    try:
        for process in replicas:
            process.start()
        for process in replicas:
            process.join(120.0)
        assert [process.exitcode for process in replicas] == [0, 0]
    finally:
        for process in replicas:
            process.kill()
    said = [(tmp_path / f"log{number}").read_text().strip() for number in range(2)]
    slots, ends = zip(*(line.splitlines()[-1].split(": ") for line in said), strict=True)
    assert sorted(slots) == ["slot 0", "slot 1"]
    assert ends[0].startswith("step 300, weights sum to")
    assert ends[0] == ends[1]


def test_the_manifest_agrees_with_the_code() -> None:
    found = manifests()
    assert set(found) == {"Deployment", "Service", "Job", "NetworkPolicy"}
    store, replica = container(found["Deployment"]), container(found["Job"])

    assert store["command"] == ["commfree-store", "serve", "--bind", f"$(POD_IP):{PORT}"]
    assert [port["containerPort"] for port in store["ports"]] == [PORT]
    assert [port["port"] for port in found["Service"]["spec"]["ports"]] == [PORT]

    environment = {variable["name"]: variable.get("value") for variable in replica["env"]}
    assert environment == {"COMMFREE_STORE": f"tcp://{found['Service']['metadata']['name']}:{PORT}"}
    assert '"COMMFREE_STORE"' in SCRIPT
    assert (ROOT / replica["command"][1]).is_file()
    assert [found["Job"]["spec"]["completions"]] == constants("max_replicas")
    labels = [
        found[kind]["spec"]["template"]["metadata"]["labels"] for kind in ("Deployment", "Job")
    ]
    (rule,) = found["NetworkPolicy"]["spec"]["ingress"]
    allowed = rule["from"][0]["podSelector"]["matchLabels"].items()
    assert all(allowed <= label.items() for label in labels)
    assert found["Service"]["spec"]["selector"].items() <= labels[0].items()


def test_the_manifest_follows_the_schema_of_kubernetes() -> None:
    validate = pytest.importorskip(
        "kubernetes_validate", reason="needs `pip install kubernetes-validate`, with the schemas"
    )
    for manifest in manifests().values():
        validate.validate(manifest, KUBERNETES, strict=True)
    broken = manifests()["Job"]
    broken["spec"]["completionmode"] = broken["spec"].pop("completionMode")
    with pytest.raises(validate.ValidationError):
        validate.validate(broken, KUBERNETES, strict=True)


def test_the_skypilot_task_agrees_with_the_code() -> None:
    task = yaml.safe_load((FOLDER / "skypilot.yaml").read_text("utf-8"))
    # as https://docs.skypilot.co/en/latest/reference/yaml-spec.html names them
    known = {"name", "workdir", "num_nodes", "resources", "envs", "secrets", "setup", "run"}
    assert set(task) == known
    resources = task["resources"]
    assert set(resources) == {"cpus", "memory", "use_spot", "job_recovery"}
    assert resources["use_spot"] is True
    assert task["num_nodes"] == 1
    recovery = resources["job_recovery"]
    assert set(recovery) == {"strategy", "max_restarts_on_errors", "recover_on_exit_codes"}
    assert recovery["recover_on_exit_codes"] == [128 + signal.SIGTERM], "a replica that left"

    assert task["envs"]["COMMFREE_STORE"] is None, "the command names it"
    assert '"COMMFREE_STORE"' in SCRIPT
    for step in (task["setup"], task["run"]):
        subprocess.run(["bash", "-n", "-c", step], check=True)
    install, command = task["setup"].splitlines()[-1], task["run"].strip()
    assert (ROOT / command.split()[-1]).is_file()
    named = re.fullmatch(r"\S+ install -c (\S+) '\.\[(\w+)\]'", install)
    assert named is not None
    assert (ROOT / named[1]).is_file()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert named[2] in project["optional-dependencies"]


def test_the_batch_script_parses_and_starts_what_exists() -> None:
    path = FOLDER / "slurm.sh"
    subprocess.run(["bash", "-n", str(path)], check=True)
    text = path.read_text("utf-8")
    assert text.startswith("#!/bin/bash\n")
    command = text.strip().splitlines()[-1].split()
    assert command[:2] == ["exec", "python"]
    assert (ROOT / command[-1]).is_file()
    first, last = map(int, re.findall(r"--array=(\d+)-(\d+)", text)[0])
    assert [last - first + 1] == constants("max_replicas")
