"""What one node of `benchmarks.auto_split` runs: passes of a GPT-2 under every split, by lot.

`python -m benchmarks.auto_split.job PLAN OUT`: lines of JSON in OUT, that is rows, what, and a
value: "chosen" by "auto", the passes of its "trial", and the seconds of a pass by its split. All
splits train one model: two models with the same code differ by where their memory lies.
"""

from __future__ import annotations

import json
import random
import sys
import time
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
SPLITS = (*FIXED, AUTO)
TOKENS, VOCABULARY, WIDTH, LAYERS = 128, 512, 256, 4
SECONDS, LEAST, MOST = 12.0, 31, 241  # of a split's passes together, and how many they may be


def divided(channel: Channel) -> tuple[Any, ParallelModel]:
    """Return a model, and how it is divided."""
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
        parallel.trial.chosen = print
    return model, parallel


def pass_s(model: Any, words: torch.Tensor) -> float:
    """Return the seconds of a forward and backward that all ranks begin together."""
    dist.barrier()
    start = time.perf_counter()
    model(input_ids=words, labels=words, use_cache=False).loss.backward()
    seconds = time.perf_counter() - start
    model.zero_grad()
    return seconds


def main() -> None:
    """Measure what the first argument says, and write it to the second's file."""
    plan, path = json.loads(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    channel = Channel.open([list(range(size))], rank, Ledger())
    model, parallel = divided(channel)
    lots = random.Random(0)  # the same on all nodes

    def run(split: str, events: list[Any] | None = None) -> float:
        parallel.settings = DominoSettings(split=split)
        parallel.trace = None if events is None else lambda *event: events.append(event)
        return pass_s(model, words)

    with path.open("w") as file:
        for rows in plan["rows"]:
            words = torch.randint(VOCABULARY, (rows, TOKENS))
            dist.broadcast(words, 0)
            trial, already = 0, len(parallel.trial.state_dict()["best"])
            while len(parallel.trial.state_dict()["best"]) == already:
                run(AUTO)
                trial += 1
            chosen = parallel.trial.state_dict()["best"][-1][-1]
            file.write(json.dumps([rows, "chosen", chosen]) + "\n")
            file.write(json.dumps([rows, "trial", trial]) + "\n")

            own: list[Any] = []
            its: list[Any] = []
            longest = torch.tensor(run(AUTO, own) + run(chosen, its)) / 2
            assert own == its, "auto runs its choice"
            dist.all_reduce(longest, dist.ReduceOp.MAX)
            rounds = min(max(int(SECONDS / float(longest)), LEAST), plan["most_rounds"])
            for _ in range(rounds):
                for split in lots.sample(SPLITS, len(SPLITS)):
                    file.write(json.dumps([rows, split, run(split)]) + "\n")

    channel.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
