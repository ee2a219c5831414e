"""Job of one node of `benchmarks.bandwidth` with DiLoCo of the published torchft package.

torchft is not a Lightning strategy, so this file contains the training loop; model, tokens and
optimizer are the same as in the other rows. It takes turns with the same loop without torchft.
torchft keeps one fragment in flight, and `sync_every` must be a multiple of the number of
fragments. There are 2: blocks 0, 2, 4 with the embeddings, and blocks 1, 3, 5. The smaller model
has blocks 0, 1 and 2 only.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.utils.data import DataLoader
from transformers import GPT2LMHeadModel

from benchmarks.bandwidth.figures import BASELINES
from benchmarks.bandwidth.job import WORKLOADS, Workload
from benchmarks.bandwidth.window import LEG_STEPS, Window
from benchmarks.common.fits import Tokens
from benchmarks.lab import interface_counters

LIGHTHOUSE_PORT, STORE_PORT = 29510, 29511
TIMEOUT = timedelta(seconds=120)
WARM_UP = 4  # steps: the first sync, which connects the nodes, and some steps without a sync


def fragments(model: GPT2LMHeadModel) -> list[nn.Module]:
    """Return the model as two modules that share no parameter; the head is tied to `wte`."""
    body = model.transformer
    rest = [body.wte, body.wpe, body.ln_f]
    return [nn.ModuleList([*rest, *body.h[0::2]]), nn.ModuleList(body.h[1::2])]


def new_manager(
    rank: int,
    model: nn.Module,
    inner: torch.optim.Optimizer,
    replicas: int = 2,
    timeout: timedelta = TIMEOUT,
    lighthouse: str | None = None,
) -> Any:
    """Return torchft's manager of one of `replicas` replicas.

    Args:
        rank: of the replica.
        model: saved for others.
        inner: saved for others.
        replicas: of the job.
        timeout: of all that it waits for.
        lighthouse: address; None means that the node with rank 0 runs it and that each replica has
            a node of its own.
    """
    from torchft import Manager, ProcessGroupGloo  # type: ignore[import-not-found,import-untyped,unused-ignore]

    port = STORE_PORT if lighthouse is None else 0  # 0: any free one
    store = TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timeout),
        load_state_dict=lambda state: None,  # all start with the same weights, so no recovery
        state_dict=lambda: {"model": model.state_dict(), "inner": inner.state_dict()},
        min_replica_size=replicas,
        use_async_quorum=False,
        timeout=timeout,
        quorum_timeout=timeout,
        connect_timeout=timeout,
        rank=0,
        world_size=1,  # of a replica
        store_addr=os.uname().nodename,
        store_port=store.port,
        lighthouse_addr=lighthouse or f"http://{os.environ['MASTER_ADDR']}:{LIGHTHOUSE_PORT}",
        replica_id=f"replica{rank}",
        hostname=os.uname().nodename,
        init_sync=False,
    )
    manager.keep_store = store
    return manager


class Loop:
    """A plain training loop, timed step by step."""

    def __init__(self, workload: Workload) -> None:
        self.model = workload.model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        tokens = Tokens(workload.vocabulary, workload.tokens)
        self._batches = iter(DataLoader(tokens, batch_size=workload.batch, shuffle=True))
        self.step_s: list[float] = []

    def step(self) -> None:
        """Train one batch."""
        start = time.perf_counter()
        batch = next(self._batches)
        self.optimizer.zero_grad()
        self.model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        self.optimizer.step()
        self.step_s.append(time.perf_counter() - start)

    def window(self, row: str, steps: int, wire_bytes: int) -> Window:
        """Return the measurement of the last `steps` steps."""
        step_s, numel = self.step_s[-steps:], sum(p.numel() for p in self.model.parameters())
        return Window(row, steps, sum(step_s), wire_bytes, parameters=numel, step_s=step_s)


def measure(row: str, steps: int, sync_every: int, workload: Workload) -> list[Window]:
    """Train through the window of one row and of its baseline, in turns.

    As in the other rows, a turn has `LEG_STEPS` steps, and more while a fragment is in flight, and
    both nodes start it together.

    Args:
        row: "torchft" blocks at a sync; "torchft_delay" lands 5 steps later, or as many as torchft
            allows, and mixes with alpha 0.5; so does "torchft_often", every 10 steps.
        steps: in each of the two windows.
        sync_every: H of a fragment in the other rows.
        workload: the model and the batch of a rank.

    Raises:
        RuntimeError: torchft has skipped a sync.
    """
    from torchft.local_sgd import DiLoCo  # type: ignore[import-not-found,import-untyped,unused-ignore]

    ours, none = Loop(workload), Loop(workload)
    parts = fragments(ours.model)
    outer = [
        torch.optim.SGD(part.parameters(), lr=0.4, momentum=0.9, nesterov=True) for part in parts
    ]
    if row == "torchft_often":
        sync_every = 10
    period = sync_every // len(parts)
    delayed = row != "torchft"
    delay = min(5, period - 1) if delayed else 0
    rank = int(os.environ["RANK"])
    manager = new_manager(rank, ours.model, ours.optimizer)
    warm_up = WARM_UP + delay
    options = {"fragment_sync_delay": delay, "fragment_update_alpha": 0.5 if delayed else 0.0}
    with DiLoCo(manager, parts, ours.optimizer, outer, sync_every, **options) as diloco:
        # as for the other rows, start shortly before the first sync, which connects the replicas
        # and is part of the warm-up
        diloco._local_step = period - delay - 1
        for _ in range(warm_up):
            ours.step()
            none.step()

        wire = 0
        while len(ours.step_s) < warm_up + steps:
            dist.barrier()
            before, leg = interface_counters().sent_bytes, 0
            while leg < LEG_STEPS or diloco._local_step >= period - delay:  # in flight
                ours.step()
                leg += 1
                if len(ours.step_s) == warm_up + steps:
                    break
            dist.barrier()  # all data for the peer has left this interface
            wire += interface_counters().sent_bytes - before
            for _ in range(leg):
                none.step()
    synced = manager.current_step()
    expected = 1 + steps // period
    if synced != expected:
        raise RuntimeError(f"torchft committed {synced} syncs instead of {expected}")
    return [ours.window(row, steps, wire), none.window(BASELINES[row], steps, 0)]


def main() -> None:
    """Measure one row, with the arguments of `bandwidth.job`; node 0 runs the lighthouse."""
    plan, path = json.loads(sys.argv[1]), Path(sys.argv[2])
    row, steps = plan["rows"][0]  # followed by its baseline
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if os.environ["RANK"] == "0":
        from torchft.coordination import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
            LighthouseServer,
        )

        bind = f"0.0.0.0:{LIGHTHOUSE_PORT}"
        lighthouse = LighthouseServer(bind=bind, min_replicas=2, join_timeout_ms=60_000)
        print(f"lighthouse at {lighthouse.address()}")
    windows = measure(row, steps, plan["sync_every"], WORKLOADS[plan["size"]])
    with path.open("a") as file:
        file.writelines(json.dumps(asdict(window)) + "\n" for window in windows)
    time.sleep(2)  # the peer may still be waiting for an answer of the lighthouse
    sys.stdout.flush()
    os._exit(0)  # torchft's threads outlive the interpreter's shutdown


if __name__ == "__main__":
    main()
