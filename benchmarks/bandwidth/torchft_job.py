"""Job of one node of `benchmarks.bandwidth` with DiLoCo of the published torchft package.

torchft is not a Lightning strategy, so this file contains the training loop; model, tokens and
optimizer are the same as in the other rows. torchft keeps one fragment in flight, and `sync_every`
must be a multiple of the number of fragments. There are 2: blocks 0, 2, 4 with the embeddings, and
blocks 1, 3, 5.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.utils.data import DataLoader
from transformers import GPT2LMHeadModel

from benchmarks.bandwidth.job import BATCH, TOKENS, VOCABULARY, tiny_gpt2
from benchmarks.bandwidth.window import Window
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


def _manager(rank: int, model: GPT2LMHeadModel, inner: torch.optim.Optimizer) -> Any:
    from torchft import Manager, ProcessGroupGloo  # type: ignore[import-not-found,import-untyped,unused-ignore]

    store = TCPStore("0.0.0.0", STORE_PORT, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=lambda state: None,  # both start with the same weights, so no recovery
        state_dict=lambda: {"model": model.state_dict(), "inner": inner.state_dict()},
        min_replica_size=2,
        use_async_quorum=False,
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
        connect_timeout=TIMEOUT,
        rank=0,
        world_size=1,  # of a replica
        store_addr=os.uname().nodename,
        store_port=STORE_PORT,
        lighthouse_addr=f"http://{os.environ['MASTER_ADDR']}:{LIGHTHOUSE_PORT}",
        replica_id=f"replica{rank}",
        hostname=os.uname().nodename,
        init_sync=False,
    )
    manager.keep_store = store
    return manager


def measure(row: str, steps: int, sync_every: int) -> Window:
    """Train through the window of one row.

    Args:
        row: "torchft" blocks at a sync; "torchft_delay" lands 5 steps later, or as many as torchft
            allows, and mixes with alpha 0.5.
        steps: in the window.
        sync_every: H of a fragment.

    Raises:
        RuntimeError: torchft has skipped a sync.
    """
    from torchft.local_sgd import DiLoCo  # type: ignore[import-not-found,import-untyped,unused-ignore]

    model = tiny_gpt2()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-4)
    parts = fragments(model)
    outer = [
        torch.optim.SGD(part.parameters(), lr=0.4, momentum=0.9, nesterov=True) for part in parts
    ]
    period = sync_every // len(parts)
    delayed = row == "torchft_delay"
    delay = min(5, period - 1) if delayed else 0
    rank = int(os.environ["RANK"])
    manager = _manager(rank, model, inner)
    warm_up = WARM_UP + delay
    options = {"fragment_sync_delay": delay, "fragment_update_alpha": 0.5 if delayed else 0.0}
    with DiLoCo(manager, parts, inner, outer, sync_every, **options) as diloco:
        # as for the other rows, start shortly before the first sync, which connects the replicas
        # and is part of the warm-up
        diloco._local_step = period - delay - 1
        wire = 0
        ends: list[float] = []  # end times of the last warm-up step and of the window's steps
        batches = DataLoader(Tokens(VOCABULARY, TOKENS), batch_size=BATCH, shuffle=True)
        for step, batch in enumerate(batches, 1):
            inner.zero_grad()
            model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
            inner.step()
            if step == warm_up:
                wire = interface_counters().sent_bytes
            if step >= warm_up:
                ends.append(time.perf_counter())
            if step == warm_up + steps:
                break
        wire = interface_counters().sent_bytes - wire
    synced = manager.current_step()
    expected = 1 + steps // period
    if synced != expected:
        raise RuntimeError(f"torchft committed {synced} syncs instead of {expected}")
    return Window(
        row=row,
        steps=steps,
        seconds=ends[-1] - ends[0],
        wire_bytes=wire,
        parameters=sum(p.numel() for p in model.parameters()),
        step_s=[end - start for start, end in pairwise(ends)],
    )


def main() -> None:
    """Measure one row, with the arguments of `bandwidth.job`; node 0 runs the lighthouse."""
    plan, path = json.loads(sys.argv[1]), Path(sys.argv[2])
    ((row, steps),) = plan["rows"]
    torch.set_num_threads(1)
    if os.environ["RANK"] == "0":
        from torchft.coordination import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
            LighthouseServer,
        )

        bind = f"0.0.0.0:{LIGHTHOUSE_PORT}"
        lighthouse = LighthouseServer(bind=bind, min_replicas=2, join_timeout_ms=60_000)
        print(f"lighthouse at {lighthouse.address()}")
    window = measure(row, steps, plan["sync_every"])
    with path.open("a") as file:
        file.write(json.dumps(asdict(window)) + "\n")
    time.sleep(2)  # the peer may still be waiting for an answer of the lighthouse
    sys.stdout.flush()
    os._exit(0)  # torchft's threads outlive the interpreter's shutdown


if __name__ == "__main__":
    main()
