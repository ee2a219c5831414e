"""Compare the mean of LoRA's A and B with the mean of BA: `python -m benchmarks.lora_mean`.

A tiny GPT-2 is pretrained on Shakespeare. With each seed, M replicas fine-tune LoRA adapters for it
on the bundled dialogues; they are simulated in one process.

Criterion, written before the runs: the plain mean is kept if, in every cell, the loss of the exact
mean is not below it by more than the standard deviation of the loss over the seeds.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from benchmarks.common.page import provenance, result_page, write_page
from benchmarks.common.pretraining import TINY_GPT2, summary_of
from benchmarks.common.runs import mean_text
from benchmarks.lora_mean.simulated import LORA, LR, ROWS, STEPS, Found, Run, train

PAGE = Path(__file__).with_name("result.md")
TITLE = "What does LoRA lose under DiLoCo, which averages A and B and not BA?"
PRETRAINING = [
    *TINY_GPT2,
    "strategy=ddp",
    "trainer.devices=2",
    "data.batch_size=32",  # of a rank
    "data.block_size=64",
    "trainer.max_steps=500",
    "trainer.val_check_interval=500",
    "optimizer.lr=0.0226",
    "seed=1",
    "checkpoint_every_n_steps=0",
    "report.sample_tokens=1",
    "logger=none",
]
CELLS = [
    *(Run(m, h, 1, "mean", exact=False, seed=0) for m, h in product((2, 4), (30, 100))),
    Run(4, 100, 1, "defaults", exact=False, seed=0),
]
HOW_TO_READ = """\
"Residual": the norm of mean(BA) - mean(B) mean(A) over that of the replicas' mean update since the
last landing, over all layers; mean over the rounds of a run. "Loss": after the fit, on the
responses of the validation split, nats per token, with the standard deviation over the seeds.
"Exact end": the same weights with the residual of the final mean folded in, minus "loss", per seed.
"Exact rounds": a run of its own in which the residual of every landing is folded into the frozen
weights, minus "loss", per seed; only the plain mean of A and B has an exact counterpart, because an
outer optimizer with momentum does not land on the mean. Below 0, the exact mean is better."""
Results = dict[Run, Found]


def planned(seeds: int) -> Iterator[Run]:
    """Yield the runs, all cells of one seed before the next."""
    for seed, cell in product(range(1, seeds + 1), CELLS):
        yield replace(cell, seed=seed)
        if cell.outer == "mean":
            yield replace(cell, seed=seed, exact=True)


def pretrained(work: Path) -> str:
    """Return the folder of the pretrained model, made if missing."""
    folder = work / "pretrained"
    if not (folder / "huggingface").exists():
        summary_of(PRETRAINING, folder)
    return str(folder / "huggingface")


def gains(results: Results, cell: Run, seeds: int) -> tuple[list[float], list[float], list[float]]:
    """Return by seed: the loss, exact end minus loss, and exact rounds minus loss."""
    losses, ends, rounds = [], [], []
    for seed in range(1, seeds + 1):
        run = replace(cell, seed=seed)
        found, exact = results[run], results.get(replace(run, exact=True))
        losses.append(found.loss)
        ends.append(found.exact_loss - found.loss)
        if exact is not None:
            rounds.append(exact.loss - found.loss)
    return losses, ends, rounds


def verdict(results: Results, seeds: int) -> str:
    """Apply the criterion of this module's docstring."""
    below = []
    for cell in CELLS:
        losses, *differences = gains(results, cell, seeds)
        spread = statistics.stdev(losses)
        below += [-statistics.mean(found) / spread for found in differences if found]
    worst = max(below)
    kept = "is within the seeds' spread" if worst <= 1 else "costs more than the seeds' spread"
    return (
        f"averaging A and B {kept}: the exact mean is better by at most {worst:.2f} standard"
        " deviations of the loss over the seeds"
    )


def table(results: Results, seeds: int) -> list[str]:
    """Return a row per cell as Markdown lines."""
    lines = [
        "| outer step | M | H | residual | loss | exact end | exact rounds |",
        "|---|---|---|---|---|---|---|",
    ]
    for cell in CELLS:
        losses, ends, rounds = gains(results, cell, seeds)
        shares = [results[replace(cell, seed=seed)].share for seed in range(1, seeds + 1)]
        lines.append(
            f"| {cell.outer} | {cell.replicas} | {cell.sync_every} | {mean_text(shares, '.3f')}"
            f" | {mean_text(losses, '.4f')} | {mean_text(ends, '+.4f')}"
            f" | {mean_text(rounds, '+.4f') if rounds else ''} |"
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the runs and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path("outputs/bench/lora_mean"))
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args(arguments)
    block = provenance("lora_mean", [f"--seeds={options.seeds}"], options.page)
    results: Results = {}
    base = pretrained(options.work)
    for run in planned(options.seeds):
        results[run] = train(run, base, str(options.work / "cache"))
        print(f"{run}: {results[run]}", flush=True)
    opening = [
        "A LoRA layer's update is the product BA, and the product of the means of A and B is not"
        " the mean of the products (FedEx-LoRA,"
        " [arXiv:2410.09432](https://arxiv.org/abs/2410.09432)). How large is the difference, and"
        " does it cost loss?",
        "",
        f"**Found:** {verdict(results, options.seeds)}.",
    ]
    body = [
        "## The runs",
        "",
        f"- a GPT-2 of width 32 with two layers, {STEPS} steps of {ROWS} rows of 64"
        f" tokens of all replicas together, AdamW with lr {LR}, LoRA {LORA}, overlap 1, fp32 on"
        " the wire",
        '- outer step "mean": SGD with lr 1, mix 0; "defaults": SGD with lr 0.4, Nesterov momentum'
        " 0.9, mix 0.5",
        "",
        *HOW_TO_READ.splitlines(),
        "",
        *table(results, options.seeds),
    ]
    write_page(options.page, result_page(TITLE, opening, [block], body))


if __name__ == "__main__":
    main()
