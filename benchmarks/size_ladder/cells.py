"""The cells of the ladder: sizes, settings, learning rates, and the order of the runs.

Every run of a size takes the same tokens in the same steps, whatever its method. The batch grows
with the square root of the size (in arXiv:2503.09799 it grows too), so that larger models have more
steps, and with them more cycles of H steps.

Learning rates are rungs of half an octave. At the two smallest sizes the rate is tuned for each
model and M, with seed 1 and H = 100, like DDP's; the best rung has a worse one on both sides. (The
second size was first run with transferred rates. For GPT-2 these were not the best, with DDP or
with M = 2, so a gap between two of them says little.) A larger size takes the rungs of the size
before, less one for each doubling of the width. H, length and wire keep the rate of their
model, size, optimizer and M. So do trials of other outer steps, with the rate that is best for the
paper's outer step, which they are compared with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.common.ladder import LossAt, best_rung, rungs_to_run
from benchmarks.size_ladder.corpus import SEPARATOR, SPLITS
from lightning_commfree.diloco import default_outer_optimizer

VOCABULARY = 512
BLOCK = 64  # tokens
MODELS = ("gpt2", "llama")
REPLICAS = (1, 2, 4, 8)
OVERLAP = 5  # as on the bandwidth page
FIRST_RUNGS = (-1, 0, 1)  # of DDP's search; those of M replicas are a rung lower per doubling of M
SEARCHED = "0.04M"  # the size of all trials
TUNED = ("0.04M", "0.2M")  # the sizes at which learning rates are tuned
LONG = 100  # tokens per parameter of the longer runs
SHORT = 20
HALF = 10  # of DDP's runs that tell how many tokens DDP needs to reach a loss
OFTEN = 10  # H: the smallest that `sync_every="auto"` chooses
CHOSEN = 20  # H: what it chose for GPT-2 with 0.2M when the work of exchanges was allowed 1.25 %
ACCUMULATED = 8  # batches whose gradients DDP adds, as on the bandwidth page
BATCHES = (1, 4)  # times the blocks of a size, at the smallest size
LONE = 1 / 2  # of the batch: what one of two workers takes
# what people would use instead, by row of `benchmarks.bandwidth`, and every how many steps it
# exchanges weights (H; irrelevant for gradients): as often as ours, and as in that row
PEERS = (
    ("ddp_powersgd", 100),
    ("ddp_powersgd_1", 100),
    ("ddp_powersgd_late", 100),
    ("local_sgd", OFTEN),
    ("torchft_delay", 100),
    ("torchft_delay", OFTEN),
)
Settings = Mapping[str, Any]  # fields of a cell
MULOCO: Settings = {"outer_lr": 0.7, "momentum": 0.6}  # arXiv:2505.23725
SPARSELOCO: Settings = {"outer_lr": 1.0, "momentum": 0.0, "mix": 0.0}  # arXiv:2508.15706
# the plain mean of the replicas' weights, at the same H and overlap
LOCAL_SGD: Settings = {"outer_lr": 1.0, "momentum": 0.0, "mix": 0.0}
# the same, mixed half and half with the local weights as by default, so that no step is discarded
MIXED_MEAN: Settings = {"outer_lr": 1.0, "momentum": 0.0}
MIXED_MEAN_REPLICAS = (2, 4)
LOCAL_SGD_REPLICAS = (2, 4)
# the regime of arXiv:2508.15706, in which few values are sent in each of many exchanges
# (the runs are played, which takes an overlap of at least a step)
SPARSE: Settings = {**LOCAL_SGD, "overlap": 1, "wire": "topk_example"}
SPARSE_EVERY = 15  # H
EXAMPLES = {"topk_example": "{_target_: examples.topk_codec.TopKCodec}"}  # wires by name
# changes of the paper's outer step, tried at the smallest size; the first two follow the rule of
# arXiv:2503.09799, Figure 7, that the outer learning rate grows with M
TRIALS: tuple[Settings, ...] = (
    {"outer_lr": 0.6},
    {"outer_lr": 0.8},
    {"outer_lr": 0.8, "momentum": 0.5},
    {"outer_lr": 1.0, "momentum": 0.5, "mix": 0.0},
    {"outer_lr": 0.4, "restart_every": 4},
    {"outer_lr": 0.4, "radial": True},
)
FINALISTS = 2  # trials that are run with all seeds
OPTIMIZERS: Mapping[str, tuple[str, ...]] = {
    "adamw": ("optimizer=adamw",),
    "muon": ("optimizer=muon",),
    "lion": ("optimizer=distributed_lion",),  # of one worker: no vote
    "sign_muon": ("optimizer=distributed_lion", "optimizer.ns_steps=5"),
}


@dataclass(frozen=True)
class Size:
    """A rung of the ladder: width and layers of both models, and blocks of tokens per step."""

    width: int
    layers: int
    blocks: int

    def parameters(self, model: str) -> int:
        """Return the number of trainable parameters."""
        width, inside = self.width, self.inside
        if model == "gpt2":
            block = 12 * width**2 + 13 * width
            return (VOCABULARY + BLOCK) * width + self.layers * block + 2 * width
        block = 3 * width**2 + 3 * width * inside + 2 * width  # keys and values have half the heads
        return VOCABULARY * width + self.layers * block + width

    @property
    def inside(self) -> int:
        """Width of Llama's MLP: 8/3 of the model's, rounded up to a multiple of 8."""
        return -(-8 * self.width // 24) * 8


SIZES: Mapping[str, Size] = {
    "0.04M": Size(32, 2, 16),
    "0.2M": Size(64, 3, 32),
    "0.8M": Size(128, 4, 64),
    "3M": Size(256, 4, 128),
}
NAMES = tuple(SIZES)


@dataclass(frozen=True)
class Cell:
    """One run. With `replicas` 0 it is DDP. The outer step is by default the paper's.

    Attributes:
        model: of `MODELS`.
        size: of `SIZES`.
        seed: of weights and order of the data.
        rung: of the inner learning rate, see `lr_of`; in a cell with an open rate, relative to the
            tuned one.
        replicas: M, or 0 for DDP.
        sync_every: H.
        tokens_per_parameter: length of the run.
        wire: `wire_dtype`, or of `EXAMPLES`; in records also "topk" and "sparseloco", which no
            longer run.
        optimizer: of `OPTIMIZERS`.
        outer_lr: of the outer SGD.
        momentum: of the outer SGD, Nesterov's.
        mix: weight of the local weights at landing.
        restart_every: outer steps between two restarts of the momentum; 0: never.
        radial: average norms and directions apart.
        batch: times the blocks per step of its size, in so many fewer steps.
        peer: of `PEERS`: another method that two ranks use instead, with `replicas` 0 and without
            the settings of ours except H; "" for DDP and ours.
        overlap: `overlap_steps`.
    """

    model: str
    size: str
    seed: int
    rung: int
    replicas: int = 0
    sync_every: int = 100
    tokens_per_parameter: int = SHORT
    wire: str = "fp4"
    optimizer: str = "adamw"
    outer_lr: float = 0.4
    momentum: float = 0.9
    mix: float = 0.5
    restart_every: int = 0
    radial: bool = False
    batch: float = 1
    peer: str = ""
    overlap: int = OVERLAP

    @property
    def outer(self) -> tuple[Any, ...]:
        """The settings of the outer step."""
        return tuple(getattr(self, name) for name in OUTER)

    @property
    def default(self) -> Cell:
        """The cell with the outer step that belongs to its replicas, optimizer and wire."""
        factory = default_outer_optimizer(self.replicas, self.sync_every)
        outer: dict[str, Any] = {"outer_lr": factory.keywords["lr"]}
        if self.replicas and self.optimizer == "muon":
            outer = dict(MULOCO)
        if self.wire == "sparseloco":
            outer = dict(SPARSELOCO)
        return replace(self.with_papers_outer_step, **outer)

    @property
    def with_papers_outer_step(self) -> Cell:
        """The cell with the outer step of arXiv:2501.18512, up to the momentum."""
        return replace(self, **dict(zip(OUTER, PAPERS_OUTER, strict=True)))

    @property
    def steps(self) -> int:
        """Optimizer steps of the run."""
        size = SIZES[self.size]
        tokens = self.tokens_per_parameter * size.parameters(self.model)
        return round(tokens / (self.blocks * BLOCK))

    @property
    def blocks(self) -> int:
        """Blocks of a step, of all replicas together."""
        return round(SIZES[self.size].blocks * self.batch)

    def overrides(self, corpus: Path, cache: Path) -> list[str]:
        """Return the overrides for `recipes.pretrain`; everything else has its default."""
        size = SIZES[self.size]
        words = [
            f"model={self.model}_tiny",
            "data=text",
            *(f"data.corpus.{name}={corpus}/{name}.txt" for name in SPLITS),
            f"data.corpus.document_separator={SEPARATOR!r}",
            f"tokenizer.vocab_size={VOCABULARY}",
            f"data.block_size={BLOCK}",
            f"data.batch_size={self.blocks}",
            f"trainer.max_steps={self.steps}",
            f"trainer.devices={max(self.replicas, 1)}",
            *OPTIMIZERS[self.optimizer],
            f"optimizer.lr={lr_of(self.rung)}",
            f"seed={self.seed}",
            f"cache_dir={cache}",
        ]
        if self.model == "gpt2":
            words += [f"model.n_embd={size.width}", f"model.n_layer={size.layers}"]
        else:
            words += [
                f"model.hidden_size={size.width}",
                f"model.intermediate_size={size.inside}",
                f"model.num_hidden_layers={size.layers}",
            ]
        if not self.replicas:
            return [*words, "strategy=ddp"]
        nesterov = str(self.momentum > 0).lower()
        sgd = f"_partial_: true, lr: {self.outer_lr}, momentum: {self.momentum}"
        sgd += f", nesterov: {nesterov}"
        if self.restart_every:
            target = (
                f"benchmarks.size_ladder.outer.RestartedSGD, restart_every: {self.restart_every}"
            )
        else:
            target = "torch.optim.SGD"
        return [
            *words,
            "strategy=streaming_diloco",
            f"strategy.sync_every={self.sync_every}",
            f"strategy.overlap_steps={self.overlap}",
            f"strategy.wire_dtype={EXAMPLES.get(self.wire, self.wire)}",
            f"strategy.mix={self.mix}",
            f"strategy.outer_optimizer={{_target_: {target}, {sgd}}}",
        ]


OUTER = ("outer_lr", "momentum", "mix", "restart_every", "radial")
PAPERS_OUTER = Cell("", "", 0, 0).outer
Losses = Mapping[Cell, float]
WithRate = Callable[[Losses, Cell], Cell | None]  # gives a cell its learning rate


def lr_of(rung: int) -> float:
    """Return the learning rate of a rung."""
    return round(0.008 * 2 ** (rung / 2), 5)


def with_own_rate(losses: Losses, cell: Cell) -> Cell | None:
    """Return a cell with the rate that is best for its own length, H and batch; None: unknown."""
    rung = best_rung(_loss_near(losses, cell), _rungs_near(cell))
    return None if rung is None else row(losses, replace(cell, rung=rung))


def _rungs_near(cell: Cell) -> list[int]:
    """Return where a search begins, from the rate of `row`: it grows with the batch's root."""
    return [rung + round(math.log2(cell.batch)) for rung in FIRST_RUNGS]


def _loss_near(losses: Losses, cell: Cell) -> LossAt:
    """Return seed 1's loss by the distance from the rung that `row` chooses."""

    def loss_at(rung: int) -> float | None:
        run = row(losses, replace(cell, seed=1, rung=rung))
        return None if run is None else losses.get(run)

    return loss_at


def search(losses: Losses, cell: Cell) -> list[Cell]:
    """Return the runs that tune a cell's learning rate, as far as the losses determine them."""
    tuned, first = _tuned(cell), _first_rungs(losses, cell)
    rungs = rungs_to_run(_loss_at(losses, tuned), first) if first else []
    return [replace(tuned, rung=rung) for rung in rungs]


def row(losses: Losses, cell: Cell) -> Cell | None:
    """Return a cell with the learning rate of its model, optimizer, size and M; None: unknown."""
    rung = _rung(losses, cell)
    return None if rung is None else replace(cell, rung=rung + cell.rung)


def _rung(losses: Losses, cell: Cell) -> int | None:
    if cell.size not in TUNED:
        return _transferred_rung(losses, cell)
    first = _first_rungs(losses, cell)
    return best_rung(_loss_at(losses, _tuned(cell)), first) if first else None


def _transferred_rung(losses: Losses, cell: Cell) -> int | None:
    before = _rung(losses, replace(cell, size=NAMES[NAMES.index(cell.size) - 1]))
    return None if before is None else before - 1  # each of these sizes has twice the width


def _tuned(cell: Cell) -> Cell:
    """Return the cell whose learning rate this one takes, or begins its own search with."""
    tuned = Cell(cell.model, cell.size, 1, 0, cell.replicas, optimizer=cell.optimizer)
    if cell.sync_every in (OFTEN, CHOSEN) or cell.outer == tuned.default.outer:
        return tuned.default
    return tuned


def _first_rungs(losses: Losses, cell: Cell) -> list[int]:
    """Return the rungs at which a search starts; none until the smaller size's search is done."""
    if cell.size != SEARCHED:
        middle = _transferred_rung(losses, cell)
        return [] if middle is None else [middle + rung for rung in FIRST_RUNGS]
    lower = max(cell.replicas, 1).bit_length() - 1
    if cell.optimizer in ("lion", "sign_muon"):
        lower += 4  # a quarter, as in conf/optimizer
    return [rung - lower for rung in FIRST_RUNGS]


def _loss_at(losses: Losses, cell: Cell) -> LossAt:
    return lambda rung: losses.get(replace(cell, rung=rung))


def reference(cell: Cell) -> Cell:
    """Return the DDP run on the same tokens, with the learning rate left open."""
    return Cell(
        cell.model,
        cell.size,
        cell.seed,
        0,
        tokens_per_parameter=cell.tokens_per_parameter,
        optimizer=cell.optimizer,
        batch=cell.batch,
    )


def pairs(
    losses: Losses, cell: Cell, other: Cell, with_rate: WithRate = row
) -> list[tuple[Cell, Cell]]:
    """Return the runs of two cells with open rate, for each seed that both have."""
    ours, theirs = with_rate(losses, cell), with_rate(losses, other)
    if ours is None or theirs is None:
        return []
    seeds = sorted({run.seed for run in losses})
    runs = [(replace(ours, seed=seed), replace(theirs, seed=seed)) for seed in seeds]
    return [pair for pair in runs if losses.keys() >= set(pair)]


def percent(losses: Losses, ours: Cell, theirs: Cell) -> float:
    """Return by how much the loss of a run exceeds that of another."""
    return 100 * (losses[ours] / losses[theirs] - 1)


def change_of_trial(losses: Losses, cell: Cell) -> float | None:
    """Return the percent above the paper's outer step, at the learning rate that is best for it."""
    papers = row(losses, cell.with_papers_outer_step)
    ours = None if papers is None else with_outer_step(papers, cell)
    if ours is None or papers is None or not {ours, papers} <= losses.keys():
        return None
    return 100 * (losses[ours] / losses[papers] - 1)


def with_outer_step(cell: Cell, other: Cell) -> Cell:
    """Return a cell with the outer step of another one."""
    return replace(cell, **dict(zip(OUTER, other.outer, strict=True)))


def finalists(losses: Losses) -> list[Settings]:
    """Return the trials that are run with all seeds, the best one first.

    With seed 1 and M = 4 their losses of Llama are the lowest below that of the paper's outer step.
    """
    changes = []
    for place, trial in enumerate(TRIALS):
        change = change_of_trial(losses, Cell("llama", SEARCHED, 1, 0, 4, **trial))
        if change is not None and change < 0:
            changes.append((change, place))
    return [TRIALS[place] for _, place in sorted(changes)[:FINALISTS]]


def grid(
    size: str,
    seed: int,
    tokens_per_parameter: int = SHORT,
    optimizer: str = "adamw",
    replicas: tuple[int, ...] = (4, 2, 1, 8),
    models: Sequence[str] = MODELS,
    batch: float = 1,
    **settings: Any,
) -> Iterator[Cell]:
    """Yield DDP and DiLoCo for each M, of one size and seed, with learning rates left open."""
    common: dict[str, Any] = {"tokens_per_parameter": tokens_per_parameter, "optimizer": optimizer}
    common["batch"] = batch
    ddps = [Cell(model, size, seed, 0, **common) for model in models]
    yield from ddps
    for m in replicas:
        cells = (replace(ddp, replicas=m, **settings) for ddp in ddps)
        yield from (cell if set(settings) & set(OUTER) else cell.default for cell in cells)


def open_cells(losses: Losses, seeds: int) -> Iterator[Cell]:
    """Yield the cells in the order in which they are run, with learning rates left open."""

    def of_seeds(size: str, **settings: Any) -> Iterator[Cell]:
        return (cell for seed in range(1, seeds + 1) for cell in grid(size, seed, **settings))

    small, middle, large, largest = NAMES
    varying, steady = MODELS[:1], MODELS[1:]  # the gap of Llama varies less over seeds
    long: dict[str, Any] = {"tokens_per_parameter": LONG}
    muon: dict[str, Any] = {"replicas": (4,), "optimizer": "muon"}
    yield from of_seeds(small)
    yield from of_seeds(small, replicas=(2, 4), sync_every=30)
    yield from of_seeds(small, models=steady, **muon)
    # a second size, for the trend
    yield from of_seeds(middle, replicas=(4, 2), models=steady)
    yield from of_seeds(middle, replicas=(2, 4))
    yield from of_seeds(middle, replicas=(8, 1), models=steady)
    yield from _often(losses, seeds)
    # does more training close the gap that grows with size?
    yield from of_seeds(middle, replicas=(2,), models=varying, **long)
    # a third size, with one seed: there, too, are more cycles of H
    yield from grid(large, 1, replicas=(4, 2), models=steady)
    # does more training close the gaps of the smallest size, those of the wires and Muon's?
    yield from of_seeds(small, replicas=(2, 4), **long)
    yield from of_seeds(small, replicas=(2, 4), wire="int2", **long)
    yield from of_seeds(small, replicas=(2, 4), wire="fp32", **long)
    yield from of_seeds(small, replicas=(2, 4), sync_every=30, **long)
    # GPT-2's gap grows there: is it because the rates were tuned in short runs?
    yield from _with_own_search(
        losses, grid(small, 1, replicas=(2, 4), models=varying, **long), seeds
    )
    yield from grid(large, 1, replicas=(2,), models=varying)
    yield from of_seeds(small, **muon, **long)
    yield from grid(large, 1, replicas=(8, 1), models=steady)
    yield from grid(large, 1, replicas=(4,), models=varying)
    for wire in ("int2", "fp32"):
        yield from of_seeds(small, replicas=(2, 4), wire=wire)
    for trial in TRIALS:
        yield from grid(small, 1, replicas=(4,), models=steady, **trial)
    best = finalists(losses)
    for trial in best:
        yield from of_seeds(small, replicas=(4,), models=steady, **trial)
    # more cycles of H at the same size
    yield from grid(small, 1, replicas=(4,), models=steady, **long)
    for trial in best:
        yield from grid(small, 1, replicas=(4,), models=steady, **long, **trial)
    for trial in best:
        yield from of_seeds(small, replicas=(8,), models=steady, **trial)
    yield from of_seeds(small, **muon)
    for trial in best:
        yield from of_seeds(small, replicas=(4, 8), **trial)
    for optimizer in ("lion", "sign_muon"):
        yield from of_seeds(small, replicas=(), optimizer=optimizer)
    yield from of_seeds(middle)
    # the paper's outer step at the second size
    yield from of_seeds(middle, replicas=(4, 8), models=steady, outer_lr=0.4)
    # does int2 need more exchanges?
    for wire in ("int2", "fp32"):
        yield from of_seeds(small, replicas=(4,), sync_every=30, wire=wire)
    yield from of_seeds(small, **long)
    yield from of_seeds(small, sync_every=30)
    yield from of_seeds(middle, sync_every=30)
    yield from of_seeds(large)
    yield from of_seeds(large, sync_every=30)
    yield from of_seeds(middle, **long)
    yield from of_seeds(largest)


def _often(losses: Losses, seeds: int) -> Iterator[Cell]:
    """Yield runs that exchange as often as a link hides, and those with larger batches."""
    small, middle = TUNED
    steady = MODELS[1:]
    # how many of its tokens does DDP need for the same loss?
    for seed in range(1, seeds + 1):
        yield from grid(middle, seed, HALF, replicas=())
    for m, models, every in (
        (2, MODELS[:1], CHOSEN),
        (2, MODELS, OFTEN),
        (4, MODELS, OFTEN),
        (8, steady, OFTEN),
    ):
        cells = grid(middle, 1, replicas=(m,), models=models, sync_every=every)
        yield from _with_own_search(losses, cells, seeds)
        if every == CHOSEN:
            accumulated = Cell(MODELS[0], middle, 1, 0, batch=ACCUMULATED)
            yield from _with_own_search(losses, [accumulated], seeds)
        if m == 4:
            plain = (Cell(model, middle, 1, 0, 2, OFTEN, **LOCAL_SGD) for model in models)
            yield from _with_own_search(losses, plain, seeds)
            yield from _with_own_search(losses, peer_cells(), seeds)
    for ms, outers in ((MIXED_MEAN_REPLICAS, ({}, MIXED_MEAN)), (REPLICAS[-1:], ({},))):
        for outer, batch in product(outers, BATCHES):
            common: dict[str, Any] = {"models": steady, "batch": batch, "sync_every": OFTEN}
            cells = grid(small, 1, LONG, replicas=ms, **common, **outer)
            yield from _with_own_search(losses, cells, seeds)
    eight = grid(middle, 1, replicas=(8,), models=MODELS[:1], sync_every=OFTEN)
    yield from _with_own_search(losses, eight, seeds)
    yield from _with_own_search(losses, lone_cells(), seeds)
    muon = grid(small, 1, LONG, "muon", (4,), steady, BATCHES[-1], sync_every=OFTEN)
    yield from _with_own_search(losses, muon, seeds)
    plain = (Cell(model, middle, 1, 0, 4, OFTEN, **LOCAL_SGD) for model in MODELS)
    yield from _with_own_search(losses, plain, seeds)
    yield from _with_own_search(losses, sparse_cells(), seeds)


def sparse_cells() -> tuple[Cell, Cell]:
    """Return top-k in its own regime and, with the same settings, fp4; with open rate."""
    sparse = Cell(MODELS[1], SEARCHED, 1, 0, 2, SPARSE_EVERY, LONG, **SPARSE)
    return sparse, replace(sparse, wire="fp4")


def peer_cells() -> list[Cell]:
    """Return the cells of other methods, with open rate."""
    return [Cell(MODELS[0], TUNED[-1], 1, 0, 0, every, peer=peer) for peer, every in PEERS]


def lone_cells() -> list[Cell]:
    """Return one worker alone, with open rate: for as many steps as two, and for twice as many."""
    alone = Cell(MODELS[0], TUNED[-1], 1, 0, batch=LONE)
    return [replace(alone, tokens_per_parameter=tokens) for tokens in (HALF, SHORT)]


def _with_own_search(losses: Losses, cells: Iterable[Cell], seeds: int) -> Iterator[Cell]:
    """Yield the runs that search for each cell's own rate, then those of all seeds at it."""
    for cell in cells:
        near, first = _loss_near(losses, cell), _rungs_near(cell)
        yield from (replace(cell, rung=rung) for rung in rungs_to_run(near, first))
        best = best_rung(near, first)
        if best is not None:
            yield from (replace(cell, rung=best, seed=seed) for seed in range(1, seeds + 1))


def planned(losses: Losses, seeds: int) -> Iterator[Cell]:
    """Yield the runs in order, as far as the losses determine them."""
    for cell in open_cells(losses, seeds):
        yield from _with_search(losses, cell)
        if _is_trial(cell):
            papers = cell.with_papers_outer_step
            yield from _with_search(losses, papers)
            with_lr = row(losses, papers)
            if with_lr is not None:
                yield with_outer_step(with_lr, cell)


def _with_search(losses: Losses, cell: Cell) -> Iterator[Cell]:
    if cell.size in TUNED:
        yield from search(losses, cell)
    with_lr = row(losses, cell)
    if with_lr is not None:
        yield with_lr


def _is_trial(cell: Cell) -> bool:
    """Return whether a cell is compared with the paper's outer step; the default may be, too."""
    comparable = cell == replace(cell, size=SEARCHED, sync_every=100, wire="fp4", optimizer="adamw")
    papers = cell.with_papers_outer_step
    return comparable and cell in [replace(papers, **trial) for trial in TRIALS]
