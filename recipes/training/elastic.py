"""Support for elastic replicas: each one is a run of its own, with its own folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from filelock import FileLock, Timeout
from hydra.utils import get_class
from lightning.pytorch.trainer.states import RunningStage

from lightning_commfree import ElasticDiLoCoStrategy
from recipes.training.length import count_ranks

_LOCK_FILE = ".replica.lock"


def is_elastic(strategy: Mapping[str, Any]) -> bool:
    """Return whether a strategy's section of the configuration is for an elastic replica."""
    return issubclass(get_class(strategy["_target_"]), ElasticDiLoCoStrategy)


def check_replica(config: Mapping[str, Any], is_sweep: bool) -> None:
    """Refuse what one elastic replica cannot do.

    Args:
        config: of one job, in plain dicts and lists.
        is_sweep: whether it is a job of a sweep (`-m`).

    Raises:
        ValueError: the Trainer has another number of ranks than the replica, `ckpt_path=last` is
            given, or the job is part of a sweep.
    """
    size, ranks = config["strategy"]["replica_size"], count_ranks(config["trainer"])
    if ranks.per_node * ranks.num_nodes != size:
        raise ValueError(
            f"With strategy=elastic_diloco, each replica is a command of its own, here of"
            f" strategy.replica_size={size}, but trainer.devices={config['trainer']['devices']} and"
            f" trainer.num_nodes={config['trainer']['num_nodes']} start"
            f" {ranks.per_node * ranks.num_nodes}. Set trainer.devices={size} trainer.num_nodes=1,"
            " and run the command once per replica."
        )
    if config["ckpt_path"] == "last":
        raise ValueError(
            "ckpt_path=last cannot be combined with strategy=elastic_diloco: a replica that is"
            " started again continues from strategy.store. Omit it; or, to go back to a checkpoint,"
            " give its path and an empty store."
        )
    if is_sweep:
        raise ValueError(
            "Hydra's multirun (-m) cannot be combined with strategy=elastic_diloco: one store is"
            " for one job, so the second job of a sweep would find the first one's. Run each job as"
            " a separate command with a strategy.store of its own."
        )


@contextmanager
def own_folder(run_dir: str) -> Iterator[None]:
    """Hold a replica's folder during the body, so that no other replica writes the same files.

    Raises:
        ValueError: another replica holds it.
    """
    folder = Path(run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / _LOCK_FILE, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(
            f"Another replica writes its files to '{run_dir}'. Give each replica its own folder, by"
            " hydra.run.dir=..."
        ) from None
    try:
        yield
    finally:
        lock.release()


@contextmanager
def reading_all_rows(trainer: pl.Trainer) -> Iterator[None]:
    """Give an elastic replica the rows of all slots in the body, as in a validation."""
    before = trainer.state.stage
    trainer.state.stage = RunningStage.VALIDATING
    try:
        yield
    finally:
        trainer.state.stage = before
