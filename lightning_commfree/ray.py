"""The strategies as Ray Train workers use them (extra `ray`).

Ray starts the processes, gives each a device and creates torch's process group before the Trainer
exists, and its `prepare_trainer` accepts only subclasses of its own strategies. The classes here
are such subclasses, with the arguments of the strategies that they are named after. Use one where
Ray's documentation uses `RayDDPStrategy`; the rest of the worker's function stays the same:

    trainer = Trainer(
        strategy=RayStreamingDiLoCoStrategy(sync_every=50),
        plugins=[RayLightningEnvironment()],
        callbacks=[RayTrainReportCallback()],
        accelerator="auto",
        devices="auto",
    )
    trainer = prepare_trainer(trainer)

Ray's process group uses NCCL on GPUs and gloo on CPUs. The exchanges of Streaming DiLoCo and
Distributed Lion never use it: they have groups of their own, over gloo and host memory. Lightning's
barriers and metrics do use it, also between machines, where they would use gloo without Ray. To get
the same, pass `torch_config=TorchConfig(backend="gloo")` to `TorchTrainer`; a fit without it warns.
GPUs that share a model (`replica_size`, `node_size`, `RayDominoTPStrategy`) use groups of their own
over NCCL in any case.
"""

from __future__ import annotations

import math
from typing import Any

from typing_extensions import override

from lightning_commfree.diloco.strategy import StreamingDiLoCoStrategy
from lightning_commfree.domino.strategy import DominoTPStrategy
from lightning_commfree.host import HOST, VARIABLE, DDPStrategy
from lightning_commfree.lion.strategy import DistributedLionStrategy

try:
    import ray.train
    from ray.train.lightning import RayDDPStrategy
except ImportError as error:
    raise ImportError(
        f"`lightning_commfree.ray` needs Ray Train: pip install 'ray[train]' ({error})"
    ) from error

if not issubclass(RayDDPStrategy, DDPStrategy):
    raise ImportError(
        f"Ray Train uses the package `lightning` where it is installed, but lightning_commfree was"
        f" imported for `{HOST}`. Import your Trainer from `lightning.pytorch`, and set the"
        f" environment variable {VARIABLE}=lightning on the workers if a library imports the other."
    )


class _InRayWorker(RayDDPStrategy):
    """What a worker of Ray Train takes from Ray in place of the Trainer's arguments.

    It comes after `ReplicaStrategy` in the order of base classes, which therefore calls its methods
    where it would call those of `DDPStrategy`.
    """

    def __init__(self, **ddp_kwargs: Any) -> None:
        if "start_method" in ddp_kwargs:
            raise ValueError(
                f"`{type(self).__name__}(start_method={ddp_kwargs['start_method']!r})` would launch"
                " processes, but Ray has already started one per worker. Leave it out, and set"
                " `ScalingConfig(num_workers=...)`."
            )
        super().__init__(**ddp_kwargs)
        # Ray merges the folders that the workers report, which may be on different machines
        self.own_save_folders = True

    @property
    @override
    def num_processes(self) -> int:
        """Number of workers on this machine."""
        return int(ray.train.get_context().get_local_world_size())

    @property
    @override
    def num_nodes(self) -> int:
        """Number of machines, if all have as many workers as this one."""
        return math.ceil(int(ray.train.get_context().get_world_size()) / self.num_processes)

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        """Ignore the Trainer's argument: Ray has placed the workers."""


class RayStreamingDiLoCoStrategy(StreamingDiLoCoStrategy, _InRayWorker):
    """`StreamingDiLoCoStrategy` for a worker of Ray Train; it takes the same arguments."""


class RayDistributedLionStrategy(DistributedLionStrategy, _InRayWorker):
    """`DistributedLionStrategy` for a worker of Ray Train; it takes the same arguments."""


class RayDominoTPStrategy(DominoTPStrategy, _InRayWorker):
    """`DominoTPStrategy` for a worker of Ray Train; it takes the same arguments.

    If `tensor_parallel_size` is None, the workers of a machine share a model.
    """


__all__ = ["RayDistributedLionStrategy", "RayDominoTPStrategy", "RayStreamingDiLoCoStrategy"]
