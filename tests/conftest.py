"""Every test starts from one seed and leaves no trace: no process group, no environment variable,
no signal handler."""

from __future__ import annotations

import gc
import importlib.metadata
import logging
import os
import signal
import warnings
from collections.abc import Iterator
from functools import cache

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings

# ranks share the cores; and a fork of a process that has computed with OpenMP threads hangs
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")

# Every Trainer searches all installed packages for callbacks, which takes most of its start-up.
# Patched before Lightning is imported, because Lightning keeps a reference to the function.
importlib.metadata.entry_points = cache(importlib.metadata.entry_points)  # type: ignore[assignment]

# what a test writes need not survive a power failure, and a disk takes milliseconds for each file
os.fsync = lambda descriptor: None  # type: ignore[assignment]

# how long an example takes says more about the machine than about the code
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")


def pytest_configure(config: pytest.Config) -> None:
    """Hide CUDA devices from all tests but those that ask for them: `-m gpu`.

    The others fork ranks, and a process that has touched a device, as a backward does where there
    is one, cannot have children that use autograd or CUDA.
    """
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="no CUDA device here, or not asked for with `-m gpu`")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Do once what every forked rank would otherwise do for itself.

    It loads the compiled loops and the entry points, and runs a fit, because the first one of a
    process imports modules and fills caches. And it keeps the collector away from what the
    imports have made, a million objects that stay: Lightning collects at the end of every fit, and
    a rank that walks over them copies them.
    """
    # not above: what it imports reads HF_HUB_OFFLINE once
    from lightning_commfree.diloco.codec import CODECS, warm_up
    from lightning_commfree.host import pl

    for wire in CODECS.values():
        warm_up(wire, torch.device("cpu"))
    importlib.metadata.entry_points(group=f"{pl.__name__}.callbacks_factory")
    _run_a_fit()
    gc.freeze()


def _run_a_fit() -> None:
    from lightning_commfree import StreamingDiLoCoStrategy
    from tests.fit.models import Tiny, loader, quiet_trainer
    from tests.world import TIMEOUT, become_rank, free_port

    environment = dict(os.environ)
    become_rank(0, 1, free_port(), TIMEOUT)
    logging.disable()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        strategy = StreamingDiLoCoStrategy(sync_every=2, num_fragments=2, overlap_steps=1)
        quiet_trainer(strategy=strategy, devices=1, max_steps=3).fit(Tiny(), loader(8))
    logging.disable(logging.NOTSET)
    dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(environment)


_LOGGERS = ("lightning", "lightning.pytorch", "lightning.fabric", "lightning_commfree")


@pytest.fixture(autouse=True)
def _same_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_leaks() -> Iterator[None]:
    environment, handler = dict(os.environ), signal.getsignal(signal.SIGTERM)
    yield
    assert not dist.is_initialized(), "the test left a process group behind"
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture(scope="module", autouse=True)
def _no_leaks_of_a_module() -> Iterator[None]:
    """Restore what a fixture of a whole module has set, before `_no_leaks` looks.

    A fit leaves its MASTER_PORT in the environment, and ranks of later modules would listen on it.
    Recipes make loggers quiet, and later modules read what they say.
    """
    environment, handler = dict(os.environ), signal.getsignal(signal.SIGTERM)
    levels = {name: logging.getLogger(name).level for name in _LOGGERS}
    yield
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGTERM, handler)
