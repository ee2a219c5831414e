"""Job of one node of `benchmarks.auto_split`: passes of a GPT-2 under every split, in random order.

`python -m benchmarks.auto_split.job PLAN OUT` writes one line of JSON to OUT for each batch size:
the choice of "auto", the number of passes before it, and the seconds of passes on the slower node:

1. Rounds of all fixed splits in random order. They determine the best split.
2. If "auto" chose another one: rounds of "auto" and the best split. Only these measure the ratio,
   because the fastest of several noisy splits looks faster than it is in the rounds that chose it.

All splits run on one model: two models with the same code differ by the placement of their memory.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.ledger import Ledger
from lightning_commfree.domino import DominoSettings, ParallelModel
from lightning_commfree.domino.settings import AUTO

FIXED = ("none", "batch", "token")
TOKENS, VOCABULARY, WIDTH, LAYERS = 128, 512, 256, 4
SECONDS, LEAST = 5.0, 21  # for the passes of a split in step 1, and their minimum number
PAIR_SECONDS, PAIR_LEAST = 45.0, 41  # the same for step 2
MOST = 601


def sharded_model(channel: Channel) -> tuple[Any, ParallelModel]:
    """Return a model and its tensor-parallel wrapper."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=TOKENS,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    parallel = ParallelModel(model, channel, DominoSettings(split=AUTO))
    if channel.rank == 0:
        parallel.trial.on_choice = print
    return model, parallel


def pass_s(model: Any, words: torch.Tensor) -> float:
    """Return the seconds of a forward and backward pass that all ranks start together."""
    dist.barrier()
    start = time.perf_counter()
    model(input_ids=words, labels=words, use_cache=False).loss.backward()
    seconds = time.perf_counter() - start
    model.zero_grad()
    return seconds


def measured(
    splits: Sequence[str], run: Callable[[str], float], rounds: int, shuffle: random.Random
) -> dict[str, list[float]]:
    """Return the seconds of passes on the slower node, by split and round; collective."""
    passes: dict[str, list[float]] = {split: [] for split in splits}
    for _ in range(rounds):
        for split in shuffle.sample(splits, len(splits)):
            passes[split].append(run(split))
    slower = torch.tensor([*passes.values()], dtype=torch.float64)
    dist.all_reduce(slower, dist.ReduceOp.MAX)
    return dict(zip(splits, slower.tolist(), strict=True))


def main() -> None:
    """Measure the plan in the first argument and write the results to the second's file."""
    plan, path = json.loads(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    channel = Channel.open([list(range(size))], rank, Ledger())
    model, parallel = sharded_model(channel)
    shuffle = random.Random(0)  # the same on all nodes

    def run(split: str, events: list[Any] | None = None) -> float:
        parallel.settings = DominoSettings(split=split)
        parallel.trace = None if events is None else lambda *event: events.append(event)
        return pass_s(model, words)

    def rounds(seconds: float, least: int) -> int:
        return min(max(int(seconds / float(longest)), least), plan["most_rounds"])

    with path.open("w", buffering=1) as file:
        for rows in plan["rows"]:
            words = torch.randint(VOCABULARY, (rows, TOKENS))
            dist.broadcast(words, 0)
            trial, already = 0, len(parallel.trial.state_dict()["best"])
            while len(parallel.trial.state_dict()["best"]) == already:
                run(AUTO)
                trial += 1
            chosen = parallel.trial.state_dict()["best"][-1][-1]

            own: list[Any] = []
            its: list[Any] = []
            longest = torch.tensor(run(AUTO, own) + run(chosen, its)) / 2
            assert own == its, "auto must run the split that it chose"
            dist.all_reduce(longest, dist.ReduceOp.MAX)
            passes = measured(FIXED, run, rounds(SECONDS, LEAST), shuffle)
            best = min(FIXED, key=lambda split: statistics.median(passes[split]))
            pair = {}
            if best != chosen:
                pair = measured((AUTO, best), run, rounds(PAIR_SECONDS, PAIR_LEAST), shuffle)
            line = {"rows": rows, "chosen": chosen, "trial": trial, "passes": passes, "pair": pair}
            file.write(json.dumps(line) + "\n")

    channel.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
