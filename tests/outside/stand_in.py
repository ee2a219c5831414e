"""A pytest plugin: our strategies where Lightning's own tests mean `auto`, `ddp*` or `DDPStrategy`.

`COMMFREE_STAND_IN` names the strategy, "ddp" for the control. The outcome of every test goes to the
file `COMMFREE_OUTCOMES`, one JSON object a line. With "distributed_lion", which votes with no other
optimizer, `torch.optim.SGD`, `Adam` and `AdamW` are `DistributedLion`. Tests named in the file
`COMMFREE_LEAVE_OUT`, one a line, do not run.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import strategies

import lightning_commfree

NAME = os.environ["COMMFREE_STAND_IN"]
OUTCOMES = Path(os.environ["COMMFREE_OUTCOMES"])
LEAVE_OUT = os.environ.get("COMMFREE_LEAVE_OUT")
KINDS = {
    "ddp": strategies.DDPStrategy,
    "distributed_lion": lightning_commfree.DistributedLionStrategy,
    "domino_tp": lightning_commfree.DominoTPStrategy,
    "streaming_diloco": lightning_commfree.StreamingDiLoCoStrategy,
}
_NAMES = {
    "auto": NAME,
    "ddp": NAME,
    "ddp_find_unused_parameters_true": NAME,
    "ddp_find_unused_parameters_false": NAME,
    "ddp_spawn": f"{NAME}_spawn",
    "ddp_fork": f"{NAME}_fork",
    "ddp_notebook": f"{NAME}_fork",
}


class _LionFor(lightning_commfree.DistributedLion):
    """Takes the arguments of any optimizer, and those that Lion has mean something."""

    def __init__(self, params: Any, lr: float = 1e-3, *_: Any, **more: Any) -> None:
        super().__init__(params, lr=lr, weight_decay=more.get("weight_decay", 0.0))


class SGD(_LionFor):
    """Lion under this name, as figures and files of optimizers have it."""


class Adam(_LionFor):
    """Lion under this name."""


class AdamW(_LionFor):
    """Lion under this name."""


if NAME == "distributed_lion":
    for _kind in (SGD, Adam, AdamW):
        setattr(torch.optim, _kind.__name__, _kind)


class _HereToo:
    """Part of a Trainer: a spawned rank imports this module with it, and replaces optimizers."""


def pytest_configure() -> None:
    """Put the strategy in where a Trainer is made, before any test module is imported."""
    init = pl.Trainer.__init__

    @functools.wraps(init)
    def with_stand_in(self: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        strategy = kwargs.get("strategy", "auto")
        if isinstance(strategy, str):
            kwargs["strategy"] = _NAMES.get(strategy, strategy)
        init(self, *args, **kwargs)
        vars(self)["_stand_in"] = _HereToo()

    pl.Trainer.__init__ = with_stand_in  # type: ignore[method-assign]
    strategies.DDPStrategy = KINDS[NAME]  # type: ignore[misc]  # what test modules import


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that are named."""
    named = set(Path(LEAVE_OUT).read_text().splitlines()) if LEAVE_OUT else set()
    config.hook.pytest_deselected(items=[item for item in items if _name(item.nodeid) in named])
    items[:] = [item for item in items if _name(item.nodeid) not in named]


def _name(test: str) -> str:
    """Return the test's name in the control: a parameter may be the strategy's class."""
    return test.replace(KINDS[NAME].__name__, KINDS["ddp"].__name__)


def _said(report: pytest.TestReport) -> str:
    """Return a failure's message, and of what it came: `pytest.warns` hides the exception."""
    chain = getattr(report.longrepr, "chain", None)
    if chain is None:
        return str(report.longrepr or "")
    return "\n".join(crash.message for _, crash, _ in reversed(chain) if crash is not None)


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write how a test ended: its call, or what kept it from being called."""
    if os.environ.get("PYTEST_XDIST_WORKER"):
        return  # the controller sees every report once more, of workers that have died too
    if report.when != "call" and report.outcome == "passed":
        return
    row = {"test": _name(report.nodeid), "when": report.when, "outcome": report.outcome}
    row["said"] = _said(report)
    with OUTCOMES.open("a") as file:
        file.write(json.dumps(row) + "\n")
