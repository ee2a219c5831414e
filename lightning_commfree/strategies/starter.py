"""What a strategy needs of Lightning around a fit: a launcher, a checkpoint plugin, its job."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.strategies import DDPStrategy

from lightning_commfree.checkpoint.rank_parts import copied
from lightning_commfree.checkpoint.whole_files import FilePath
from lightning_commfree.comm.network import Job
from lightning_commfree.comm.world import PATIENCE, default_backend
from lightning_commfree.lightning_internals import LAUNCH
from lightning_commfree.resume.checkpoint_io import WholeCheckpointIO, writes_later
from lightning_commfree.strategies.launching import Check, OrderlyLauncher, checked
from lightning_commfree.strategies.ranks import Ranks


class Starter:
    """Starts a strategy's ranks, and writes what they save.

    Args:
        strategy: whose it is.
        ranks: all of its job.
        ddp_kwargs: what `DDPStrategy` got.
        check: looks at what will be run, before the ranks are started.

    Attributes:
        plugin: the user's, for checkpoints.
    """

    def __init__(
        self,
        strategy: DDPStrategy,
        ranks: Ranks,
        ddp_kwargs: Mapping[str, Any],
        check: Check,
    ) -> None:
        self._check = check
        self.plugin: CheckpointIO | None = ddp_kwargs.get("checkpoint_io")
        self._strategy, self._ranks = strategy, ranks
        self._timeout: timedelta = ddp_kwargs.get("timeout", PATIENCE)
        self._start_method: str = ddp_kwargs.get("start_method", "popen")
        self._launcher: Any = None

    def in_place_of(self, lightnings: Any) -> Any:
        """Return Lightning's launcher where the Trainer has one, but its ranks leave in order."""
        if lightnings is None or self._launcher is not None or not LAUNCH.works(None):
            return self._launcher or lightnings
        if self._start_method == "popen":
            self._launcher = checked(lightnings, self._check)
        else:
            self._launcher = OrderlyLauncher(self._strategy, self._start_method, self._check)
        return self._launcher

    def restore_callbacks(self) -> None:
        """Give the Trainer back what ranks that have left took away, when its hooks have run."""
        if isinstance(self._launcher, OrderlyLauncher):
            self._launcher.restore_callbacks()

    def checkpoint_io(self) -> CheckpointIO:
        """Return the user's plugin, else one whose files are whole; asynchronous ones wrap that."""
        if self.plugin is None:
            self.plugin = WholeCheckpointIO()
        elif hasattr(self.plugin, "checkpoint_io"):  # it keeps the first one that it gets
            self.plugin.checkpoint_io = WholeCheckpointIO()
        return self.plugin

    def job(self) -> Job:
        """Return what this process is among the others; it gets its rank."""
        strategy, several = self._strategy, self._strategy.num_nodes > 1
        strategy.set_world_ranks()
        environment = strategy.cluster_environment
        device = strategy.root_device
        return Job(
            strategy.global_rank,
            strategy.world_size,
            self._timeout,
            strategy.process_group_backend or default_backend(device),
            device,
            environment.main_address if environment is not None and several else None,
        )

    def write(self, checkpoint: dict[str, Any], path: FilePath, options: Any = None) -> None:
        """Write a checkpoint on rank 0.

        Raises:
            RuntimeError: it cannot be written; on all ranks.
        """
        with self._ranks.failing_as_one():
            if self._strategy.is_global_zero and writes_later(self.checkpoint_io()):
                # Lightning before 2.6 writes what the tensors have become meanwhile
                checkpoint = copied(checkpoint)
            DDPStrategy.save_checkpoint(self._strategy, checkpoint, path, options)
