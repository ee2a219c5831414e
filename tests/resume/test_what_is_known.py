"""What a resume restores of loaders, samplers, callbacks and optimizers, and what it names."""

from __future__ import annotations

import multiprocessing
import random
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Checkpoint,
    EarlyStopping,
    GradientAccumulationScheduler,
)
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    TensorDataset,
)
from torch.utils.data.distributed import DistributedSampler

from lightning_commfree import DistributedLion, DistributedLionStrategy, StreamingDiLoCoStrategy
from lightning_commfree.resume.loader_parts import private_generators, unknown_parts
from tests.fit.any_strategy import same
from tests.fit.models import Drawn, dataset, quiet_trainer
from tests.fit.saved import resume_words
from tests.resume.loaders import (
    Batches,
    ByEpoch,
    Counting,
    Halved,
    Harder,
    Noise,
    OwnStateful,
    SetsEpoch,
    Stateful,
)
from tests.world import run_ranks

BATCHES, BATCH, EPOCHS = 4, 2, 3
ROWS = BATCHES * BATCH
EXACT = "Resumed exactly: "


class Saves(pl.Callback):
    """Saves in a hook after some numbers of batches, in the middle and at the ends of epochs."""

    def __init__(self, folder: Path | None, *after: int) -> None:
        self.folder, self.after, self.batches = folder, after, 0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.batches = trainer.fit_loop.total_batch_idx + 1
        if self.folder is not None and self.batches in self.after:
            trainer.save_checkpoint(self.folder / f"{self.batches}.ckpt")

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if self.folder is not None and self.batches % BATCHES == 0:
            trainer.save_checkpoint(self.folder / f"end{self.batches}.ckpt")


class Average(pl.Callback):
    """A home-made average of the weights."""

    def __init__(self) -> None:
        self.mean: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        for name, p in module.named_parameters():
            old = self.mean.get(name, torch.zeros_like(p))
            self.mean[name] = 0.9 * old + 0.1 * p.detach()

    def state_dict(self) -> dict[str, Any]:
        return {"mean": {**self.mean}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean = {**state["mean"]}


class Thaws(BaseFinetuning):
    """Trains the layer `base` from the second epoch on."""

    def freeze_before_training(self, module: pl.LightningModule) -> None:
        self.freeze(module.base)

    def finetune_function(self, module: pl.LightningModule, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.base, optimizer, lr=5e-3)


class Net(pl.LightningModule):
    """Notes what it is trained on."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.base, self.head, self.kind = nn.Linear(3, 3), nn.Linear(3, 1), optimizer
        self.seen: list[Any] = []

    def training_step(self, batch: Any, _: int) -> Tensor:
        parts = batch if isinstance(batch[0], list | tuple) else [batch]
        self.seen.append([x.double().sum().item() for x, _ in parts])
        return sum(nn.functional.mse_loss(self.head(self.base(x)), y) for x, y in parts)

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        if self.kind == "lion":
            return DistributedLion(trained, lr=0.01)
        return getattr(torch.optim, self.kind)(trained, lr=0.01)


def plain(**kwargs: Any) -> DataLoader[Any]:
    return DataLoader(dataset(ROWS), BATCH, **kwargs)


def own_generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def drawn() -> Drawn:
    def draw(numbers: torch.Generator) -> list[Tensor]:
        return [torch.randn(BATCH, width, generator=numbers) for width in (3, 1)]

    return Drawn(draw, BATCHES, seed=3)


def noise(numbers: torch.Generator | None = None) -> Noise:
    return Noise(dataset(ROWS), numbers)


def shuffled_noise() -> DataLoader[Any]:
    return DataLoader(noise(), BATCH, shuffle=True)


def batches_of_rows() -> list[tuple[Tensor, Tensor]]:
    return [*DataLoader(dataset(ROWS), BATCH)]


class Looks(pl.Callback):
    """Reads a batch for itself, as callbacks that log some images do."""

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        next(iter(trainer.train_dataloader))

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step % BATCHES == 1:
            next(iter(trainer.train_dataloader))


def augmented(**kwargs: Any) -> DataLoader[Any]:
    return DataLoader(noise(), BATCH, num_workers=1, **kwargs)


def seeded(kind: type[DataLoader[Any]], rows: Any = None) -> DataLoader[Any]:
    """A loader whose sampler has a generator of its own, as torchdata's shuffling ones have."""
    rows = dataset(ROWS) if rows is None else rows
    return kind(rows, BATCH, sampler=RandomSampler(rows, generator=own_generator()))


def of_batches(batches: Any) -> Any:
    owners = [batches] if hasattr(batches, "set_epoch") else []
    return DataLoader(dataset(ROWS), batch_sampler=batches), SetsEpoch(*owners)


def with_set_epoch(data: Any, **kwargs: Any) -> Any:
    made = data if isinstance(data, ByEpoch) else DataLoader(data, BATCH, **kwargs)
    return made, SetsEpoch(data)


OWN = {"use_distributed_sampler": False}
# what is trained on: makes a loader, or that and a callback; then settings of the Trainer
LOADERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "stateful": (lambda: Stateful(dataset(ROWS), BATCH, shuffle=True), {}),
    "stateful, part of its data": (
        lambda: Stateful(dataset(2 * ROWS), BATCH, shuffle=True),
        {"limit_train_batches": BATCHES, **OWN},
    ),
    "stateful, shuffled globally": (lambda: Stateful(dataset(ROWS), BATCH, shuffle=True), OWN),
    "stateful, own generator": (lambda: seeded(Stateful), {}),
    "own generator": (lambda: seeded(DataLoader), {}),
    "generator of the data": (
        lambda: DataLoader(Noise(dataset(ROWS), own_generator()), BATCH),
        OWN,
    ),
    "two": (lambda: CombinedLoader([drawn(), plain(shuffle=True)]), OWN),
    "two stateful": (lambda: CombinedLoader([drawn(), seeded(Stateful)], "max_size_cycle"), OWN),
    "epoch of the batches": (lambda: of_batches(Batches(ROWS, BATCH)), OWN),
    "epochs that are counted": (lambda: of_batches(Counting(ROWS, BATCH)), OWN),
    "epoch of the data": (lambda: with_set_epoch(Harder(dataset(ROWS))), OWN),
    "epoch of the data in workers": (
        lambda: with_set_epoch(Harder(dataset(ROWS)), num_workers=1),
        OWN,
    ),
    "epoch of the loader": (lambda: with_set_epoch(ByEpoch(dataset(ROWS), BATCH)), OWN),
    "workers": (lambda: plain(shuffle=True, num_workers=1), OWN),
    "generator": (lambda: Halved(dataset(ROWS), BATCH, shuffle=True), {}),
    "generator, shuffled globally": (lambda: Halved(dataset(ROWS), BATCH, shuffle=True), OWN),
    "two that augment": (lambda: CombinedLoader([shuffled_noise(), shuffled_noise()]), OWN),
    "looked at by the user": (lambda: (plain(shuffle=True, num_workers=1), Looks()), OWN),
    "indices in the order of a sampler": (
        lambda: DataLoader(batches_of_rows(), batch_size=None, shuffle=True),
        OWN,
    ),
}
FOR_LION = ("stateful", "two", "epoch of the batches")  # the strategies share their restore
AFTER = (1, BATCHES + 2)


def fit(made: Any, folder: Path | None, *more: Any, optimizer: str = "AdamW", **kwargs: Any) -> Any:
    """Train; return what was seen, the state at the end, and what a resume said of itself."""
    data, *own = made if isinstance(made, tuple) else (made,)
    path = kwargs.pop("ckpt_path", None)
    torch.manual_seed(5 if path is None else 99)
    strategy = (
        DistributedLionStrategy()
        if optimizer == "lion"
        else StreamingDiLoCoStrategy(sync_every=3, num_fragments=1)
    )
    kind = kwargs.pop("kind", Net)
    callbacks = kwargs.pop("callbacks", None) or [*own, *more, Saves(folder, *AFTER)]
    trainer = quiet_trainer(
        strategy=strategy, devices=1, max_epochs=EPOCHS, callbacks=callbacks, **kwargs
    )
    module = kind(optimizer)
    with resume_words() as said:
        trainer.fit(module, data, ckpt_path=path)
    end = [module.state_dict(), *(one.state_dict()["state"] for one in trainer.optimizers)]
    return module.seen, end, " ".join(said)


def resumes(rank: int, size: int, folder: Path, cases: dict[str, Any], **kwargs: Any) -> Any:
    """Return by case and save: whether it is as uninterrupted, and what was said."""
    # loaders' workers are its children
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    found: dict[str, Any] = {}
    for case, (make, settings) in cases.items():
        settings = {**kwargs, **settings}
        seen, end, _ = fit(make(), folder / case, **settings)
        saves = sorted((folder / case).glob("*.ckpt"))
        assert len(saves) == len(AFTER) + EPOCHS
        for path in saves:
            done = int(path.stem.removeprefix("end"))
            if done == BATCHES * EPOCHS:  # nothing is left
                continue
            again, its_end, said = fit(make(), None, ckpt_path=path, **settings)
            found[f"{case}, {path.stem}"] = again == seen[done:] and same(its_end, end), said
    return found


def wrong(found: dict[str, Any]) -> list[str]:
    return [f"{case}: {said}" for case, (is_same, said) in found.items() if not is_same]


@pytest.mark.parametrize("optimizer", ["AdamW", "lion"])
def test_every_kind_of_loader_goes_on_where_it_was(optimizer: str, tmp_path: Path) -> None:
    """At the end of an epoch a stateful loader is at its end, and would train no batch."""
    some = LOADERS if optimizer != "lion" else {name: LOADERS[name] for name in FOR_LION}

    def play(rank: int, size: int) -> Any:
        return resumes(rank, size, tmp_path / "saves", some, optimizer=optimizer)

    (found,) = run_ranks(play, 1, tmp_path)
    assert len(found) == 4 * len(some)
    assert not wrong(found)
    assert not [said for _, said in found.values() if not said.startswith("Restored on all ranks")]


def test_torchdatas_own_loader_goes_on_where_it_was(tmp_path: Path) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    kind = torchdata.StatefulDataLoader
    cases = {
        "shuffled": (lambda: kind(dataset(ROWS), BATCH, shuffle=True), {}),
        "in order": (lambda: kind(dataset(ROWS), BATCH), {}),
        "workers": (lambda: kind(dataset(ROWS), BATCH, shuffle=True, num_workers=1), OWN),
        "two": (lambda: CombinedLoader([kind(dataset(ROWS), BATCH), plain(shuffle=True)]), OWN),
    }

    def play(rank: int, size: int) -> Any:
        return resumes(rank, size, tmp_path / "saves", cases)

    (found,) = run_ranks(play, 1, tmp_path)
    assert not wrong(found)


@pytest.mark.parametrize("optimizer", ["AdamW", "lion"])
def test_what_callbacks_change_in_a_fit_comes_back(optimizer: str, tmp_path: Path) -> None:
    """Their hooks at the start of an epoch do not run in a fit that resumes in its middle."""

    def with_callback(make: Any) -> Any:
        return lambda: (plain(shuffle=True), make())

    schedule = {0: 1, 1: 2, 2: 3}
    cases = {
        "accumulation": (with_callback(lambda: GradientAccumulationScheduler(schedule)), {}),
        "frozen": (with_callback(Thaws), {}),
    }

    def play(rank: int, size: int) -> Any:
        return resumes(rank, size, tmp_path / "saves", cases, optimizer=optimizer)

    (found,) = run_ranks(play, 1, tmp_path)
    assert not wrong(found)


def test_another_accumulation_is_kept_and_named(tmp_path: Path) -> None:
    def play(rank: int, size: int) -> Any:
        fit(plain(), tmp_path / "saves", accumulate_grad_batches=2)
        path = tmp_path / "saves" / f"end{BATCHES}.ckpt"
        return fit(plain(), None, accumulate_grad_batches=4, ckpt_path=path)[2]

    (said,) = run_ranks(play, 1, tmp_path)
    assert "not resumed exactly: `accumulate_grad_batches` was 2 and is 4" in said


@pytest.mark.parametrize("optimizer", ["NAdam", "ASGD"])
def test_optimizer_states_are_not_rounded_to_bf16(optimizer: str, tmp_path: Path) -> None:
    """NAdam's `mu_product` and ASGD's `eta` have 32 bits, whatever the parameters have."""
    cases = {optimizer: (lambda: plain(shuffle=True), {"precision": "bf16-true"})}

    def play(rank: int, size: int) -> Any:
        return resumes(rank, size, tmp_path / "saves", cases, optimizer=optimizer)

    (found,) = run_ranks(play, 1, tmp_path)
    assert not wrong(found)


@pytest.mark.parametrize("saver_is_last", [True, False])
def test_a_hook_that_runs_after_the_save_is_named(saver_is_last: bool, tmp_path: Path) -> None:
    def averaged(path: Path | None) -> tuple[Average, str]:
        average, saves = Average(), Saves(tmp_path / "saves", 2)
        order = [average, saves] if saver_is_last else [saves, average]
        said = fit(plain(), None, callbacks=order, ckpt_path=path)[2]
        return average, said

    def play(rank: int, size: int) -> Any:
        (saved, _), (resumed, said) = averaged(None), averaged(tmp_path / "saves" / "2.ckpt")
        return all(torch.equal(saved.mean[k], resumed.mean[k]) for k in saved.mean), said

    ((is_same, said),) = run_ranks(play, 1, tmp_path)
    assert is_same == saver_is_last
    lost = "not resumed exactly: `Average.on_train_batch_end` does not run for the last batch"
    assert (lost in said) == (not saver_is_last)
    assert "callback `Average`" in said


class SavesLast(Saves, Checkpoint):
    """Lightning runs it after all others."""


@pytest.mark.parametrize("saver", [Saves, SavesLast])
def test_an_epochs_end_that_comes_after_the_save_is_named(
    saver: type[Saves], tmp_path: Path
) -> None:
    """Lightning calls `EarlyStopping` after the module, wherever it stands among the callbacks."""

    def end(path: Path | None) -> str:
        stops = EarlyStopping("loss", strict=False, check_on_train_epoch_end=True)
        callbacks = [stops, saver(tmp_path / "saves")]
        on = {"callbacks": callbacks, "enable_checkpointing": True}
        return fit(plain(), None, ckpt_path=path, **on)[2]

    def play(rank: int, size: int) -> str:
        end(None)
        return end(tmp_path / "saves" / f"end{BATCHES}.ckpt")

    (said,) = run_ranks(play, 1, tmp_path)
    lost = "`EarlyStopping.on_train_epoch_end` does not run for the last epoch before the save"
    assert (lost in said) == (saver is Saves)


def test_random_numbers_of_workers_are_named(tmp_path: Path) -> None:
    """Those of persistent workers go on from epoch to epoch, and end with them."""
    cases = {
        "new": (lambda: augmented(shuffle=True), OWN),
        "persistent": (lambda: augmented(shuffle=True, persistent_workers=True), OWN),
    }

    def play(rank: int, size: int) -> Any:
        return resumes(rank, size, tmp_path / "saves", cases)

    (found,) = run_ranks(play, 1, tmp_path)
    for save, (is_same, said) in found.items():
        kind, place = save.split(", ")
        at_end = place.startswith("end")
        assert is_same == (at_end and kind == "new"), "else the message would be wrong"
        assert ("random numbers that `Noise` draws in worker processes" in said) == (not at_end)
        assert ("persistent workers" in said) == (kind == "persistent" and place != "1")


class Reads(Dataset[Any]):
    """Notes the rows that are read, and counts them for its own use."""

    def __init__(self) -> None:
        self.rows, self.read, self.count = dataset(ROWS), list[int](), 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        self.count += self.counts
        return self.rows[index]

    counts = False


class Counts(Reads):
    counts = True


def test_batches_that_were_trained_on_are_not_read_again(tmp_path: Path) -> None:
    """A data set that depends on how often it is read is named."""

    def play(rank: int, size: int) -> Any:
        found = {}
        for kind in (Reads, Counts):
            made = {
                "shuffled": lambda data: DataLoader(data, BATCH, shuffle=True),
                "batches": lambda data: DataLoader(data, batch_sampler=Counting(ROWS, BATCH)),
            }
            for name, make in made.items():
                data, again = kind(), kind()
                loader = make(again)
                fit(make(data), tmp_path / f"{name} {kind.__name__}", **OWN)
                path = tmp_path / f"{name} {kind.__name__}" / f"{AFTER[1]}.ckpt"
                said = fit(loader, None, ckpt_path=path, **OWN)[2]
                touched = "_get_iterator" in vars(loader)
                found[name, kind] = again.read == data.read[AFTER[1] * BATCH :], said, touched
        return found

    (found,) = run_ranks(play, 1, tmp_path)
    for (_, kind), (unread, said, touched) in found.items():
        assert unread
        assert not touched, "the fit has left the loader as it was"
        assert ("exactly: `Counts.count` changes as rows are read" in said) == (kind is Counts)


class Stream(IterableDataset[Any]):
    """Rows in their order, without a length or a state."""

    def __iter__(self) -> Any:
        return iter(dataset(ROWS))


def test_a_stream_without_a_state_is_read_up_to_its_position(tmp_path: Path) -> None:
    cases = {"stream": (lambda: DataLoader(Stream(), BATCH), {})}

    def play(rank: int, size: int) -> Any:
        return resumes(rank, size, tmp_path / "saves", cases)

    (found,) = run_ranks(play, 1, tmp_path)
    assert not wrong(found)
    assert all("only you know its state: data set `Stream`" in said for _, said in found.values())


def test_only_what_is_known_is_called_exact(tmp_path: Path) -> None:
    """An unknown loader with the state of torchdata's still trains whole epochs."""

    def play(rank: int, size: int) -> Any:
        made = {"known": plain, "unknown": lambda: OwnStateful(dataset(ROWS), BATCH)}
        found = {}
        for name, make in made.items():
            fit(make(), tmp_path / name)
            path = tmp_path / name / f"end{BATCHES}.ckpt"
            quiet = [pl.callbacks.Timer()]
            seen, _, said = fit(make(), None, callbacks=quiet, ckpt_path=path)
            found[name] = len(seen), said
        return found

    (found,) = run_ranks(play, 1, tmp_path)
    (known, exact), (unknown, said) = found["known"], found["unknown"]
    assert known == unknown == BATCHES * (EPOCHS - 1)
    assert exact.startswith(EXACT)
    assert "exact" not in said.lower()
    assert said.endswith("Not verified, because only you know its state: loader `OwnStateful`.")


class Guessing(RandomSampler):
    """Of an unknown author."""


class Staged(TensorDataset):
    def set_epoch(self, epoch: int) -> None:
        """Changes whatever it likes."""


def of(**kwargs: Any) -> list[str]:
    made = {"dataset": dataset(ROWS), "batch_size": BATCH, **kwargs}
    return unknown_parts(DataLoader(**made), batches=3, epoch=1)


def test_parts_of_unknown_authors_are_named() -> None:
    assert of() == of(shuffle=True) == of(dataset=noise()) == []
    assert of(sampler=Guessing(dataset(ROWS))) == ["sampler `Guessing`"]
    assert of(sampler=BatchSampler(Guessing(dataset(ROWS)), 1, False)) == ["sampler `Guessing`"]
    assert of(dataset=Staged(torch.ones(8))) == ["data set `Staged`"]
    assert of(dataset=ConcatDataset([Staged(torch.ones(4))] * 2)) == ["data set `Staged`"]
    assert of(num_workers=1, persistent_workers=True) == [
        "random numbers and other state of persistent workers"
    ]
    draws = "random numbers that `{}` draws in worker processes"
    assert of(dataset=noise(), num_workers=1) == [draws.format("Noise")]
    assert of(collate_fn=of, num_workers=1) == [draws.format("of")]
    assert of(collate_fn=of) == []
    assert of(num_workers=1, in_order=False) == ["the order of a loader with `in_order=False`"]
    assert of(batch_size=ROWS) == [
        "the order of `DataLoader`, which started again within the epoch"
    ]
    assert unknown_parts(drawn(), 1, 0) == ["loader `Drawn`"]


class Transformed(TensorDataset):
    """Its transform draws random numbers."""

    def __init__(self, transform: Any) -> None:
        super().__init__(torch.ones(8))
        self.transform = transform


def drawing(generator: Any) -> Any:
    """Return a function that draws from a generator."""

    def collate(rows: Any) -> Any:
        return rows, generator

    return collate


@pytest.mark.parametrize(
    "generator", [random.Random(1), np.random.default_rng(1), torch.Generator()], ids=type
)
def test_random_numbers_deep_in_the_data_are_named(generator: Any) -> None:
    within = [Transformed([{"crop": SimpleNamespace(random=generator)}]), Transformed(len)]
    assert private_generators(DataLoader(within[0])) == ["Transformed"]
    assert private_generators(DataLoader(within[1])) == []
    assert private_generators(DataLoader(within[1], collate_fn=drawing(generator))) == ["collate"]
    assert private_generators(DataLoader(within[1], collate_fn=partial(len, generator))) == [
        "partial"
    ]
    # workers draw from copies, which are made anew for each epoch: `unknown_parts` names them
    assert private_generators(DataLoader(within[0], num_workers=1)) == []


class Curriculum(Net):
    def on_train_epoch_start(self) -> None:
        self.stage = self.current_epoch


def test_other_sizes_and_hooks_that_do_not_run_again_are_named(tmp_path: Path) -> None:
    def play(rank: int, size: int) -> Any:
        fit(plain(), tmp_path / "saves")
        middle = next(n for n in AFTER if n % BATCHES)
        path = tmp_path / "saves" / f"{middle}.ckpt"

        def words(loader: Any, **kwargs: Any) -> str:
            quiet = [pl.callbacks.Timer()]
            said: str = fit(loader, None, callbacks=quiet, ckpt_path=path, **kwargs)[2]
            return said

        twice = DataLoader(dataset(ROWS), 2 * BATCH)
        seeded = DataLoader(
            dataset(ROWS), BATCH, sampler=DistributedSampler(dataset(ROWS), 1, 0, seed=3)
        )
        return words(plain()), words(twice), words(seeded), words(plain(), kind=Curriculum)

    ((same_size, other, reseeded, staged),) = run_ranks(play, 1, tmp_path)
    assert same_size.startswith(EXACT)
    assert f"samplers' seeds ([[{ROWS // (2 * BATCH)}, {2 * BATCH}, 0]]) than at the" in other
    assert f"samplers' seeds ([[{ROWS // BATCH}, {BATCH}, 3]]) than at the save" in reseeded
    assert "what `Curriculum.on_train_epoch_start` has set" in staged
    assert "exact" not in staged.lower()
