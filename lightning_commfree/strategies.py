"""The Lightning strategies; importing this package registers them with Lightning by name."""

from functools import partial
from itertools import product
from typing import Any, NoReturn

from lightning_commfree.comm.ledger import Traffic
from lightning_commfree.diloco.strategy import StreamingDiLoCoStrategy
from lightning_commfree.domino.strategy import DominoTPStrategy
from lightning_commfree.elastic.strategy import ElasticDiLoCoStrategy
from lightning_commfree.fit.base import ReplicaStrategy
from lightning_commfree.fit.contracts import EveryStep, LocalUpdates
from lightning_commfree.host import (
    FABRIC_STRATEGIES,
    StrategyRegistry,
    pl,
    when_other_is_imported,
    wrong_host,
)
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
    """Register every strategy for `Trainer(strategy="...")`; idempotent.

    Passing one of these names to Fabric then raises an error: the strategies need the Trainer.
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
    _refuse_in(
        FABRIC_STRATEGIES,
        "{name!r} works only with the Lightning Trainer: it needs the Trainer's loops and hooks,"
        f" which Fabric does not have. Use `{pl.__name__}.Trainer(strategy={{name!r}})`.",
    )


def _refuse_in(registry: Any, message: str) -> None:
    """Register every strategy name in a registry so that using it raises a `TypeError`.

    The strategies do not work with Fabric, or with whichever Lightning package is not selected
    (`lightning` or `pytorch_lightning`), so the registries there refuse their names. `message` is
    the error text, in which `{name!r}` stands for the strategy's name.
    """
    for name in product(_NAMES, _START_METHODS):
        refuse = partial(_refuse, message.format(name="".join(name)))
        registry.register("".join(name), refuse, override=True)


def _refuse(message: str) -> NoReturn:
    raise TypeError(message)


register_strategies()
when_other_is_imported(partial(_refuse_in, message=wrong_host("{name!r}")))

__all__ = [
    "DataParallel",
    "DistributedLionStrategy",
    "DominoTPStrategy",
    "ElasticDiLoCoStrategy",
    "EveryStep",
    "LocalUpdates",
    "ReplicaStrategy",
    "StreamingDiLoCoStrategy",
    "Traffic",
    "register_strategies",
]
