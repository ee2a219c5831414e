"""The runs of the quality benchmark, their order, and their overrides.

Learning rates are rungs of one ladder, two per octave. The rate of DDP is tuned for each model. The
rate of DiLoCo is tuned for each model and M, at the longest H with the tuned outer settings, and
used by every cell of that model and M.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import product

from benchmarks.common.ladder import LossAt, best_rung, rungs_to_run

COMMON = [
    "tokenizer.vocab_size=512",
    "data.block_size=32",
    "checkpoint_every_n_steps=0",
    "report.sample_tokens=1",
    "trainer.log_every_n_steps=100",
    "logger=none",
]
MODELS = ("gpt2_tiny", "llama_tiny")
FIRST_RUNGS = (-1, -2, 0)  # of DiLoCo; DDP's are one higher
SYNC_EVERY = (30, 100)
TARGETS = {2: 1.0, 4: 2.0}  # percent above DDP, by M
WIRE_TARGET = 0.3  # percent, fp4 above fp32


@dataclass(frozen=True)
class Size:
    """Sizes common to all runs of a grid.

    Attributes:
        width: of the models' hidden states; both models have two layers.
        blocks_per_step: of all ranks together, so every run sees the same tokens in each step.
        steps: optimizer steps of a run.
    """

    width: int = 32
    blocks_per_step: int = 128
    steps: int = 2500

    def model(self, name: str) -> list[str]:
        """Return the overrides of a model."""
        if name == "gpt2_tiny":
            return [f"model={name}", f"model.n_embd={self.width}", "model.n_layer=2"]
        inside = -(-8 * self.width // 24) * 8  # 8/3 of the width, rounded up to a multiple of 8
        return [
            f"model={name}",
            f"model.hidden_size={self.width}",
            f"model.intermediate_size={inside}",
            "model.num_hidden_layers=2",
        ]


@dataclass(frozen=True)
class Outer:
    """Settings of the outer optimizer, SGD with Nesterov momentum, and of mixing."""

    lr: float
    momentum: float
    mix: float

    def __str__(self) -> str:
        return f"lr {self.lr}, momentum {self.momentum}, mix {self.mix}"


OuterByM = Mapping[int, Outer]
DEFAULT = Outer(0.4, 0.9, 0.5)
DEFAULTS: OuterByM = dict.fromkeys(TARGETS, DEFAULT)
# best of a manual search over `OUTERS`; in arXiv:2503.09799, Figure 7, the best outer learning rate
# also rises with M
TUNED: OuterByM = {2: Outer(0.8, 0.5, 0.0), 4: Outer(1.0, 0.5, 0.0)}
# from the defaults to the tuned settings and beyond
OUTERS = (
    DEFAULT,
    Outer(0.6, 0.9, 0.5),
    Outer(0.8, 0.9, 0.5),
    Outer(0.8, 0.5, 0.5),
    Outer(0.8, 0.5, 0.0),
    Outer(1.0, 0.5, 0.0),
    Outer(1.0, 0.0, 0.0),
)


@dataclass(frozen=True)
class Run:
    """One run. With `wire` "none" it is DDP, which ignores `sync_every` and the outer settings."""

    model: str
    wire: str
    replicas: int
    sync_every: int
    seed: int
    lr: float
    outer_lr: float = DEFAULT.lr
    momentum: float = DEFAULT.momentum
    mix: float = DEFAULT.mix

    @property
    def name(self) -> str:
        """Unique folder name of the run."""
        return "-".join(str(value) for value in asdict(self).values())

    def with_outer(self, outer: Outer) -> Run:
        """Return the same run with other outer settings."""
        return replace(self, outer_lr=outer.lr, momentum=outer.momentum, mix=outer.mix)

    def overrides(self, size: Size) -> list[str]:
        """Return the overrides for `recipes.pretrain`; everything else has its default."""
        words = [
            *size.model(self.model),
            *COMMON,
            f"trainer.max_steps={size.steps}",
            f"trainer.val_check_interval={size.steps}",
            f"trainer.devices={self.replicas}",
            f"data.batch_size={size.blocks_per_step // self.replicas}",
            f"seed={self.seed}",
            f"optimizer.lr={self.lr}",
        ]
        if self.wire == "none":
            return [*words, "strategy=ddp"]
        nesterov = str(self.momentum > 0).lower()  # torch requires momentum for Nesterov
        return [
            *words,
            "strategy=streaming_diloco",
            f"strategy.sync_every={self.sync_every}",
            f"strategy.wire_dtype={self.wire}",
            f"strategy.mix={self.mix}",
            "strategy.outer_optimizer={_target_: torch.optim.SGD, _partial_: true,"
            f" lr: {self.outer_lr}, momentum: {self.momentum}, nesterov: {nesterov}}}",
        ]


Losses = dict[Run, float]  # of finished runs, nats per token


def percent_above(losses: Losses, run: Run, reference: Run) -> float | None:
    """Return the percent by which the loss of `run` exceeds `reference`; None if one is missing."""
    if run not in losses or reference not in losses:
        return None
    return 100 * (losses[run] / losses[reference] - 1)


def lr_of(rung: int) -> float:
    """Return the learning rate of a rung."""
    return round(0.016 * 2 ** (rung / 2), 4)


def best_lr(losses: Losses, run: Run) -> float | None:
    """Return the best learning rate for a run; None while a run of its search is missing."""
    rung = best_rung(_loss_at(losses, run), _first_rungs(run))
    return None if rung is None else lr_of(rung)


def sweep(losses: Losses, run: Run) -> list[Run]:
    """Return the runs that tune a run's learning rate, as far as the losses determine them."""
    rungs = rungs_to_run(_loss_at(losses, run), _first_rungs(run))
    return [replace(run, lr=lr_of(rung)) for rung in rungs]


def _first_rungs(run: Run) -> list[int]:
    return [rung + (run.wire == "none") for rung in FIRST_RUNGS]


def _loss_at(losses: Losses, run: Run) -> LossAt:
    return lambda rung: losses.get(replace(run, lr=lr_of(rung)))


def ours(model: str, replicas: int) -> Run:
    """Return the DiLoCo run that tunes the learning rate of a model and M."""
    return Run(model, "fp4", replicas, max(SYNC_EVERY), 1, 0.0).with_outer(TUNED[replicas])


def ddp(model: str, seed: int = 1, lr: float = 0.0) -> Run:
    """Return the run of DDP, with two ranks for any M.

    `DistributedSampler` assigns blocks round robin, so any number of ranks together takes the same
    blocks in a step, and the mean of their gradients is the same up to rounding.
    """
    return Run(model, "none", 2, 0, seed, lr)


def planned(losses: Losses, seeds: int) -> Iterator[Run]:
    """Yield the runs in order, as far as the losses determine them."""
    for model in MODELS:
        yield from sweep(losses, ddp(model))
    for replicas, model in product(TARGETS, MODELS):
        yield from sweep(losses, ours(model, replicas))
    ddp_lrs = {model: best_lr(losses, ddp(model)) for model in MODELS}
    for seed, (model, lr) in product(range(1, seeds + 1), ddp_lrs.items()):
        if lr is not None:
            yield ddp(model, seed, lr)
    for outer, replicas in product((TUNED, DEFAULTS), TARGETS):
        for wire, seed in product(("fp4", "fp32"), range(1, seeds + 1)):
            row = cells(losses, wire, seed, outer)
            yield from (run for run in row if run.replicas == replicas)
    for jobs in swept(losses):
        yield from jobs


def cells(losses: Losses, wire: str, seed: int, outer: OuterByM) -> Iterator[Run]:
    """Yield a run for each M, H and model, if the learning rate is known."""
    for replicas, sync_every, model in product(TARGETS, SYNC_EVERY, MODELS):
        lr = best_lr(losses, ours(model, replicas))
        if lr is not None:
            yield Run(model, wire, replicas, sync_every, seed, lr).with_outer(outer[replicas])


def swept(losses: Losses) -> Iterator[list[Run]]:
    """Yield the runs of each outer setting: fp4, seed 1, the first model at the longest H."""
    for outer in OUTERS:
        row = cells(losses, "fp4", 1, dict.fromkeys(TARGETS, outer))
        yield [run for run in row if (run.model, run.sync_every) == (MODELS[0], max(SYNC_EVERY))]


def seeds_of(cell: Run, seeds: int) -> list[Run]:
    """Return the runs of a cell, one per seed."""
    return [replace(cell, seed=seed) for seed in range(1, seeds + 1)]
