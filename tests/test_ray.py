"""The strategies in workers of Ray Train: real ones, which train as ranks without Ray do."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_commfree.comm.job import replica_mesh
from lightning_commfree.fit.ranks import Ranks
from lightning_commfree.host import DDPStrategy
from tests.fit.models import assert_same
from tests.pages import ROOT, python_of
from tests.world import TIMEOUT

(SCRIPT,) = (
    block
    for block in python_of((ROOT / "docs/with_other_libraries.md").read_text("utf-8"))
    if "TorchTrainer(" in block
)
MODULE = "lightning_commfree.ray"
needs_ray = pytest.mark.skipif(
    find_spec("ray") is None, reason="needs Ray Train, which the extra `dev` installs"
)


@pytest.mark.timeout(600)  # two groups of workers start, which a busy machine does slowly
@needs_ray
def test_workers_of_ray_train_as_forked_ranks_do_and_resume_after_a_kill(tmp_path: Path) -> None:
    """In a process of its own: Ray starts threads, and other tests fork."""
    (tmp_path / "script.py").write_text(SCRIPT)
    # not in `tmp_path`, where the paths of its sockets would be too long
    with TemporaryDirectory(prefix="ray_", ignore_cleanup_errors=True) as folder:
        _run_the_cases(tmp_path, folder)
    for name in ("diloco", "lion", "domino"):
        expected = torch.load(tmp_path / f"{name}.pt")
        for rank in range(2):
            assert_same(torch.load(tmp_path / f"{name}_{rank}.pt"), expected, name)

    first, resumed = map(int, (tmp_path / "began").read_text().split())
    assert first == 0
    assert resumed > 0, "it resumes from a reported checkpoint"
    result: Any = torch.load(tmp_path / "result.pt")
    assert result["files"] == {"checkpoint.ckpt", ".commfree", "rank_1.pt"}
    assert result["metrics"]["epoch"] == 3
    assert result["metrics"]["loss_epoch"] < 30


def _run_the_cases(place: Path, rays_folder: str) -> None:
    environment = {
        **os.environ,
        "RAY_TMPDIR": rays_folder,
        "TMPDIR": rays_folder,
        "PYTHONPATH": str(ROOT),
        "RAY_AUTH_MODE": "disabled",  # writes no token into the home folder
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",  # how often it looks for reports
    }
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/ray_cases.py"), str(place)],
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]


def import_with(ray_ddp: type | None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import our module with a stand-in for Ray's strategy; None stands for no Ray at all."""
    monkeypatch.setitem(sys.modules, MODULE, ModuleType(MODULE))  # restored after the test
    del sys.modules[MODULE]
    for name in ("ray", "ray.train", "ray.train.lightning"):
        module = None if ray_ddp is None else ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
    if ray_ddp is not None:
        sys.modules["ray.train.lightning"].RayDDPStrategy = ray_ddp  # type: ignore[attr-defined]
    return import_module(MODULE)


def test_without_ray_an_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ImportError, match=r"needs Ray Train: pip install 'ray\[train\]'"):
        import_with(None, monkeypatch)


def test_the_other_lightning_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ImportError, match=r"imported for `lightning`\. Import your Trainer from"):
        import_with(object, monkeypatch)


def test_a_start_method_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = import_with(DDPStrategy, monkeypatch)
    for name in ours.__all__:
        with pytest.raises(ValueError, match=rf"`{name}\(start_method='fork'\)` would launch"):
            getattr(ours, name)(start_method="fork")


def test_ray_says_how_many_workers_and_machines_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = import_with(DDPStrategy, monkeypatch)
    context = SimpleNamespace(get_world_size=lambda: 6, get_local_world_size=lambda: 2)
    monkeypatch.setattr(ours.ray, "train", SimpleNamespace(get_context=lambda: context), False)
    strategy = ours.RayDominoTPStrategy()
    strategy.num_nodes = 1  # as every Trainer sets it that is not told a number
    assert (strategy.num_nodes, strategy.num_processes, strategy.tensor_parallel_size) == (3, 2, 2)


@pytest.mark.parametrize(("found", "warnings"), [("nccl", 1), ("gloo", 0), (None, 0)])
def test_a_group_that_already_uses_nccl_between_machines_is_told(
    found: str | None, warnings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray makes one before the Trainer exists; a fit of its own would have chosen gloo."""
    said: list[str] = []
    monkeypatch.setattr("lightning_commfree.fit.ranks.existing_backend", lambda: found)
    monkeypatch.setattr("lightning_commfree.fit.ranks.rank_zero_warn", said.append)
    machine = SimpleNamespace(main_address="127.0.0.1", main_port=29500)
    strategy: Any = SimpleNamespace(
        num_nodes=2,
        global_rank=0,
        world_size=1,
        root_device=torch.device("cpu"),
        cluster_environment=machine,
        lightning_module=None,
        set_world_ranks=lambda: None,
    )
    channels: Any = SimpleNamespace(close=lambda failed: None)
    ranks = Ranks(strategy, TIMEOUT, None, lambda size: replica_mesh(size, 1), lambda _: channels)
    ranks.join(lambda: None)
    ranks.leave()
    assert len(said) == warnings
    assert all("nccl" in text and "Ray's `TorchConfig`" in text for text in said)
