"""A resumed fit does what the saved one did after the save, also around the borders of epochs: the
same batches, validations and hooks in the same order, with the same weights and random numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_commfree import DistributedLion, DistributedLionStrategy, StreamingDiLoCoStrategy
from lightning_commfree.comm.digest import digest
from tests.fit.models import Drawn, Noisy, dataset, quiet_trainer
from tests.fit.saved import resume_warnings
from tests.world import run_ranks

BATCHES, EPOCHS = 4, 3
SAVES = (  # hook, global step
    ("on_train_epoch_start", 0),
    ("on_train_batch_end", 2),
    ("on_validation_end", 2),
    ("on_train_batch_end", 4),
    ("on_validation_end", 4),
    ("on_train_epoch_end", 4),
    ("on_train_epoch_start", 4),
    ("on_train_epoch_end", 6),  # of a fit that ends there
    ("on_train_batch_end", 7),
    ("on_train_epoch_end", 8),
)


class Rude(Noisy):
    """Draws from the global generator wherever it can."""

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("val_loss", self.loss(batch) + torch.rand(()), batch_size=len(batch[0]))

    def on_train_epoch_start(self) -> None:
        torch.rand(3)

    def on_train_epoch_end(self) -> None:
        torch.rand(5)


class Voter(Rude):
    def configure_optimizers(self) -> Any:
        return DistributedLion(self.parameters(), lr=0.02)


class Calm(Voter):
    def on_train_epoch_end(self) -> None:
        """Draws nothing that a longer fit would not draw."""


class Told(Rude):
    """The learning rate follows a metric, which a resumed fit does not know."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        self.log("mean", float(self.global_step), on_step=False, on_epoch=True)
        return super().training_step(batch, index)

    def on_train_batch_end(self, *_: Any) -> None:
        """A resumed fit does not repeat this hook."""

    def configure_optimizers(self) -> Any:
        return {**plateau_of(super().configure_optimizers()), "monitor": "mean"}


def plateau_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "min", 0.5, patience=0)
    return {"optimizer": optimizer, "lr_scheduler": plateau}


class Saver(Checkpoint):
    """Saves in the given hooks, where Lightning lets a `ModelCheckpoint` do it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _save(self, hook: str, trainer: pl.Trainer) -> None:
        path = self.folder / f"{hook}-{trainer.global_step}.ckpt"
        # the first batch with this step is the one that took it
        if (hook, trainer.global_step) in SAVES and not (trainer.sanity_checking or path.exists()):
            trainer.save_checkpoint(path)

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._save("on_train_epoch_start", trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._save("on_train_batch_end", trainer)

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._save("on_validation_end", trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._save("on_train_epoch_end", trainer)


class Diary(pl.Callback):
    """Records every hook with the state that an exact resume must have there."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def _note(self, hook: str, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        state = [digest(p.detach()) for p in pl_module.parameters()]
        state.append(digest(torch.get_rng_state()))
        lr = trainer.optimizers[0].param_groups[0]["lr"]
        place = trainer.global_step, trainer.current_epoch
        self.events.append((hook, *place, lr, *(int(value) for value in state)))

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._note("on_train_epoch_start", trainer, pl_module)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        self._note("on_train_batch_end", trainer, pl_module)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._note("on_validation_end", trainer, pl_module)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._note("on_train_epoch_end", trainer, pl_module)

    def after(self, hook: str, step: int) -> list[tuple[Any, ...]]:
        """Return what came after a save in this hook.

        An epoch that was about to begin runs from its first hook again.
        """
        index = [event[:2] for event in self.events].index((hook, step))
        return self.events[index + (hook != "on_train_epoch_start") :]


def shuffled() -> DataLoader[Any]:
    return DataLoader(dataset(2 * BATCHES), batch_size=2, shuffle=True)


def draw(random: torch.Generator) -> list[Tensor]:
    return [torch.randn(2, width, generator=random) for width in (3, 1)]


class Eager(Drawn):
    """Draws an epoch's order from its own generator when it is asked for the epoch's iterator."""

    begun = False

    def __iter__(self) -> Any:
        if not self.begun or self.done == self.batches:
            torch.randperm(4, generator=self.random)
        self.begun = True
        return super().__iter__()

    def state_dict(self) -> dict[str, Any]:
        return {"begun": self.begun, **super().state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begun = state["begun"]
        super().load_state_dict(state)


class Unsized(Drawn):
    """A stream, of which Lightning reads a batch ahead to find out which is the last."""

    over = True

    def __len__(self) -> int:
        raise TypeError("a stream has no length")

    def __iter__(self) -> Any:
        self.done, self.over = 0 if self.over else self.done, False
        while self.done < self.batches:
            self.done += 1
            yield self.draw(self.random)
        self.over = True

    def state_dict(self) -> dict[str, Any]:
        return {"over": self.over, **super().state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.over = state["over"]
        super().load_state_dict(state)


STEPS = {"max_steps": BATCHES * EPOCHS}
EPOCHS_ONLY = {"max_epochs": EPOCHS}
CASES: dict[str, dict[str, Any]] = {
    "epochs": EPOCHS_ONLY,
    "validation twice": {"validation": True, "val_check_interval": 0.5, **EPOCHS_ONLY},
    "own place": {"validation": True, "data": lambda: Eager(draw, BATCHES, 3), **EPOCHS_ONLY},
    "reloaded": {"reload_dataloaders_every_n_epochs": 1, **EPOCHS_ONLY},
    "unsized": {"data": lambda: Unsized(draw, BATCHES, 3), **EPOCHS_ONLY},
    "accumulated": {"validation": True, "accumulate_grad_batches": 2, "max_epochs": 4},
    "lion": {"validation": True, "module": Voter, **STEPS},
}


def fit(
    folder: Path,
    ckpt_path: Path | None = None,
    module: type[Rude] = Rude,
    data: Any = shuffled,
    validation: bool = False,
    **kwargs: Any,
) -> Diary:
    if issubclass(module, Voter):
        strategy: Any = DistributedLionStrategy()
    else:
        strategy = StreamingDiLoCoStrategy(sync_every=3, num_fragments=3)
    diary = Diary()
    kwargs |= {"callbacks": [Saver(folder), diary], "enable_checkpointing": True}
    trainer = quiet_trainer(strategy=strategy, devices=1, **kwargs)
    val = DataLoader(dataset(6), batch_size=2) if validation else None
    made = module()
    torch.manual_seed(0 if ckpt_path is None else 99)  # making a model has set one
    trainer.fit(made, data(), val, ckpt_path=ckpt_path)
    return diary


def resume_all(rank: int, size: int, folder: Path, case: str) -> Any:
    settings = CASES[case]
    straight = fit(folder / "straight", **settings)
    found = {}
    for hook, step in SAVES:
        path = folder / "straight" / f"{hook}-{step}.ckpt"
        if path.exists():
            resumed = fit(folder / path.stem, path, **settings)
            found[f"{hook} {step}"] = resumed.events, straight.after(hook, step)
    # what a resumed fit saves is as good
    for hook in ("on_train_batch_end", "on_train_epoch_end"):
        path = folder / f"{hook}-4" / "on_train_batch_end-7.ckpt"
        if path.exists():
            again = fit(folder / "again" / hook, path, **settings)
            expected = straight.after("on_train_batch_end", 7)
            found[f"{hook} 4, then on_train_batch_end 7"] = again.events, expected
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_fit_repeats_every_hook_after_the_save(case: str, tmp_path: Path) -> None:
    (found,) = run_ranks(resume_all, 1, tmp_path, tmp_path, case)
    assert len(found) >= 7
    wrong = [name for name, (events, expected) in found.items() if events != expected]
    for events, expected in (found[name] for name in wrong):
        print([event[:3] for event in events], [event[:3] for event in expected], sep="\n")
    assert not wrong


def taken_up_again(rank: int, size: int, folder: Path) -> Any:
    straight = fit(folder / "straight", module=Calm, **STEPS)
    fit(folder / "short", module=Calm, max_steps=6)
    path = folder / "short" / "on_train_epoch_end-6.ckpt"
    again = fit(folder / "again", path, module=Calm, **STEPS)
    return again.events, straight.after("on_train_batch_end", 6)


def test_a_fit_that_ended_within_an_epoch_resumes_within_it(tmp_path: Path) -> None:
    ((events, expected),) = run_ranks(taken_up_again, 1, tmp_path, tmp_path)
    assert events == expected


def warned(rank: int, size: int, folder: Path) -> Any:
    straight = fit(folder / "straight", module=Told, **EPOCHS_ONLY)
    found = {}
    saves = (("on_train_epoch_start", 4), ("on_train_batch_end", 7), ("on_train_epoch_end", 8))
    for hook, step in saves:
        path = folder / "straight" / f"{hook}-{step}.ckpt"
        with resume_warnings() as said:
            resumed = fit(folder / path.stem, path, module=Told, **EPOCHS_ONLY)
        found[hook, step] = said, resumed.events, straight.after(hook, step)
    return found


def test_one_warning_names_everything_that_is_not_restored(tmp_path: Path) -> None:
    (found,) = run_ranks(warned, 1, tmp_path, tmp_path)
    for hook, step in found:
        said, events, expected = found[hook, step]
        assert [event[:3] for event in events] == [event[:3] for event in expected]
        if hook == "on_train_epoch_start":
            assert not said
            assert events == expected
            continue
        (text,) = said
        assert text.startswith("Training was not resumed exactly: ")
        assert "the scheduler that monitors 'mean' skips one step" in text
        own_hook = "`Told.on_train_batch_end` does not run for the last batch before the save"
        assert (own_hook in text) == (hook == "on_train_batch_end")
