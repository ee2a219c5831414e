"""Check how the processes of a run are started: by Lightning, by torchrun or by a cluster."""

from __future__ import annotations

import os
from typing import Any

from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from lightning.fabric.plugins.environments.lsf import LSFEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

from recipes.training.elastic import check_replica, is_elastic
from recipes.training.layout import inside_of

_LAUNCHERS = (TorchElasticEnvironment, SLURMEnvironment, LSFEnvironment)
_WITHIN = (
    "fork",
    "spawn",
    "forkserver",
)  # whose workers do not run the command again
_BASIC = "hydra._internal.core_plugins."
_SUBMITIT = "hydra_plugins.hydra_submitit_launcher."


def launched_outside() -> bool:
    """Return whether torchrun or a cluster has started this process as one rank of several."""
    return any(environment.detect() for environment in _LAUNCHERS)


def with_launcher(config: dict[str, Any]) -> dict[str, Any]:
    """Set the start method to "popen" if torchrun or a cluster has started the ranks."""
    # with any other start method Lightning launches more processes even if torchrun or a cluster
    # has launched all of them already; with "popen" it uses those
    if not launched_outside():
        return config
    return {**config, "strategy": {**config["strategy"], "start_method": "popen"}}


def builds_on_meta(config: dict[str, Any]) -> bool:
    """Return whether each rank builds only its shard of the model.

    Forked ranks share the memory of the model that their parent has built.
    """
    strategy = config["strategy"]
    own_process = strategy["start_method"] == "popen"
    return own_process and inside_of(strategy) == "fsdp" and config.get("lora") is None


def check_launch(config: dict[str, Any]) -> None:
    """Refuse a run that would wait for nodes that nobody starts, or that would break a sweep.

    Args:
        config: of one job, in plain dicts and lists.

    Raises:
        ValueError: several nodes are requested outside of a cluster; or from `check_replica` or
            `check_sweep`.
    """
    if is_elastic(config["strategy"]):
        sweeps = HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN
        check_replica(config, sweeps)
    nodes = config["trainer"]["num_nodes"]
    # NODE_RANK: the user starts the command on every node, as Lightning documents
    by_hand = any(name in os.environ for name in ("NODE_RANK", "GROUP_RANK"))
    if nodes > 1 and not launched_outside() and not by_hand:
        raise ValueError(
            f"trainer.num_nodes={nodes}, but torchrun, srun or LSF has not started this process: it"
            " would wait for the other nodes. Start it on every node by one of them"
            ' (recipes/README.md, "Clusters"), or set trainer.num_nodes=1.'
        )
    if HydraConfig.initialized():
        check_sweep(HydraConfig.get(), config["strategy"]["start_method"], launched_outside())


def check_sweep(hydra: HydraConf, start_method: str, outside: bool) -> None:
    """Refuse a sweep (`-m`) in which some jobs would silently go wrong.

    Hydra's own launcher runs all jobs in one process, which must start new ranks for each: with
    "popen" each child would run the whole sweep again, and ranks that torchrun or srun has started
    would keep the first job's process group. submitit's jobs are separate processes, under SLURM
    with all their ranks.

    Args:
        hydra: from `HydraConfig.get()`.
        start_method: of the job's strategy.
        outside: from `launched_outside`.

    Raises:
        ValueError: the launcher does not fit the way the ranks are started.
    """
    if hydra.mode != RunMode.MULTIRUN:
        return
    launcher = str(hydra.launcher["_target_"])
    if not launcher.startswith((_BASIC, _SUBMITIT)):
        raise ValueError(
            f"Hydra's launcher {launcher} has not been tested with these recipes, whose jobs start"
            " processes themselves. Use Hydra's own (omit hydra/launcher=...), or submitit on a"
            " cluster."
        )
    if outside and launcher.startswith(_BASIC):
        raise ValueError(
            "Hydra's multirun (-m) cannot be combined with torchrun and srun: each of the ranks"
            " they started would run the whole sweep, with all jobs in the first job's process"
            " group. Run each job as a separate command; on a cluster, use"
            " hydra/launcher=submitit_slurm."
        )
    if not outside and start_method not in _WITHIN:
        raise ValueError(
            f"Hydra's multirun (-m) cannot be combined with strategy.start_method={start_method}:"
            " each child process would run the whole sweep again, and later jobs would silently"
            " lose ranks. Use strategy.start_method=fork or spawn, or run each job as a separate"
            " command."
        )
