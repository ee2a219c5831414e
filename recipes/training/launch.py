"""Who starts a run's processes: Lightning from this one, or torchrun or a cluster before it."""

from __future__ import annotations

import os
from typing import Any

from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from lightning.fabric.plugins.environments.lsf import LSFEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

from recipes.training.layout import inside_of

_LAUNCHERS = (TorchElasticEnvironment, SLURMEnvironment, LSFEnvironment)
_WITHIN = ("fork", "spawn", "forkserver")  # start methods whose workers do not read the command
_BASIC = "hydra._internal.core_plugins."
_SUBMITIT = "hydra_plugins.hydra_submitit_launcher."


def launched_outside() -> bool:
    """Return whether torchrun or a cluster has started this process as one of several."""
    return any(environment.detect() for environment in _LAUNCHERS)


def with_launcher(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with the start method that goes with who starts the processes."""
    # with any other start method Lightning launches its own processes even where torchrun or a
    # cluster has launched all of them already; "popen" takes those
    if not launched_outside():
        return config
    return {**config, "strategy": {**config["strategy"], "start_method": "popen"}}


def builds_on_meta(config: dict[str, Any]) -> bool:
    """Return whether the ranks make only their parts of the model, each in a process of its own.

    Ranks that are forked share the memory of the model that their parent has built.
    """
    strategy = config["strategy"]
    own_process = strategy["start_method"] == "popen"
    return own_process and inside_of(strategy) == "fsdp" and config.get("lora") is None


def check_launch(config: dict[str, Any]) -> None:
    """Refuse a run whose processes would wait for others that nobody starts, or spoil a sweep.

    Args:
        config: of one job, in plain dicts and lists.

    Raises:
        ValueError: see `check_sweep`; or several nodes are asked for from outside of a cluster.
    """
    nodes = config["trainer"]["num_nodes"]
    # NODE_RANK: the user starts the command on every node by hand, as Lightning documents it
    by_hand = any(name in os.environ for name in ("NODE_RANK", "GROUP_RANK"))
    if nodes > 1 and not launched_outside() and not by_hand:
        raise ValueError(
            f"trainer.num_nodes={nodes}, and this process is not one of several that torchrun, srun"
            " or LSF has started: it would wait for the other nodes. Start it on every node by one"
            ' of them (recipes/README.md, "Clusters"), or set trainer.num_nodes=1.'
        )
    if HydraConfig.initialized():
        check_sweep(HydraConfig.get(), config["strategy"]["start_method"], launched_outside())


def check_sweep(hydra: HydraConf, start_method: str, outside: bool) -> None:
    """Refuse a sweep (`-m`) of which some jobs would go wrong without a word.

    Hydra's own launcher runs one job after the other in one process, which must then start the
    ranks of each anew: with "popen" each child would run the whole command, sweep and all, and
    where torchrun or srun have started the ranks, they keep the first job's process group.
    submitit's jobs are processes of their own, under SLURM with all their ranks.

    Args:
        hydra: what `HydraConfig.get()` returns.
        start_method: of the job's strategy.
        outside: what `launched_outside` returns.

    Raises:
        ValueError: the launcher does not go with how the job's ranks are started.
    """
    if hydra.mode != RunMode.MULTIRUN:
        return
    launcher = str(hydra.launcher["_target_"])
    if not launcher.startswith((_BASIC, _SUBMITIT)):
        raise ValueError(
            f"Hydra's launcher {launcher} has not been tried with these recipes, of which every job"
            " starts processes itself. Use Hydra's own (leave out hydra/launcher=...), or submitit"
            " on a cluster."
        )
    if outside and launcher.startswith(_BASIC):
        raise ValueError(
            "Hydra's multirun (-m) does not go with torchrun and srun: each of the ranks they"
            " started would run the whole sweep, and all its jobs in the first one's process group."
            " Run each job as a command of its own; on a cluster,"
            " hydra/launcher=submitit_slurm does."
        )
    if not outside and start_method not in _WITHIN:
        raise ValueError(
            f"Hydra's multirun (-m) does not go with strategy.start_method={start_method}: each"
            " child process would run the whole sweep again, and later jobs would lose ranks"
            " without a word. Use strategy.start_method=fork or spawn, or run each job as a command"
            " of its own."
        )
