"""The runs of Distributed Lion's quality benchmark, and their order.

First come Lion's betas: each pair of `BETAS` on the mean gradient, with seed 1, at one learning
rate. All other Lion runs use the pair with the lowest mean loss over the models. Learning rates are
rungs of one ladder, 2^k / 1000. Those of AdamW and of Lion on the mean gradient (G-Lion) are tuned
for each model with seed 1, starting from `FIRST_RUNGS` and continuing beyond either end until the
best rung has a worse one on both sides. A vote takes G-Lion's rate. Every worker clips its
gradient, like the recipes; the last runs repeat AdamW and G-Lion without clipping.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from benchmarks.common.ladder import LossAt, best_rung, rungs_to_run

MODELS: dict[str, list[str]] = {
    "gpt2_tiny": ["model.n_embd=32", "model.n_layer=2"],
    "llama_tiny": [
        "model.hidden_size=32",
        "model.intermediate_size=88",
        "model.num_hidden_layers=2",
    ],
}
BLOCKS_PER_STEP = 64  # of all workers together, so every run sees the same tokens in each step
COMMON = [
    "tokenizer.vocab_size=512",
    "data.block_size=32",
    f"data.batch_size={BLOCKS_PER_STEP}",
]
WORKERS = (2, 4, 8)
METHODS = [("adamw", 0), ("g_lion", 0), *(("majority", n) for n in WORKERS)]
FIRST_RUNGS = {"adamw": (2, 3, 4), "g_lion": (0, 1, 2)}
Betas = tuple[float, float]
# the memory of beta2, 1 / (1 - beta2), is 5 to 100 steps: 1 to 20 percent of a run of 500 steps
BETAS: tuple[Betas, ...] = ((0.9, 0.99), (0.9, 0.95), (0.9, 0.9), (0.8, 0.9), (0.6, 0.8))
BETAS_RUNG = 1  # for comparing betas
ADAMW_BETAS: Betas = (0.9, 0.98)  # of `conf/optimizer/adamw.yaml`
CLIP = 1.0  # largest norm of a worker's gradient, as in `conf/trainer/cpu.yaml`
DECAY = 4e-4  # peak learning rate times weight decay, equal in every run
PRECONDITION = 2.0  # percent above AdamW, for G-Lion: votes are compared with a well-tuned Lion
TARGET = 2.0  # percent above G-Lion, for the majority of 4 workers


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        model: of `MODELS`.
        method: "adamw", "g_lion" or "majority".
        workers: number of voters; 0 for the first two methods, which take the mean gradient.
        seed: of weights and order of the data.
        lr: peak learning rate; 0 while it is unknown.
        beta1: of Lion's direction, or of AdamW.
        beta2: of Lion's momentum, or of AdamW.
        clip: largest norm of a worker's gradient; 0: no clipping.
    """

    model: str
    method: str
    workers: int
    seed: int
    lr: float
    beta1: float
    beta2: float
    clip: float = CLIP

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


def tried(model: str) -> list[Run]:
    """Return a model's runs that choose Lion's betas."""
    return [Run(model, "g_lion", 0, 1, lr_of(BETAS_RUNG), *betas) for betas in BETAS]


def best_betas(losses: Losses) -> Betas | None:
    """Return Lion's betas, equal for all models; None while a run of the comparison is missing."""
    columns = list(zip(*map(tried, MODELS), strict=True))  # runs of a pair, one per model
    if any(run not in losses for column in columns for run in column):
        return None
    means = [sum(losses[run] for run in column) for column in columns]
    return BETAS[means.index(min(means))]


def cells(losses: Losses, model: str) -> list[Run]:
    """Return a run of each method with seed 1 and open learning rate, in the order of the tables.

    While Lion's betas are unknown, they are 0.
    """
    lion = best_betas(losses) or (0.0, 0.0)
    return [
        Run(model, method, workers, 1, 0.0, *(ADAMW_BETAS if method == "adamw" else lion))
        for method, workers in METHODS
    ]


def search(losses: Losses, cell: Run) -> list[Run]:
    """Return the runs that tune a cell's learning rate, as far as the losses determine them."""
    tuned = _tuned(cell)
    rungs = rungs_to_run(_loss_at(losses, tuned), FIRST_RUNGS[tuned.method])
    return [replace(tuned, lr=lr_of(rung)) for rung in rungs]


def best_lr(losses: Losses, cell: Run) -> float | None:
    """Return a cell's learning rate; None while it is unknown."""
    tuned = _tuned(cell)
    rung = best_rung(_loss_at(losses, tuned), FIRST_RUNGS[tuned.method])
    return None if rung is None else lr_of(rung)


def _tuned(cell: Run) -> Run:
    """Return the cell whose learning rate this one takes: a vote takes G-Lion's."""
    method = "adamw" if cell.method == "adamw" else "g_lion"
    return replace(cell, method=method, workers=0, seed=1, clip=CLIP)


def _loss_at(losses: Losses, cell: Run) -> LossAt:
    return lambda rung: losses.get(replace(cell, lr=lr_of(rung)))


def with_seeds(losses: Losses, cell: Run, seeds: int) -> list[Run]:
    """Return a cell's runs with all seeds at its learning rate; empty while that is unknown."""
    lr = best_lr(losses, cell)
    return [] if lr is None else [replace(cell, seed=s, lr=lr) for s in range(1, seeds + 1)]


def percents_above(losses: Losses, ours: Iterable[Run], theirs: Iterable[Run]) -> list[float]:
    """Return the percent by which each loss exceeds the other, for pairs of finished runs."""
    found = [(losses.get(run), losses.get(other)) for run, other in zip(ours, theirs, strict=False)]
    return [100 * (loss / other - 1) for loss, other in found if loss and other]


def planned(losses: Losses, seeds: int) -> Iterator[Run]:
    """Yield the runs in order, all methods with one seed before the next seed."""
    for column in zip(*map(tried, MODELS), strict=True):
        yield from column
    if best_betas(losses) is None:
        return
    rows = [cell for model in MODELS for cell in cells(losses, model)]
    mean = [cell for cell in rows if not cell.workers]
    for cell in mean:
        yield from search(losses, cell)
    unclipped = [replace(cell, clip=0.0) for cell in mean]
    for cells_of_seed in (rows, unclipped):
        for seed in range(1, seeds + 1):
            for cell in cells_of_seed:
                yield from with_seeds(losses, cell, seeds)[seed - 1 : seed]
