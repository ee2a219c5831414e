"""Train what people would use instead: methods of other libraries, on two real gloo ranks.

The ranks are forked processes with the same data order, initial weights, optimizer, schedule and
clipping as the other runs; each takes its half of the global batch. Unlike the runs in `played.py`
these cannot be stopped and continued, because the state of torch's hook and of torchft would have
to be saved, too: one that is interrupted begins again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.utils import average_parameters
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel

from benchmarks.bandwidth.job import powersgd
from benchmarks.bandwidth.torchft_job import fragments, new_manager
from benchmarks.common.pretraining import Config, batches, take_steps
from benchmarks.size_ladder.cells import OVERLAP
from recipes.data.token_data import TokenDataModule
from recipes.training.evaluation import token_loss
from recipes.training.language_model import LanguageModel
from recipes.training.pretraining import build_data, build_module

RANKS = 2
TIMEOUT = timedelta(hours=2)  # somebody may pause the processes
AfterStep = Callable[[], object]


class Trained(NamedTuple):
    """What a method gets of a rank: its replica, and every how many steps to exchange."""

    rank: int
    module: LanguageModel
    optimizer: torch.optim.Optimizer
    sync_every: int


# prepares a rank; yields a function that is called after every step
Method = Callable[[Trained], AbstractContextManager[AfterStep]]


@contextmanager
def hooked_ddp(
    make_hook: Callable[[], tuple[Any, Callable[..., Any]]], trained: Trained
) -> Iterator[AfterStep]:
    """DDP with a communication hook of torch.

    Args:
        make_hook: returns the hook's state and the hook; called with an initialized process group.
        trained: of this rank.
    """
    module = trained.module
    # a model of this size is one bucket, so the hook's all-reduces have one order on both ranks
    ddp = module.model = DistributedDataParallel(module.model)
    ddp.register_comm_hook(*make_hook())
    yield lambda: None
    module.model = ddp.module


@contextmanager
def local_sgd(trained: Trained) -> Iterator[AfterStep]:
    """Take the mean of the weights every `sync_every` steps, with torch's averager, and wait."""
    averager = PeriodicModelAverager(trained.sync_every, warmup_steps=trained.sync_every - 1)
    yield lambda: averager.average_parameters(trained.module.parameters())


@contextmanager
def torchft_diloco(trained: Trained) -> Iterator[AfterStep]:
    """DiLoCo of torchft with delay, as in `benchmarks.bandwidth`; rank 0 runs the lighthouse.

    Raises:
        RuntimeError: torchft has skipped a sync.
    """
    os.environ.setdefault("RUST_LOG", "warn")  # otherwise several lines for every sync
    from torchft.coordination import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
        LighthouseServer,
    )
    from torchft.local_sgd import DiLoCo  # type: ignore[import-not-found,import-untyped,unused-ignore]

    found, lighthouse = [""], None
    if trained.rank == 0:
        lighthouse = LighthouseServer("127.0.0.1:0", min_replicas=RANKS, join_timeout_ms=60_000)
        found = [lighthouse.address()]
    dist.broadcast_object_list(found)
    model, inner = trained.module.model, trained.optimizer
    manager = new_manager(trained.rank, model, inner, RANKS, TIMEOUT, found[0])
    parts = fragments(model)
    outer = [torch.optim.SGD(p.parameters(), lr=0.4, momentum=0.9, nesterov=True) for p in parts]
    period, taken = trained.sync_every // len(parts), 0

    def check() -> None:
        nonlocal taken
        taken += 1
        if manager.current_step() != taken // period:
            raise RuntimeError(
                f"torchft committed {manager.current_step()} syncs in {taken} steps instead of"
                f" {taken // period}"
            )

    options = {"fragment_sync_delay": min(OVERLAP, period - 1), "fragment_update_alpha": 0.5}
    with DiLoCo(manager, parts, inner, outer, trained.sync_every, **options):
        yield check
    del lighthouse


METHODS: Mapping[str, Method] = {  # by row of `benchmarks.bandwidth`, or an own one
    "ddp_powersgd": partial(hooked_ddp, partial(powersgd, 4)),
    "ddp_powersgd_1": partial(hooked_ddp, partial(powersgd, 1)),
    # after a tenth of the 1,826 steps, with which torch's documentation suggests to begin tuning
    "ddp_powersgd_late": partial(hooked_ddp, partial(powersgd, 4, start=183)),
    "local_sgd": local_sgd,
    "torchft_delay": torchft_diloco,
}


def loss_of(config: Config, method: Method, sync_every: int) -> float:
    """Train in two ranks; return the validation loss in nats per token.

    Args:
        config: of `recipes.pretrain` with DDP, with the global batch. Of the Trainer, only
            `max_steps` and `gradient_clip_val` are used.
        method: that keeps the ranks together. As after a fit of ours, the mean of their weights is
            evaluated.
        sync_every: steps between two exchanges of a parameter, for methods that exchange weights.
    """
    pl.seed_everything(config["seed"], workers=True, verbose=False)
    data = build_data(config)
    module = build_module(config, data)
    with TemporaryDirectory() as folder:
        args = config, method, sync_every, data, module, Path(folder)
        start_processes(_train, args, RANKS, start_method="fork")
        return float((Path(folder) / "loss").read_text())


def _train(
    rank: int,
    config: Config,
    method: Method,
    sync_every: int,
    data: TokenDataModule,
    module: LanguageModel,
    folder: Path,
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/ranks", TIMEOUT, RANKS, rank)
    trainer = config["trainer"]
    made: Any = module.configure_optimizers()
    with method(Trained(rank, module, made["optimizer"], sync_every)) as after_step:
        for batch in batches(data, trainer["max_steps"]):
            take_steps([module], [made], batch[rank::RANKS], trainer["gradient_clip_val"])
            after_step()
    assert dist.group.WORLD is not None, "it was made above"
    average_parameters(module.parameters(), dist.group.WORLD)
    dist.barrier()
    dist.destroy_process_group()  # rank 0 evaluates alone
    if rank == 0:
        (folder / "loss").write_text(repr(token_loss(module, data.val_dataloader())))
    os._exit(0)  # torchft's threads outlive a process's shutdown
