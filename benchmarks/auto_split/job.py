"""What one node of `benchmarks.auto_split` runs: passes of a GPT-2 under every split, in turn.

`python -m benchmarks.auto_split.job PLAN OUT`: one line of JSON a pass in OUT, that is rows, split
and seconds, and one for every choice of "auto".
"""

from __future__ import annotations

import json
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
from lightning_commfree.domino.auto_split import ROUNDS, WARM_UP

SPLITS = ("none", "batch", "token", "auto")
TOKENS, VOCABULARY, WIDTH, LAYERS = 128, 512, 256, 4
TRIAL = 3 * (WARM_UP + ROUNDS) + 1  # passes until "auto" has chosen
SECONDS, LEAST, MOST = 8.0, 25, 61  # of a split's passes together, and how many they may be


def divided(split: str, channel: Channel) -> tuple[Any, ParallelModel]:
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
    parallel = ParallelModel(model, channel, DominoSettings(split=split))
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
    models = {split: divided(split, channel) for split in SPLITS}

    with path.open("w") as file:
        for rows in plan["rows"]:
            words = torch.randint(VOCABULARY, (rows, TOKENS))
            dist.broadcast(words, 0)
            for _ in range(TRIAL):
                pass_s(models["auto"][0], words)
            for split in SPLITS:  # allocations
                longest = torch.tensor(pass_s(models[split][0], words))
            dist.all_reduce(longest, dist.ReduceOp.MAX)
            rounds = min(max(int(SECONDS / float(longest)), LEAST), plan["most_rounds"])

            best = models["auto"][1].trial.state_dict()["best"][-1][-1]
            file.write(json.dumps([rows, "chosen", best]) + "\n")
            for round_ in range(rounds):
                turns = SPLITS[round_ % len(SPLITS) :] + SPLITS[: round_ % len(SPLITS)]
                for split in turns:
                    seconds = pass_s(models[split][0], words)
                    file.write(json.dumps([rows, split, seconds]) + "\n")

    channel.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
