"""The runs of Distributed Lion's quality benchmark, and their order.

First come Lion's betas: each pair of `BETAS` on the mean gradient, with seed 1, at one learning
rate. All later Lion runs use the pair with the lowest mean loss over the models. All learning rates
are rungs of one ladder, 2^k / 1000. A cell is a model with a method. Its rate is tuned with seed 1,
starting from the first rungs of its method and continuing beyond either end until the best rung has
a worse one on both sides. A vote starts at G-Lion's best rung: all its seeds run there first, the
adjacent rungs afterwards.

Betas, and the rates of AdamW and G-Lion, are tuned without clipping. The compared runs clip every
worker's gradient, like the recipes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from benchmarks.common.ladder import LossAt, best_rung, rungs_to_run

MODELS: dict[str, list[str]] = {
    "gpt2_tiny": ["model.n_embd=64", "model.n_layer=2"],
    "llama_tiny": [
        "model.hidden_size=64",
        "model.intermediate_size=176",
        "model.num_hidden_layers=2",
    ],
}
BLOCKS_PER_STEP = 128  # of all workers together, so every run sees the same tokens in each step
COMMON = [
    "tokenizer.vocab_size=512",
    "data.block_size=32",
    f"data.batch_size={BLOCKS_PER_STEP}",
]
WORKERS = (2, 4, 8)
VOTES = ("majority", "average")
# in order of their runs; G-Lion and AdamW use the mean of all gradients
METHODS = [
    ("adamw", 1),
    ("g_lion", 1),
    ("majority", 4),
    ("majority", 2),
    ("majority", 8),
    *(("average", n) for n in WORKERS),
]
FIRST_RUNGS = {"adamw": (2, 3, 4), "g_lion": (0, 1, 2)}  # of a vote: around G-Lion's best
Betas = tuple[float, float]
# the memory of beta2, 1 / (1 - beta2), is 5 to 100 steps: 1 to 20 percent of a run of 500 steps
BETAS: tuple[Betas, ...] = ((0.9, 0.99), (0.9, 0.95), (0.9, 0.9), (0.8, 0.9), (0.6, 0.8))
BETAS_RUNG = 1  # for comparing betas; best rung of both models with (0.9, 0.99)
ADAMW_BETAS: Betas = (0.9, 0.98)  # of `conf/optimizer/adamw.yaml`
CLIP = 1.0  # largest norm of a worker's gradient, as in `conf/trainer/cpu.yaml`
DECAY = 4e-4  # peak learning rate times weight decay, equal in every run
PRECONDITION = 2.0  # percent above AdamW, for G-Lion: votes are compared with a well-tuned Lion
TARGET = 2.0  # percent above G-Lion, for the majority of 4 workers


@dataclass(frozen=True)
class Run:
    """One run."""

    model: str
    method: str  # "adamw", "g_lion", "majority", "average"
    workers: int  # number of voters; 1 for the first two methods
    seed: int
    lr: float
    beta1: float = 0.0
    beta2: float = 0.0
    clip: float = 0.0  # 0: no clipping

    @property
    def vote(self) -> str | None:
        """The `vote` argument of `simulated.train`."""
        return self.method if self.method in VOTES else None

    def overrides(self, steps: int) -> list[str]:
        """Return the overrides of the configuration; everything else has its default."""
        return [
            f"model={self.model}",
            *MODELS[self.model],
            *COMMON,
            f"trainer.max_steps={steps}",
            f"seed={self.seed}",
            f"optimizer={'adamw' if self.method == 'adamw' else 'distributed_lion'}",
            f"optimizer.lr={self.lr}",
            "optimizer.warmup_steps=100",
            f"optimizer.betas=[{self.beta1},{self.beta2}]",
            f"trainer.gradient_clip_val={self.clip or 'null'}",
            f"optimizer.weight_decay={DECAY / self.lr}",
        ]


Losses = dict[Run, float]  # of finished runs, nats per token


def lr_of(rung: int) -> float:
    """Return the learning rate of a rung."""
    return 2.0**rung / 1000


def tried(model: str, clip: float = 0.0) -> list[Run]:
    """Return a model's runs that choose Lion's betas or, with clipping, check the choice."""
    return [Run(model, "g_lion", 1, 1, lr_of(BETAS_RUNG), *betas, clip) for betas in BETAS]


def best_betas(losses: Losses) -> Betas | None:
    """Return Lion's betas, equal for all models; None while a run of the comparison is missing."""
    columns = list(zip(*map(tried, MODELS), strict=True))  # runs of a pair, one per model
    if any(run not in losses for column in columns for run in column):
        return None
    means = [sum(losses[run] for run in column) for column in columns]
    return BETAS[means.index(min(means))]


def cells(losses: Losses, model: str) -> list[Run]:
    """Return a run of each method with seed 1 and clipping.

    Its learning rate is 0 as a placeholder, and so are Lion's betas while they are unknown.
    """
    lion = best_betas(losses) or (0.0, 0.0)
    return [
        Run(model, method, workers, 1, 0.0, *(ADAMW_BETAS if method == "adamw" else lion), CLIP)
        for method, workers in METHODS
    ]


def sweep(losses: Losses, cell: Run) -> list[int]:
    """Return the rungs to run for a cell, as far as the losses determine them."""
    first = _first_rungs(losses, cell)
    return rungs_to_run(_loss_at(losses, cell), first) if first else []


def best_lr(losses: Losses, cell: Run) -> float | None:
    """Return a cell's best learning rate; None while it is unknown.

    For a vote it is the best rate tried so far, see `is_tuned`.
    """
    loss_at = _loss_at(losses, cell)
    known = {rung: loss for rung in sweep(losses, cell) if (loss := loss_at(rung)) is not None}
    if not known or not (cell.vote or is_tuned(losses, cell)):
        return None
    return lr_of(min(known, key=lambda rung: known[rung]))


def is_tuned(losses: Losses, cell: Run) -> bool:
    """Return whether a cell's best learning rate has a worse one on both sides."""
    first = _first_rungs(losses, cell)
    return bool(first) and best_rung(_loss_at(losses, cell), first) is not None


def _first_rungs(losses: Losses, cell: Run) -> tuple[int, ...]:
    if cell.vote is None:
        return FIRST_RUNGS[cell.method]
    lion = replace(cell, method="g_lion", workers=1)  # with the same betas
    best = best_rung(_loss_at(losses, lion), FIRST_RUNGS["g_lion"])
    return () if best is None else (best, best - 1, best + 1)


def tuning(cell: Run, rung: int) -> Run:
    """Return the run that measures a rung for a cell."""
    return replace(cell, seed=1, lr=lr_of(rung), clip=cell.clip if cell.vote else 0.0)


def _loss_at(losses: Losses, cell: Run) -> LossAt:
    return lambda rung: losses.get(tuning(cell, rung))


def at_best(losses: Losses, cell: Run, seeds: int) -> list[Run]:
    """Return a cell's runs with all seeds at its best learning rate; empty if it is unknown."""
    lr = best_lr(losses, cell)
    return [] if lr is None else [replace(cell, seed=s, lr=lr) for s in range(1, seeds + 1)]


def percents_above(losses: Losses, ours: Iterable[Run], theirs: Iterable[Run]) -> list[float]:
    """Return the percent by which each loss exceeds the other, for pairs of finished runs."""
    found = [(losses.get(run), losses.get(other)) for run, other in zip(ours, theirs, strict=False)]
    return [100 * (loss / other - 1) for loss, other in found if loss and other]


def planned(losses: Losses, seeds: int) -> Iterator[Run]:
    """Yield the runs in order, as far as the losses determine them.

    Lion's betas and the rates of AdamW and G-Lion, without clipping; the seeds of G-Lion and AdamW
    with and without clipping; the seeds of all majorities at G-Lion's rate; the other betas with
    clipping; the majorities at their own rates; then the same for the averages.
    """
    for column in zip(*map(tried, MODELS), strict=True):
        yield from column
    if best_betas(losses) is not None:
        rows = list(zip(*(cells(losses, model) for model in MODELS), strict=True))
        yield from _without_vote([row for row in rows if row[0].vote is None], losses, seeds)
        majorities, averages = ([row for row in rows if row[0].vote == vote] for vote in VOTES)
        yield from _at_lions_rate(majorities, losses, seeds)
        for model in MODELS:
            yield from tried(model, CLIP)
        yield from _at_own_rates(majorities, losses, seeds)
        yield from _at_lions_rate(averages, losses, seeds)
        yield from _at_own_rates(averages, losses, seeds)


Row = tuple[Run, ...]  # cells of a method, one per model


def _without_vote(rows: Sequence[Row], losses: Losses, seeds: int) -> Iterator[Run]:
    for row in rows:
        yield from _tuning(losses, row)
    for row in reversed(rows):
        yield from _seeds(losses, row, seeds)
    for row in rows:
        yield from (replace(run, clip=0.0) for run in _seeds(losses, row, seeds))


def _at_lions_rate(rows: Sequence[Row], losses: Losses, seeds: int) -> Iterator[Run]:
    for row in rows:
        for cell in row:
            for rung in _first_rungs(losses, cell)[:1]:
                first = tuning(cell, rung)
                yield from (replace(first, seed=seed) for seed in range(1, seeds + 1))


def _at_own_rates(rows: Sequence[Row], losses: Losses, seeds: int) -> Iterator[Run]:
    for row in rows:
        yield from _tuning(losses, row)
        yield from _seeds(losses, row, seeds)


def _tuning(losses: Losses, row: Row) -> Iterator[Run]:
    for cell in row:
        yield from (tuning(cell, rung) for rung in sweep(losses, cell))


def _seeds(losses: Losses, row: Row, seeds: int) -> Iterator[Run]:
    for cell in row:
        yield from at_best(losses, cell, seeds)
