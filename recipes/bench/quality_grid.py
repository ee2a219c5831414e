"""The runs of the quality bench as data: which there are, in which order, and what each is told."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product

MODELS: dict[str, list[str]] = {
    "gpt2_tiny": ["model.n_embd=48", "model.n_layer=2"],
    "llama_tiny": [
        "model.hidden_size=48",
        "model.intermediate_size=128",
        "model.num_hidden_layers=2",
    ],
}
COMMON = [
    "tokenizer.vocab_size=512",
    "data.block_size=32",
    "checkpoint_every_n_steps=0",
    "report.sample_tokens=1",
    "trainer.log_every_n_steps=100",
    "logger=none",
]
BLOCKS_PER_STEP = 64  # by all ranks together, so that every run sees the same tokens in each step
DEFAULT_OUTER_LR = 0.4
# arXiv:2503.09799, Figure 7, has 0.6 at M = 2 and 4, rising with H; 0.2 is the other direction
TUNED_OUTER_LRS = (0.6, 0.2, 0.8)
INNER_LRS = (8e-3, 4e-3, 16e-3)
SYNC_EVERY = (30, 100)
TARGETS = {2: 1.0, 4: 2.0}  # M to percent above DDP
WIRE_TARGET = 0.3  # percent, fp4 above fp32


@dataclass(frozen=True)
class Run:
    """One job; `wire` "none" is DDP, for which `sync_every` and `outer_lr` mean nothing."""

    model: str
    wire: str
    replicas: int
    sync_every: int
    seed: int
    lr: float
    outer_lr: float = DEFAULT_OUTER_LR

    @property
    def name(self) -> str:
        """A folder's name that no other run has."""
        return "-".join(str(value) for value in asdict(self).values())

    def overrides(self, steps: int) -> list[str]:
        """Return what `recipes.pretrain` is told; all that is not named here is its default."""
        words = [
            f"model={self.model}",
            *MODELS[self.model],
            *COMMON,
            f"trainer.max_steps={steps}",
            f"trainer.val_check_interval={steps}",
            f"trainer.devices={self.replicas}",
            f"data.batch_size={BLOCKS_PER_STEP // self.replicas}",
            f"seed={self.seed}",
            f"optimizer.lr={self.lr}",
        ]
        if self.wire == "none":
            return [*words, "strategy=ddp"]
        return [
            *words,
            "strategy=streaming_diloco",
            f"strategy.sync_every={self.sync_every}",
            f"strategy.wire_dtype={self.wire}",
            "strategy.outer_optimizer={_target_: torch.optim.SGD, _partial_: true,"
            f" lr: {self.outer_lr}, momentum: 0.9, nesterov: true}}",
        ]


Losses = dict[Run, float]  # of the runs that are done, nats per token


def percent_above(losses: Losses, run: Run, reference: Run) -> float | None:
    """Return the percent by which `run` is above `reference` in loss; None: one is missing."""
    if run not in losses or reference not in losses:
        return None
    return 100 * (losses[run] / losses[reference] - 1)


def best_lr(losses: Losses, model: str) -> float | None:
    """Return DDP's best learning rate in the sweep; None while a run of it is missing."""
    sweep = {lr: losses.get(ddp(model, 1, lr)) for lr in INNER_LRS}
    known = {lr: loss for lr, loss in sweep.items() if loss is not None}
    return min(known, key=lambda lr: known[lr]) if len(known) == len(sweep) else None


def ddp(model: str, seed: int, lr: float) -> Run:
    """Return the run of DDP. Two ranks stand for four: the batch of a step holds the same blocks.

    `DistributedSampler` deals the blocks out in turn, so however many ranks there are, together
    they take the same ones in a step, and the mean of their gradients is the same to rounding.
    """
    return Run(model, "none", 2, 0, seed, lr)


def planned(losses: Losses, seeds: int) -> Iterator[Run]:
    """Yield the runs in their order, as far as the results allow to know them."""
    yield from (ddp(model, 1, lr) for lr, model in product(INNER_LRS, MODELS))
    best = {model: best_lr(losses, model) for model in MODELS}
    lrs = {model: lr for model, lr in best.items() if lr is not None}
    if len(lrs) < len(MODELS):
        return
    for seed in range(1, seeds + 1):
        yield from (ddp(model, seed, lrs[model]) for model in MODELS)
        yield from _ours(lrs, "fp4", TARGETS, seed)
        for replicas in TARGETS:
            if seed == 1:
                yield from _tuning(losses, lrs, replicas)
            yield from _ours(lrs, "fp32", [replicas], seed)


def _ours(lrs: dict[str, float], wire: str, sizes: Iterable[int], seed: int) -> Iterator[Run]:
    for replicas, sync_every, model in product(sizes, SYNC_EVERY, MODELS):
        yield Run(model, wire, replicas, sync_every, seed, lrs[model])


def _tuning(losses: Losses, lrs: dict[str, float], replicas: int) -> Iterator[Run]:
    for outer_lr, sync_every, model in product(TUNED_OUTER_LRS, reversed(SYNC_EVERY), MODELS):
        default = Run(model, "fp4", replicas, sync_every, 1, lrs[model])
        above = percent_above(losses, default, ddp(model, 1, lrs[model]))
        if above is not None and above > TARGETS[replicas]:
            yield replace(default, outer_lr=outer_lr)
