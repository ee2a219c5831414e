"""One process of a replica under the published torchft package: its DiLoCo, Manager and transfer.

torchft is not a Lightning strategy, so this file contains the training loop. Settings are those of
our method where torchft has them: two fragments, in flight as long, half of the local weights
kept. What is torchft's own: fp32 on the wire, and a joiner that trains before its first sync.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torchft import Manager, ProcessGroupGloo  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torchft.local_sgd import DiLoCo  # type: ignore[import-not-found,import-untyped,unused-ignore]

from benchmarks.bandwidth.torchft_job import fragments
from benchmarks.chaos.goodput import Commits
from benchmarks.chaos.plan import LEAST, REPLICAS, Log, Plan
from benchmarks.common.pretraining import batches
from recipes.training.language_model import LanguageModel
from recipes.training.pretraining import build_data, build_module
from recipes.training.report import CHECKPOINT_FOLDER

STORE_PORT = 29511
# as in torchft's integration tests: of a transfer, which a hung peer blocks for as long
TIMEOUT = timedelta(seconds=10)
QUORUM_TIMEOUT = timedelta(seconds=60)
QUORUM_RETRIES = 20  # without, a restarted lighthouse ends all replicas


def train(plan: Plan, replica: int, folder: Path, open_log: Callable[[], Log]) -> None:
    """Train until this process is ended."""
    torch.manual_seed(plan.config["seed"])
    # torchft leaves the position in the data to the user: here, every process draws its own order
    data = build_data({**plan.config, "data": {**plan.config["data"], "seed": os.getpid()}})
    shares = {"num_replicas": REPLICAS, "rank": replica}
    data.trainer = cast(Any, SimpleNamespace(distributed_sampler_kwargs=shares))
    module = build_module(plan.config, data)
    made: Any = module.configure_optimizers()
    inner, scheduler = made["optimizer"], made["lr_scheduler"]["scheduler"]
    parts = fragments(module.model)
    outer = [torch.optim.SGD(p.parameters(), lr=0.4, momentum=0.9, nesterov=True) for p in parts]
    count, log = Commits(len(parts), plan.overlap_steps), open_log()
    states = {"model": module, "inner": inner, "scheduler": scheduler}

    def load(state: dict[str, Any]) -> None:
        for name, owner in states.items():
            owner.load_state_dict(state[name])
        count.replaced()

    host = plan.addresses[replica]
    store = TCPStore(host, STORE_PORT, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load,
        state_dict=lambda: {name: owner.state_dict() for name, owner in states.items()},
        min_replica_size=LEAST,
        use_async_quorum=False,
        timeout=TIMEOUT,
        quorum_timeout=QUORUM_TIMEOUT,
        connect_timeout=TIMEOUT,
        rank=0,
        world_size=1,  # of a replica
        store_addr=host,
        store_port=STORE_PORT,
        lighthouse_addr=plan.meeting,
        replica_id=f"replica{replica}",
        hostname=host,
        init_sync=False,  # all start with the same weights
        quorum_retries=QUORUM_RETRIES,
    )
    period = plan.sync_every // len(parts)
    options = {"fragment_sync_delay": plan.overlap_steps, "fragment_update_alpha": 0.5}
    with DiLoCo(manager, parts, inner, outer, plan.sync_every, **options) as diloco:
        for batch in batches(data, plan.config["trainer"]["max_steps"]):
            begun_s = time.time()
            loss = module.loss(batch)
            time.sleep(max(0.0, begun_s + plan.step_s - time.time()))
            inner.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(
                module.parameters(), plan.config["trainer"]["gradient_clip_val"]
            )
            syncs = diloco._local_step == period - 1
            before = manager.current_step()
            count.steps += 1
            inner.step()  # torchft's hook syncs
            scheduler.step()
            if syncs:
                count.synced(before % len(parts), manager.current_step() > before)
            step = manager.current_step() * period + diloco._local_step
            log.write(step, count.useful, count.kept)
            if syncs and step % plan.save_every < period and manager.participating_rank() == 0:
                save(folder / CHECKPOINT_FOLDER / f"step-{step}.ckpt", module, diloco)
    del store


def save(path: Path, module: LanguageModel, diloco: DiLoCo) -> None:
    """Save the outer weights, as a checkpoint of Lightning has them."""
    outer = {
        p: fragment.original_parameters[name]
        for fragment in diloco._fragments
        for name, p in fragment._model_fragment.named_parameters()
    }
    path.parent.mkdir(exist_ok=True)
    partial = path.with_suffix(".tmp")
    torch.save({"state_dict": {n: outer[p] for n, p in module.named_parameters()}}, partial)
    partial.replace(path)
