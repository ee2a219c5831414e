"""Resumes of random configurations: each is exact to the bit, or says that it is not.

A seed draws strategy, layout, wire, precision, loader, callbacks and more. Its fit saves in the
middle and continues; another fit resumes from the save. Everything at their ends is compared. Seeds
from 1000 on draw loaders, callbacks and optimizers whose state is easily lost, besides. As a
script it runs many seeds and appends one line of JSON per seed to a file, where it continues:

    python -m tests.resume.random_resumes --seeds 0-299
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import random
import shutil
import signal
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_commfree import (
    DistributedLion,
    DistributedLionStrategy,
    DominoTPStrategy,
    StreamingDiLoCoStrategy,
)
from lightning_commfree.model.shards import local_tensor, map_nested
from lightning_commfree.resume.data_position import EPOCH_METRICS
from tests.fit import causal_lm
from tests.fit.models import Drawn, Tiny, dataset, quiet_trainer
from tests.fit.saved import resume_words
from tests.resume.loaders import Batches, Harder, Noise, SetsEpoch, Stateful
from tests.world import run_ranks

BATCH, EPOCHS = 2, 2
LIMIT_S = 150  # a rank that takes longer is killed: a hang
MORE = 1000  # the first seed that draws from `draw_more`, too
# what a resume cannot know to be complete, and is
COMPLETE = {
    "callback `Ema`",
    "callback `SetsEpoch`",
    "data set `Harder`",
    "data set `Stream`",
    "loader `Drawn`",
    "random numbers that `Harder` draws in worker processes",
    "random numbers that `Stream` draws in worker processes",
    "sampler `Batches`",
}


class Case(NamedTuple):
    """A configuration; `settings` are arguments of the strategy."""

    seed: int
    strategy: str  # "diloco", "lion" or "domino"
    ranks: int
    size: int  # ranks of a replica
    inside: str
    settings: dict[str, Any]
    precision: str
    batches: int  # of an epoch, on every rank
    accumulate: int
    save_at: int  # batches before the save
    clip: tuple[float, str] | None
    loader: str
    workers: int
    callbacks: tuple[str, ...]
    scheduler: str
    optimizer: str
    layer: str  # "dropout", "batch norm" or "plain"
    validate_every: int  # batches; 0: at the end of an epoch
    epoch_metric: bool  # log a mean over the epoch
    saves_first: bool = False  # before the other callbacks
    schedule: int = 1  # `accumulate_grad_batches` from the second epoch on

    @property
    def own_shares(self) -> bool:
        """Whether the loader takes a rank's share itself."""
        return self.loader in ("epochs of batches", "two")

    @property
    def is_lm(self) -> bool:
        """Whether a replica's ranks get the same batch of a language model."""
        return "domino" in (self.strategy, self.inside)


def draw(seed: int) -> Case:
    """Return the configuration of a seed."""
    chance = random.Random(seed)
    pick = chance.choice
    strategy = pick(["diloco", "lion", "domino"])
    ranks = pick([1, 2, 4] if strategy == "domino" else [1, 2, 3, 4])
    sizes = [size for size in range(1, ranks + 1) if ranks % size == 0]
    layouts = [("ddp", size) for size in sizes]
    layouts += [("fsdp", size) for size in sizes if size > 1]
    layouts += [("domino", size) for size in sizes if size in (2, 4)]
    inside, size = pick(layouts)
    if strategy == "domino":
        inside, size = "domino", pick(sizes)
    settings: dict[str, Any]
    if strategy == "diloco":
        settings = {
            "sync_every": pick([2, 3, 5]),
            "num_fragments": pick([1, 2]),
            "overlap_steps": pick([0, 1]),
            "mix": pick([0.0, 0.5]),
            "wire_dtype": pick(["fp32", "bf16", "int8", "fp4"]),
            "evaluate": pick(["outer", "mean"]),
        }
    elif strategy == "lion":
        vote = pick(["majority", "average"])
        settings = {
            "vote": vote,
            "ties": pick(
                ["zero", "random"] if vote == "majority" and inside != "domino" else ["zero"]
            ),
            "overlap": pick([True, False]),
        }
    else:
        settings = {"split": pick(["batch", "token", "weight", "hybrid", "none"])}
    shards = inside != "ddp"
    precisions = ["32-true", "64-true", "bf16-mixed", "bf16-true"]
    batches, accumulate = pick([6, 7, 9]), pick([1, 1, 2, 3])
    kinds = ["every", "ema", "early", "rates"] + ["weights"] * (not shards)
    case = Case(
        seed=seed,
        strategy=strategy,
        ranks=ranks,
        size=size,
        inside=inside,
        settings=settings,
        precision=pick(precisions if shards else [*precisions, "16-mixed"]),
        batches=batches,
        accumulate=accumulate,
        save_at=chance.randrange(1, EPOCHS * batches),
        clip=pick([None, (0.1, "norm"), (0.01, "value")]),
        loader=pick(["shuffle", "plain", "stream with state"] * 3 + ["stream"]),
        workers=pick([0, 0, 2]),
        callbacks=tuple(kind for kind in kinds if chance.random() < 0.4),
        scheduler=pick(["none", "step", "epoch"] * 3 + ["plateau"]),
        optimizer=pick(["adamw", "sgd"]),
        layer=pick(["plain", "dropout", "batch norm"]),
        validate_every=pick([0, 3]),
        epoch_metric=pick([True, False, False]),
    )
    if strategy == "diloco":  # last, so that the rest of a seed stays as it was
        settings["wire_dtype"] = pick([settings["wire_dtype"], "int2"])
    return case if seed < MORE else draw_more(case, chance)


def draw_more(case: Case, chance: random.Random) -> Case:
    """Replace parts of a case with loaders, callbacks and optimizers whose state is easily lost."""
    pick = chance.choice
    loaders = ["stateful", "epochs of batches", "epochs of data"]
    loaders += [] if case.is_lm else ["two", "persistent", "noise"]
    optimizer = pick([case.optimizer, "nadam", "nadam"])
    precision = pick([case.precision, "bf16-true"]) if optimizer == "nadam" else case.precision
    case = case._replace(
        loader=pick([case.loader, *loaders]),
        optimizer=optimizer,
        precision=precision,
        saves_first=pick([True, False, False]),
        schedule=pick([1, 2, 3]),
    )
    return case if case.schedule == 1 else case._replace(accumulate=1)


# -- a fit


def schedule(case: Case, optimizer: Any) -> Any:
    if case.scheduler == "none":
        return optimizer
    if case.scheduler == "plateau":
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"},
        }
    steps = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    return [optimizer], [{"scheduler": steps, "interval": case.scheduler}]


class Configured(pl.LightningModule):
    """Adds optimizer, scheduler and an epoch's metric of a case to a module."""

    case: Case

    def on_fit_start(self) -> None:
        replica = self.global_rank // self.case.size if self.case.is_lm else self.global_rank
        torch.manual_seed(100 + replica)

    def training_step(self, batch: Any, i: int) -> Tensor:
        if self.case.loader == "two":
            batch = [sum(columns) for columns in zip(*batch, strict=True)]
        loss: Tensor = super().training_step(batch, i)
        if self.case.epoch_metric:
            self.log("epoch_loss", loss.detach(), on_step=False, on_epoch=True, batch_size=BATCH)
        return loss

    def configure_optimizers(self) -> Any:
        kinds = {
            "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-3),
            "sgd": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9),
            "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2, eps=1e-3),
        }
        if self.case.strategy == "lion":
            kinds = dict.fromkeys(kinds, lambda p: DistributedLion(p, lr=0.02, weight_decay=0.1))
        return schedule(self.case, kinds[self.case.optimizer](self.parameters()))


class Net(Configured, Tiny):
    def __init__(self, case: Case) -> None:
        super().__init__(width=24)
        self.case = case
        layers = {"dropout": nn.Dropout(0.3), "batch norm": nn.BatchNorm1d(3)}
        self.first = layers.get(case.layer, nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.first(x))


class LM(Configured, causal_lm.CausalLM):
    def __init__(self, case: Case) -> None:
        kind = "gpt2" if case.seed % 2 else "llama"
        super().__init__(kind, dropout=0.1 if case.layer == "dropout" else 0.0)
        self.case = case


class Stream(IterableDataset):  # type: ignore[type-arg]
    """A share of a data set, without a length and without a state."""

    def __init__(self, data: Any, share: int, shares: int) -> None:
        self.data, self.share, self.shares = data, share, shares

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        rows = range(self.share, len(self.data), self.shares)
        yield from (self.data[row] for row in rows[worker::workers])


def loader(case: Case, rank: int) -> Any:
    shares = case.ranks // case.size if case.is_lm else case.ranks
    share = rank // case.size if case.is_lm else rank
    rows = case.batches * BATCH * shares
    data: Any = causal_lm.words(rows) if case.is_lm else dataset(rows)
    drawn = Drawn(partial(draw_rows, data), case.batches, seed=share)
    if case.loader == "stream with state":
        return drawn
    if case.loader == "stream":
        data = Stream(data, share, shares)
    if case.loader == "epochs of batches":
        batches = Batches(rows, BATCH, share, shares)
        return DataLoader(data, batch_sampler=batches, num_workers=case.workers)
    if case.loader == "epochs of data":
        data = Harder(data)
    stays = case.loader == "persistent"
    if stays or case.loader == "noise":
        data = Noise(data)
    shuffled = DataLoader if case.loader != "stateful" else Stateful
    kwargs: dict[str, Any] = {"persistent_workers": True} if stays else {}
    made = shuffled(
        data,
        BATCH,
        shuffle=case.loader not in ("plain", "stream"),
        num_workers=2 if stays else case.workers,
        drop_last=True,
        **kwargs,
    )
    return made if case.loader != "two" else CombinedLoader([drawn, made], "max_size_cycle")


def draw_rows(data: Any, numbers: torch.Generator) -> Any:
    rows = torch.randint(0, len(data), (BATCH,), generator=numbers)
    return [column[rows] for column in data.tensors]


class Saves(pl.Callback):
    """Saves once, after a number of batches."""

    def __init__(self, path: Path, after: int) -> None:
        self.path, self.after = path, after

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.fit_loop.total_batch_idx + 1 == self.after:
            trainer.save_checkpoint(self.path)


Saves.__module__ = "lightning_commfree"  # a class that is known to have no state


class Ema(pl.Callback):
    """A home-made average of the weights, in the callback's state."""

    def __init__(self) -> None:
        self.average: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        for name, p in module.named_parameters():
            held = local_tensor(p).clone()
            self.average[name] = 0.9 * self.average.get(name, held) + 0.1 * held

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average = {**state["average"]}


def strategy_of(case: Case) -> Any:
    common = {"timeout": timedelta(seconds=60)}
    if case.strategy == "domino":
        return DominoTPStrategy(case.size, **case.settings, **common)
    if case.strategy == "lion":
        layout = {"node_size": case.size, "inside": case.inside}
        return DistributedLionStrategy(**layout, **case.settings, **common)
    layout = {"replica_size": case.size, "inside": case.inside}
    return StreamingDiLoCoStrategy(**layout, **case.settings, **common)


def callbacks_of(case: Case, folder: Path) -> list[pl.Callback]:
    found: list[pl.Callback] = []
    if "every" in case.callbacks:
        found.append(
            callbacks.ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1, monitor=None)
        )
    if "ema" in case.callbacks:
        found.append(Ema())
    if "early" in case.callbacks:
        found.append(
            callbacks.EarlyStopping("val_loss", patience=1, check_on_train_epoch_end=False)
        )
    if case.schedule > 1:
        found.append(callbacks.GradientAccumulationScheduler({0: 1, 1: case.schedule}))
    if "rates" in case.callbacks:
        found.append(callbacks.LearningRateMonitor())
    averaging = getattr(callbacks, "EMAWeightAveraging", None)  # Lightning 2.6 and later
    if "weights" in case.callbacks and averaging is not None:
        found.append(averaging(decay=0.9))
    return found


def fit(case: Case, rank: int, folder: Path, name: str, path: Path, resumes: bool) -> Any:
    """Train to the end; return what is there then, by name, and what a resume said of itself."""
    used, data = callbacks_of(case, folder / name), loader(case, rank)
    saver = Saves(path, -1 if resumes else case.save_at)
    if case.loader in ("epochs of batches", "epochs of data"):
        used.append(SetsEpoch(data.batch_sampler if case.own_shares else data.dataset))
    precision: dict[str, Any] = {"precision": case.precision}
    if case.precision == "16-mixed":  # by name it would be bf16 on a CPU
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=5)
        precision = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}
    clip = {} if case.clip is None else dict(zip(_CLIP, case.clip, strict=True))
    trainer = quiet_trainer(
        strategy=strategy_of(case),
        devices=case.ranks,
        max_epochs=EPOCHS,
        callbacks=[saver, *used] if case.saves_first else [*used, saver],
        accumulate_grad_batches=case.accumulate,
        check_val_every_n_epoch=None if case.validate_every else 1,
        val_check_interval=case.validate_every or None,
        limit_val_batches=2,
        enable_checkpointing="every" in case.callbacks,
        logger=CSVLogger(folder / name) if "rates" in case.callbacks else False,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        use_distributed_sampler=not case.own_shares,
        **precision,
        **clip,
    )
    torch.manual_seed(1000 + case.seed + 17 * resumes)  # of another process
    module = LM(case) if case.is_lm else Net(case)
    validation = causal_lm.loader(16, BATCH) if case.is_lm else DataLoader(dataset(16), BATCH)
    with resume_words() as said, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, data, validation, ckpt_path=path if resumes else None)
    end = {
        "weights": module.state_dict(),
        "optimizers": [one.state_dict() for one in trainer.optimizers],
        "schedulers": [one.scheduler.state_dict() for one in trainer.lr_scheduler_configs],
        "precision": trainer.precision_plugin.state_dict(),
        "metrics": {**trainer.callback_metrics},
        "steps": trainer.global_step,
        "epoch": trainer.current_epoch,
        "random": torch.get_rng_state(),
    }
    for callback in used if rank == 0 else []:  # all ranks get rank 0's, as under DDP
        kind = type(callback).__name__
        if kind == "EMAWeightAveraging":
            end[kind] = callback._average_model.state_dict()
        elif kind in ("Ema", "EarlyStopping"):
            end[kind] = callback.state_dict()
    return map_nested(end, lambda value, _: _held(value)), said


_CLIP = ("gradient_clip_val", "gradient_clip_algorithm")


def _held(value: Any) -> Any:
    return local_tensor(value).clone() if isinstance(value, Tensor) else value


def first_difference(one: Any, other: Any, where: str = "") -> str:
    """Return where two nested states differ first, and by how much; "" if they are the same."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.dtype != other.dtype or one.shape != other.shape:
            return f"{where}: {one.dtype} {[*one.shape]} and {other.dtype} {[*other.shape]}"
        if one.nelement() == 0 or torch.equal(one, other) or one.isnan().any():
            return ""
        return f"{where}: by {(one.double() - other.double()).abs().max():.1e}"
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return f"{where}: {sorted(map(str, one.keys() ^ other.keys()))} in one only"
        pairs = [(one[key], other[key], f"{where}.{key}") for key in one]
    elif isinstance(one, list | tuple) and type(one) is type(other) and len(one) == len(other):
        pairs = [(*pair, f"{where}[{i}]") for i, pair in enumerate(zip(one, other, strict=True))]
    else:
        return "" if one == other else f"{where}: {one!r} and {other!r}"
    return next(filter(None, (first_difference(*pair) for pair in pairs)), "")


class Result(NamedTuple):
    """What came of a seed on one rank.

    Attributes:
        outcome: "exact", "said not to be", "SILENT", "refused" (before the save) or "FAILED".
        text: the difference, what was said, or the error.
    """

    outcome: str
    text: str


def resume(case: Case, rank: int, folder: Path) -> Result:
    """Train, resume and compare; collective."""
    path = folder / "at.ckpt"
    signal.alarm(LIMIT_S)
    try:
        saved, _ = fit(case, rank, folder, "saved", path, resumes=False)
    except (ValueError, TypeError) as error:
        return Result("refused", str(error)[:200])
    except Exception as error:  # noqa: BLE001
        return Result("FAILED", f"{type(error).__name__}: {error}"[:400])
    if not path.exists():
        return Result("refused", "stopped before the save")
    try:
        resumed, said = fit(case, rank, folder, "resumed", path, resumes=True)
    except Exception as error:  # noqa: BLE001
        return Result("FAILED", f"resume: {type(error).__name__}: {error}"[:400])
    finally:
        signal.alarm(0)
    # Lightning does not restore what was last logged before the save
    saved["metrics"] = {name: saved["metrics"][name] for name in resumed["metrics"]}
    said, named = _split(said)
    if said and "; " not in said and EPOCH_METRICS in said:
        # it says nothing of anything else
        for end in (saved, resumed):
            end["metrics"].pop("epoch_loss", None)
        if (difference := first_difference(saved, resumed)) and named <= COMPLETE:
            return Result("SILENT", difference)
    difference = first_difference(saved, resumed)
    if said or not named <= COMPLETE:
        return Result("said not to be", f"{difference or 'no difference'}; {said}{named}"[:600])
    return Result("SILENT", difference) if difference else Result("exact", "")


def _split(said: list[str]) -> tuple[str, set[str]]:
    """Return what a resume says is not exact, and what it says it could not verify."""
    (text,) = said
    text, _, names = text.partition(" Not verified, because only you know its state: ")
    named = set(names.removesuffix(".").split(", ")) - {""}
    good = text.startswith("Restored on all ranks" if named else "Resumed exactly")
    return "" if good else text, named


def play(rank: int, size: int, folder: Path, seeds: list[int]) -> list[Result]:
    """Run seeds that have the same number of ranks."""
    # else a rank may not start the workers of a loader; torch starts ranks as daemons
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    results = []
    for seed in seeds:
        results.append(resume(draw(seed), rank, folder / str(seed)))
        torch.distributed.barrier()
    return results


def run(seeds: list[int], folder: Path) -> list[Result]:
    """Return the worst result of all ranks, by seed; the seeds have the same number of ranks."""
    for seed in seeds:
        (folder / str(seed)).mkdir(parents=True)
    by_rank = run_ranks(play, draw(seeds[0]).ranks, folder, folder, seeds)
    worst = ("FAILED", "SILENT", "said not to be", "refused", "exact")
    return [
        min(results, key=lambda one: worst.index(one.outcome))
        for results in zip(*by_rank, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0-299", help="A-B, both included")
    parser.add_argument("--out", type=Path, default=Path("outputs/random_resumes.jsonl"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    gc.freeze()  # a rank that collects walks over all objects, and copies them
    first, last = map(int, options.seeds.split("-"))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    rows = options.out.read_text().splitlines() if options.out.exists() else []
    done = {row["seed"]: row for row in map(json.loads, rows)}
    for seed in range(first, last + 1):
        if seed in done:
            continue
        folder = Path(tempfile.mkdtemp(prefix="resumes"))
        try:
            (result,) = run([seed], folder)
        except Exception as error:  # noqa: BLE001 - a rank was killed
            result = Result("FAILED", f"{type(error).__name__}: {error}"[-400:])
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        row = {**result._asdict(), **draw(seed)._asdict()}
        done[seed] = row
        with options.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(seed, result.outcome, result.text, flush=True)
    counts = Counter(row["outcome"] for seed, row in done.items() if first <= seed <= last)
    print(dict(counts))
    sys.exit(bool(counts["SILENT"] + counts["FAILED"]))


if __name__ == "__main__":
    main()
