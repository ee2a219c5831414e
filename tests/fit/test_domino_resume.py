"""A resumed Domino fit is exact to the bit, with every rank's data and random numbers; in other
groups it continues from the same weights, and a message names the state that starts afresh."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_commfree import DominoTPStrategy
from tests.fit.causal_lm import LENGTH, WORDS, CausalLM, words
from tests.fit.models import Drawn, Recorder, SavesAfterBatches, quiet_trainer
from tests.fit.saved import file_of, part_of, resume_warnings
from tests.world import run_ranks

EPOCH_STEPS = 3
STEPS = 2 * EPOCH_STEPS
SIZE, GROUP = 4, 2
ROWS = 2  # of a batch


class Told(CausalLM):
    """Keeps the batches; drops out everywhere, in attention by each rank's own random numbers."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__(dropout=dropout)
        self.batches: list[Tensor] = []

    def training_step(self, batch: Any, i: int) -> Tensor:
        self.batches.append(batch[0].clone())
        return super().training_step(batch, i)


class Later(Told):
    """Its model is built on the meta device, by every rank."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.config = self.wrapped["lm"].config
        del self.wrapped["lm"]

    def configure_model(self) -> None:
        if "lm" not in self.wrapped:
            from transformers import GPT2LMHeadModel

            with torch.device("meta"):
                self.wrapped["lm"] = GPT2LMHeadModel(self.config)


def drawn(seed: int) -> Drawn:
    def draw(random: torch.Generator) -> list[Tensor]:
        return [torch.randint(0, WORDS, (ROWS, LENGTH), generator=random)]

    return Drawn(draw, EPOCH_STEPS, seed)


def shuffled(groups: int) -> DataLoader[Any]:
    """Lightning puts its own sampler in."""
    return DataLoader(words(EPOCH_STEPS * ROWS * groups), batch_size=ROWS, shuffle=True)


def fit(folder: Path, data: Any, module: Told | None = None, **kwargs: Any) -> Any:
    recorder, straight = Recorder(), "ckpt_path" not in kwargs
    extra = kwargs.pop("extra", [])
    save = ModelCheckpoint(
        folder, "{step}", save_top_k=-1, every_n_train_steps=1, save_on_train_epoch_end=False
    )
    trainer = quiet_trainer(
        strategy=DominoTPStrategy(kwargs.pop("group", GROUP)),
        devices=kwargs.pop("size", SIZE),
        enable_checkpointing=straight,
        callbacks=[recorder, *extra, save] if straight else [recorder],
        max_epochs=2,
        accumulate_grad_batches=kwargs.pop("accumulate", 1),
    )
    module = module or Told()
    torch.manual_seed(kwargs.pop("seed", 0))  # making a model has set one
    with resume_warnings() as said:
        trainer.fit(module, data, **kwargs)
    return recorder.local, module.batches, said


LOADERS = {
    "shuffled": lambda rank: shuffled(SIZE // GROUP),
    "drawn": lambda rank: drawn(rank // GROUP),
}
STOPS = {"shuffled": (1, 3, 5), "drawn": (2,)}  # 3: the end of an epoch


def resume(rank: int, folder: Path, kind: str, step: int) -> Any:
    path = folder / kind / f"step={step}.ckpt"
    # what else happened in the new process must not matter
    return fit(folder / f"{kind}_{step}", LOADERS[kind](rank), ckpt_path=path, seed=step)


def straight_and_resumed(rank: int, size: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind, make in LOADERS.items():
        straight = fit(folder / kind, make(rank), seed=50 + rank)
        found[kind] = straight, {step: resume(rank, folder, kind, step) for step in STOPS[kind]}
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(straight_and_resumed, SIZE, folder, folder)


def equal(got: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> bool:
    """Whether all parameters of all steps are, bit for bit."""
    assert len(got) == len(expected)
    return all(
        torch.equal(ours[name], tensor)
        for ours, theirs in zip(got, expected, strict=True)
        for name, tensor in theirs.items()
    )


@pytest.mark.parametrize(("kind", "step"), [(kind, step) for kind in STOPS for step in STOPS[kind]])
def test_every_step_resumes_bit_for_bit(ranks: list[Any], kind: str, step: int) -> None:
    for found in ranks:
        (local, batches, _), resumed = found[kind]
        assert len(local) == STEPS
        got, got_batches, said = resumed[step]
        assert not said
        assert all(map(torch.equal, got_batches, batches[step:]))
        assert equal(got, local[step:])


def test_groups_differ_in_data_and_ranks_in_random_numbers(ranks: list[Any], folder: Path) -> None:
    """Else rank 0's state would do for all."""
    for kind in LOADERS:
        batches = [found[kind][0][1] for found in ranks]
        assert torch.equal(batches[0][0], batches[1][0])
        assert not torch.equal(batches[0][0], batches[2][0])
    path = folder / "shuffled" / "step=3.ckpt"
    own = [part_of(path, rank)["layout"]["random"][0][0] for rank in range(SIZE)]
    assert not torch.equal(own[0], own[1])


def test_ranks_files_are_small(ranks: list[Any], folder: Path) -> None:
    """The model and the optimizer are in the checkpoint, whole."""
    path = folder / "shuffled" / "step=3.ckpt"
    sizes = [file_of(path, rank).stat().st_size for rank in range(1, SIZE)]
    assert max(sizes) < 60_000
    assert part_of(path, 1)["optimizers"] is None
    assert torch.load(path, weights_only=True)["optimizer_states"][0]["state"]


def in_other_groups(rank: int, size: int, folder: Path) -> dict[str, Any]:
    path = folder / "shuffled" / "step=1.ckpt"
    again: dict[str, Any] = {"size": size, "ckpt_path": path}
    other = folder / "other"
    return {
        "two of one": fit(other / "1", shuffled(2), group=1, **again),
        "one of two": fit(other / "2", shuffled(1), group=2, **again),
        "plain": fit(other / "3", shuffled(1), Told(0.0), group=2, **again),
        "meta": fit(other / "4", shuffled(1), Later(), group=2, **again),
        "fresh": fit(other / "5", shuffled(1), Later(), group=2, size=size),
    }


@pytest.fixture(scope="module")
def others(ranks: list[Any], folder: Path) -> list[dict[str, Any]]:
    return run_ranks(in_other_groups, 2, folder, folder)


def test_a_resume_in_other_groups_keeps_data_and_optimizer_and_says_so(
    ranks: list[Any], others: list[Any]
) -> None:
    for rank, found in enumerate(others):
        (_, straight, _), _ = ranks[rank * GROUP]["shuffled"]
        _, batches, said = found["two of one"]
        assert all(map(torch.equal, batches, straight[1:])), "the same data from the same place"
        _, _, more = found["one of two"]
        if rank == 0:
            for text in (*said, *more):
                assert "it was saved by 4 ranks, but this fit has 2" in text
                assert "from the checkpoint's weights, with its optimizer state" in text
            assert "tensor_parallel_size was 2 and is 1" in said[0]
            assert "at the same position in the data. Random numbers that differ between" in said[0]
            assert (
                "The epoch's data, random numbers and the strategy's own state start over"
                in more[0]
            )


def test_a_model_on_meta_takes_a_checkpoint_or_fresh_values(others: list[Any]) -> None:
    for found in others:
        assert equal(found["meta"][0], found["plain"][0]), "no value of its own is left"
        fresh = found["fresh"][0]
        assert len(fresh) == STEPS
        assert all(tensor.isfinite().all() for tensor in fresh[-1].values())
        assert fresh[0]["wrapped.lm.transformer.h.0.attn.c_attn.weight"].std() < 0.04
    norm = "wrapped.lm.transformer.wpe.weight"
    assert torch.equal(*(found["fresh"][0][-1][norm] for found in others))


def half_a_step(rank: int, size: int, folder: Path) -> Any:
    """Steps are taken after batches 2 and 3 of an epoch."""
    accumulate, saves = {"accumulate": 2}, SavesAfterBatches(folder)
    straight, _, _ = fit(folder / "straight", shuffled(2), extra=[saves], **accumulate)
    found = {}
    for batches in (1, 2):
        path = folder / f"{batches}.ckpt"
        again = {"ckpt_path": path, "seed": batches, **accumulate}
        resumed, _, said = fit(folder / "again", shuffled(2), **again)
        found[batches] = resumed, straight[batches:], said, part_of(path, rank)["gradients"]
    other = fit(folder / "other", shuffled(4), group=1, ckpt_path=folder / "1.ckpt", **accumulate)
    return found, other[2]


def test_gradients_of_a_half_accumulated_step_come_back(tmp_path: Path) -> None:
    ranks = run_ranks(half_a_step, SIZE, tmp_path, tmp_path)
    for found, _ in ranks:
        for batches, (resumed, straight, said, kept) in found.items():
            assert not said
            assert equal(resumed, straight), f"resumed after batch {batches}"
            assert bool(kept) == (batches != 2)
    name = "wrapped.lm.transformer.h.0.attn.c_attn.weight"
    mine, *others = (found[1][3][name] for found, _ in ranks)
    assert all(part.shape == (16, 24) for part in (mine, *others)), "half of 48 outputs"
    assert not any(torch.equal(mine, other) for other in others), "every rank has its own"


def without_files(rank: int, size: int, folder: Path) -> Any:
    """Resume without the file of the first or the second rank of the second group."""
    found = {}
    for gone in (2, 3):
        path = folder / f"without_{gone}" / "step=5.ckpt"
        if rank == 0:
            shutil.copytree(folder / "shuffled", path.parent)
            file_of(path, gone).unlink()
        torch.distributed.barrier()
        found[gone] = fit(folder / "resumed", shuffled(SIZE // GROUP), ckpt_path=path)
    return found


def test_a_resume_without_a_ranks_file_names_the_lost_state(ranks: list[Any], folder: Path) -> None:
    for rank, found in enumerate(run_ranks(without_files, SIZE, folder, folder)):
        _, batches, _ = ranks[rank]["shuffled"][0]
        for gone, (local, got, said) in found.items():
            assert all(tensor.isfinite().all() for tensor in local[-1].values())
            if rank == 0:
                assert f"the rank files of rank {gone} in '.commfree/step=5.ckpt/5-" in said[0]
                assert "with its optimizer state" in said[0]
                assert ("at the same position in the data" in said[0]) == (gone == 3)
            same_place = len(got) == 1 and torch.equal(got[0], batches[5])
            assert same_place == (gone == 3)
