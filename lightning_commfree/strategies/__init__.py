"""The Lightning strategies, one module for each, and the parts that they share."""

from functools import partial
from typing import NoReturn

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from lightning_commfree.comm.ledger import Traffic
from lightning_commfree.strategies.base import ReplicaStrategy
from lightning_commfree.strategies.contracts import EveryStep, LocalUpdates
from lightning_commfree.strategies.distributed_lion import DistributedLionStrategy
from lightning_commfree.strategies.domino_tp import DominoTPStrategy
from lightning_commfree.strategies.inside import DataParallel
from lightning_commfree.strategies.streaming_diloco import StreamingDiLoCoStrategy

_NAMES = {
    "distributed_lion": DistributedLionStrategy,
    "domino_tp": DominoTPStrategy,
    "streaming_diloco": StreamingDiLoCoStrategy,
}
_START_METHODS = {"": "popen", "_fork": "fork", "_spawn": "spawn"}


def register_strategies() -> None:
    """Register every strategy for `Trainer(strategy="...")`; idempotent.

    Selecting one in Fabric then raises an error that says it needs the Trainer.
    """
    for name, strategy in _NAMES.items():
        for suffix, start_method in _START_METHODS.items():
            StrategyRegistry.register(
                name + suffix,
                strategy,
                description=f"{strategy.__name__} with `start_method` {start_method!r}",
                override=True,
                start_method=start_method,
            )
            refuse = partial(_refuse_fabric, name + suffix)
            STRATEGY_REGISTRY.register(name + suffix, refuse, override=True)


def _refuse_fabric(name: str) -> NoReturn:
    raise TypeError(
        f"{name!r} works only with the Lightning Trainer: it needs the Trainer's loops and hooks,"
        f" which Fabric does not have. Use `lightning.pytorch.Trainer(strategy={name!r})`."
    )


register_strategies()

__all__ = [
    "DataParallel",
    "DistributedLionStrategy",
    "DominoTPStrategy",
    "EveryStep",
    "LocalUpdates",
    "ReplicaStrategy",
    "StreamingDiLoCoStrategy",
    "Traffic",
    "register_strategies",
]
