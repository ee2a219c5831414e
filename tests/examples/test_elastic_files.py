"""The script of a replica runs, and the files for SLURM and Kubernetes agree with the code.

Neither system runs here. The manifest is validated against the schema of Kubernetes where the
package `kubernetes-validate` is installed.
"""

from __future__ import annotations

import ast
import multiprocessing
import os
import re
import runpy
import subprocess
import time
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_commfree.elastic.lighthouse import serve_lighthouse
from lightning_commfree.elastic.lighthouse_command import PORT, serve_parser
from lightning_commfree.elastic.state_server import TOKEN
from tests.world import free_port

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "elastic"
SCRIPT = (FOLDER / "train.py").read_text("utf-8")
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


def serve(port: int) -> None:
    server = serve_lighthouse("127.0.0.1", port, 1, 60.0, 5.0)
    time.sleep(300.0)
    server.shutdown()


def replica(folder: Path, number: int, url: str) -> None:
    os.chdir(folder)
    os.environ |= {"COMMFREE_RENDEZVOUS": url, "MAX_STEPS": "600"}
    with (folder / f"log{number}").open("w") as log, redirect_stdout(log):
        runpy.run_path(str(FOLDER / "train.py"), run_name="__main__")


@pytest.mark.skipif(
    find_spec("torchft") is None, reason="needs torchft: `pip install -e '.[elastic]'`"
)
def test_replicas_of_the_script_meet_and_end_with_equal_weights(tmp_path: Path) -> None:
    port, context = free_port(), multiprocessing.get_context("fork")
    # in a process of its own, so that no thread of Rust runs in this one when it forks
    server = context.Process(target=serve, args=(port,), daemon=True)
    server.start()
    replicas = [
        context.Process(target=replica, args=(tmp_path, number, f"http://127.0.0.1:{port}"))
        for number in range(2)
    ]
    try:
        for process in replicas:
            process.start()
        for process in replicas:
            process.join(120.0)
        assert [process.exitcode for process in replicas] == [0, 0]
    finally:
        for process in (*replicas, server):
            process.kill()
    said = [(tmp_path / f"log{number}").read_text().strip() for number in range(2)]
    slots, ends = zip(*(line.splitlines()[-1].split(": ") for line in said), strict=True)
    assert sorted(slots) == ["slot 0", "slot 1"]
    assert ends[0].startswith("step 600, weights sum to")
    assert ends[0] == ends[1]


def test_the_manifest_agrees_with_the_code() -> None:
    found = manifests()
    assert set(found) == {"Deployment", "Service", "Job", "NetworkPolicy"}
    lighthouse, replica = container(found["Deployment"]), container(found["Job"])

    assert lighthouse["command"][0] == "commfree-lighthouse"
    assert serve_parser().parse_args(lighthouse["command"][1:]).port == PORT
    assert [port["containerPort"] for port in lighthouse["ports"]] == [PORT]
    assert [port["port"] for port in found["Service"]["spec"]["ports"]] == [PORT]

    environment = {variable["name"]: variable.get("value") for variable in replica["env"]}
    assert environment == {
        "COMMFREE_RENDEZVOUS": f"http://{found['Service']['metadata']['name']}:{PORT}",
        TOKEN: None,
    }
    assert '"COMMFREE_RENDEZVOUS"' in SCRIPT
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


@pytest.mark.parametrize("name", ["slurm.sh", "slurm_lighthouse.sh"])
def test_the_batch_scripts_parse_and_start_what_exists(name: str) -> None:
    path = FOLDER / name
    subprocess.run(["bash", "-n", str(path)], check=True)
    text = path.read_text("utf-8")
    assert text.startswith("#!/bin/bash\n")
    command = text.strip().splitlines()[-1].split()
    assert command[0] == "exec"
    if command[1] == "commfree-lighthouse":
        assert serve_parser().parse_args(command[2:]).port == PORT
    else:
        assert (ROOT / command[-1]).is_file()
        first, last = map(int, re.findall(r"--array=(\d+)-(\d+)", text)[0])
        assert [last - first + 1] == constants("max_replicas")
