"""The Lightning strategies; importing this package registers them with Lightning by name."""

from lightning_commfree.comm.ledger import Traffic
from lightning_commfree.diloco.strategy import StreamingDiLoCoStrategy
from lightning_commfree.domino.strategy import DominoTPStrategy
from lightning_commfree.elastic.strategy import ElasticDiLoCoStrategy
from lightning_commfree.fit.base import ReplicaStrategy
from lightning_commfree.fit.contracts import LocalCopies
from lightning_commfree.host import StrategyRegistry
from lightning_commfree.layouts import DataParallel
from lightning_commfree.lion.strategy import DistributedLionStrategy

_NAMES = {
    "distributed_lion": DistributedLionStrategy,
    "domino_tp": DominoTPStrategy,
    "elastic_diloco": ElasticDiLoCoStrategy,
    "streaming_diloco": StreamingDiLoCoStrategy,
}
_START_METHODS = {"": "popen", "_fork": "fork", "_spawn": "spawn"}


def register_strategies() -> None:
    """Register every strategy for `Trainer(strategy="...")`; idempotent."""
    for name, strategy in _NAMES.items():
        for suffix, start_method in _START_METHODS.items():
            StrategyRegistry.register(
                name + suffix,
                strategy,
                description=f"{strategy.__name__} with `start_method` {start_method!r}",
                override=True,
                start_method=start_method,
            )


register_strategies()

__all__ = [
    "DataParallel",
    "DistributedLionStrategy",
    "DominoTPStrategy",
    "ElasticDiLoCoStrategy",
    "LocalCopies",
    "ReplicaStrategy",
    "StreamingDiLoCoStrategy",
    "Traffic",
    "register_strategies",
]
