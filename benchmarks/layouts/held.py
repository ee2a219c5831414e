"""What a rank holds in a fit: its tensors' memory, and how far its resident memory rises."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import GPT2LMHeadModel
from typing_extensions import override

from benchmarks.common.fits import Module, Tokens, gpt2, loader, quiet_trainer
from benchmarks.sync_cost.job import outer_state
from lightning_commfree import FSDPSettings, StreamingDiLoCoStrategy, from_pretrained_on_meta
from lightning_commfree.model.blocks import block_names
from lightning_commfree.model.shards import own

STEPS, BATCH, TOKENS, VOCABULARY = 4, 2, 32, 4096
KINDS = ("parameters", "gradients", "optimizer", "outer")
BUILT, META, FOLDER, APART = "built", "meta", "folder", "apart"


class Late(Module):
    """Its model is made by the ranks, before it is divided.

    Args:
        make: the model.
        on_meta: whether it is made without values.
        begin: called first.
        done: called when the model has its values, this rank's part of them under FSDP.
        optimizer: makes the optimizer of the parameters.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        on_meta: bool,
        begin: Callable[[], None],
        done: Callable[[], None],
        optimizer: Callable[..., Optimizer] = torch.optim.AdamW,
    ) -> None:
        super().__init__(None, optimizer)
        self._make, self._on_meta = make, on_meta
        self._begin, self._done = begin, done

    @override
    def configure_model(self) -> None:
        if self.model is None:
            self._begin()
            with torch.device("meta" if self._on_meta else "cpu"):
                self.model = self._make()

    @override
    def configure_optimizers(self) -> Optimizer:
        self._done()
        return super().configure_optimizers()


class Peak:
    """How far the resident memory of this process rises between two moments."""

    def begin(self) -> None:
        """Let what is resident now be the highest."""
        Path("/proc/self/clear_refs").write_text("5")
        self._before = _highest_bytes()

    def growth(self) -> int:
        """Return by how many bytes it has been higher since."""
        return _highest_bytes() - self._before


def _highest_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError("/proc/self/status has no VmHWM: this takes Linux")


def held_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the memory of tensors, of parts this rank's own; a storage counts once."""
    storages = (own(tensor).untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def unit_bytes(module: nn.Module) -> Iterator[int]:
    """Yield the bytes of the whole parameters of every block, and of what stands in none."""
    whole = {p: p.numel() * p.element_size() for p in module.parameters()}
    for name in block_names(module):
        block = set(module.get_submodule(name).parameters())
        yield sum(whole.pop(p) for p in block)
    yield sum(whole.values())


class Count(pl.Callback):
    """Counts ahead of the last optimizer step, when everything has landed once.

    Attributes:
        found: bytes, by `KINDS`; and of the largest unit.
    """

    def __init__(self) -> None:
        self.found: dict[str, int] = {}

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        if trainer.global_step < STEPS - 1:
            return
        parameters: list[Tensor] = list(pl_module.parameters())
        states = [value for state in optimizer.state.values() for value in state.values()]
        assert isinstance(trainer.strategy, StreamingDiLoCoStrategy), "the one that `fit` has made"
        tensors: dict[str, list[Tensor]] = {
            "parameters": parameters,
            "gradients": [p.grad for p in parameters if p.grad is not None],
            "optimizer": [value for value in states if isinstance(value, Tensor)],
            "outer": outer_state(trainer.strategy.algorithm),
        }
        self.found = {kind: held_bytes(tensors[kind]) for kind in KINDS}
        self.found["largest_unit"] = max(unit_bytes(pl_module))


class Save(pl.Callback):
    """Writes a checkpoint after the last step: how far memory rises, and how long it takes."""

    def __init__(self, path: Path, peak: Peak) -> None:
        self._path, self._peak = path, peak
        self.growth, self.seconds = 0, 0.0

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if trainer.global_step == STEPS:
            dist.barrier()
            self._peak.begin()
            begun = time.perf_counter()
            trainer.save_checkpoint(self._path)
            self.seconds = time.perf_counter() - begun
            self.growth = self._peak.growth()


def every_row(plan: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Return what this rank held in every fit of `plan["rows"]`, one replica of all ranks each."""
    model = {key: plan[key] for key in ("layers", "width")}
    if any(" " in row for row in plan["rows"]):
        # a first fit loads what torch loads on demand: that is no row's
        _fit(plan["rows"][-1], plan["ranks"], {"layers": 2, "width": 16}, folder)
    return [_fit(row, plan["ranks"], model, folder) for row in plan["rows"]]


def _fit(row: str, ranks: int, model: dict[str, int], folder: Path) -> dict[str, Any]:
    """Train a replica: "INSIDE" counts; "INSIDE BUILT", META, FOLDER or APART has peaks.

    APART is META, whose checkpoint is a folder.
    """
    inside, _, how = row.partition(" ")
    peak, count, filled = Peak(), Count(), [0]
    save = Save(folder / f"{inside}_{how}.ckpt", peak)
    module: Module = Module(gpt2(VOCABULARY, TOKENS, **model))
    make: Callable[[], Any] = partial(gpt2, VOCABULARY, TOKENS, **model)
    if how == FOLDER:
        saved = folder / "model"
        make().save_pretrained(saved)  # rank 0, if there are several
        dist.barrier()
        make = partial(from_pretrained_on_meta, GPT2LMHeadModel, saved)
    if how:
        module = Late(
            make,
            how in (META, APART),
            peak.begin,
            lambda: filled.append(peak.growth()),
        )
    layout: Any = FSDPSettings(folder_above_bytes=0) if how == APART else inside
    strategy = StreamingDiLoCoStrategy(
        sync_every=2, overlap_steps=0, replica_size=ranks, inside=layout
    )
    callbacks: list[pl.Callback] = [save] if how else [count]
    trainer = quiet_trainer(strategy, 1, STEPS, callbacks, devices=ranks)
    trainer.fit(module, loader(Tokens(VOCABULARY, TOKENS), BATCH))
    found: dict[str, Any] = {"row": row, "error": None, **count.found}
    if how:
        units = list(unit_bytes(module))
        found |= {"fill": filled[-1], "save": save.growth, "model": sum(units)}
        found["save_s"] = save.seconds
        found["largest_unit"] = max(units)
        found["largest_tensor"] = max(p.numel() * p.element_size() for p in module.parameters())
    return found
