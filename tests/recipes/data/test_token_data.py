"""Who reads what: shares of the ranks, and a run resumed in the middle of an epoch."""

from __future__ import annotations

import json
from itertools import pairwise
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from recipes.data.corpus import MarkovChain
from recipes.data.token_data import TokenDataModule
from recipes.data.tokenizer import byte_tokenizer

BLOCK_SIZE = 16


@pytest.fixture
def make_data(tmp_path):
    # letters that are almost drawn at random: no two blocks are alike
    corpus = MarkovChain(26, 341 * BLOCK_SIZE, 50 * BLOCK_SIZE, concentration=10.0)

    def make(size=1, rank=0, **kwargs):
        settings = {"block_size": BLOCK_SIZE, "batch_size": 3, **kwargs}
        data = TokenDataModule(corpus, byte_tokenizer(), str(tmp_path / "cache"), **settings)
        shares = {"num_replicas": size, "rank": rank}
        data.trainer = SimpleNamespace(distributed_sampler_kwargs=shares if size > 1 else None)
        return data

    return make


def _rows(loader):
    return [tuple(row.tolist()) for batch in loader for row in batch]


@pytest.mark.parametrize("size", [1, 3])
def test_ranks_train_on_disjoint_blocks(make_data, size) -> None:
    shares = [_rows(make_data(size, rank).train_dataloader()) for rank in range(size)]
    assert len({len(share) for share in shares}) == 1, "all ranks take as many steps"
    everything = [row for share in shares for row in share]
    assert len(set(everything)) == len(everything)
    blocks = make_data().blocks("train")
    assert len(blocks) - len(everything) < 3 * size, "less than a batch per rank is left out"
    assert everything != sorted(everything), "in random order"


@pytest.mark.parametrize("size", [1, 4])
def test_every_validation_block_is_read_by_one_rank(make_data, size) -> None:
    blocks = make_data().blocks("validation")
    assert len(blocks) % 3, "shares that do not come out even are the point"
    shares = [_rows(make_data(size, rank).val_dataloader()) for rank in range(size)]
    everything = sorted(row for share in shares for row in share)
    assert everything == sorted(tuple(blocks[i].tolist()) for i in range(len(blocks)))


@pytest.mark.parametrize(
    ("split", "kwargs"),
    [("train", {"batch_size": 10**6}), ("validation", {"size": 10**6})],
)
def test_too_little_text_is_said_before_training(make_data, split, kwargs) -> None:
    data = make_data(**{"batch_size": 1, **kwargs}) if split == "train" else make_data(**kwargs)
    if split == "validation":
        data.batch_size = 0  # so that training text is not the first to run out
    with pytest.raises(ValueError, match=rf"The {split} split has \d+ blocks of 16 tokens"):
        data.setup("fit")


class Reader(pl.LightningModule):
    """Writes down every batch it is given; learns nothing."""

    def __init__(self, folder):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.folder = folder

    def training_step(self, batch, batch_idx):
        with (self.folder / f"rank{self.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps([self.current_epoch, batch.tolist()]) + "\n")
        return self.layer(torch.ones(1)).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


class SaveAt(pl.Callback):
    """Saves at the end of a step, where the recipe's checkpoints are saved too."""

    def __init__(self, path, step):
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


EPOCH = 5  # batches, by `limit_train_batches` or by the length of the text
LAST_STEP = 3 * EPOCH


@pytest.fixture
def read_batches(make_data, quiet_trainer, tmp_path):
    """Train to a step, maybe from a checkpoint; return what each rank read, in order."""

    def read(name, devices, steps, ckpt_path=None, callbacks=(), **kwargs):
        folder = tmp_path / name
        folder.mkdir()
        limit = kwargs.pop("limit_train_batches", EPOCH)
        data = make_data(**kwargs)
        data.trainer = None
        trainer = quiet_trainer(
            devices=devices,
            strategy="ddp_fork" if devices > 1 else "auto",
            max_steps=steps,
            max_epochs=-1,
            limit_train_batches=limit,
            callbacks=list(callbacks),
        )
        trainer.fit(Reader(folder), datamodule=data, ckpt_path=ckpt_path)
        files = sorted(folder.glob("rank*.jsonl"))
        return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]

    return read


def _assert_resumes(read_batches, tmp_path, devices, step, **kwargs) -> None:
    checkpoint = tmp_path / "saved.ckpt"
    whole = read_batches("whole", devices, LAST_STEP, **kwargs)
    killed_later = {"callbacks": [SaveAt(checkpoint, step)], **kwargs}
    before = read_batches("before", devices, step + 1, **killed_later)
    before = [rank[:step] for rank in before]
    after = read_batches("after", devices, LAST_STEP, ckpt_path=str(checkpoint), **kwargs)
    assert len(whole) == devices
    assert [len(rank) for rank in whole] == [LAST_STEP] * devices
    assert [first + second for first, second in zip(before, after, strict=True)] == whole
    for first, second in pairwise(rank[0][1] for rank in whole):
        assert first != second, "ranks read different batches"


@pytest.mark.parametrize(
    ("step", "limit", "batch_size"),
    # the text has 341 blocks, which are five batches of 64
    [(2, EPOCH, 3), (EPOCH, 1.0, 64), (EPOCH + 3, 1.0, 64), (2 * EPOCH, EPOCH, 3)],
)
def test_a_resumed_run_reads_on(read_batches, tmp_path, step, limit, batch_size) -> None:
    kwargs = {"limit_train_batches": limit, "batch_size": batch_size}
    _assert_resumes(read_batches, tmp_path, 1, step, **kwargs)


def test_two_resumed_ranks_read_on(read_batches, tmp_path) -> None:
    _assert_resumes(read_batches, tmp_path, 2, EPOCH + 3)


def test_readers_that_run_ahead_do_not_count(read_batches, tmp_path) -> None:
    _assert_resumes(read_batches, tmp_path, 1, EPOCH + 3, num_workers=2)


def test_a_plain_loader_would_not_read_on(read_batches, tmp_path, monkeypatch) -> None:
    def plain_loader(self):
        blocks = self.blocks("train")
        order = torch.utils.data.DistributedSampler(blocks, 1, 0, shuffle=True)
        return DataLoader(blocks, self.batch_size, sampler=order)

    monkeypatch.setattr(TokenDataModule, "train_dataloader", plain_loader)
    with pytest.raises(AssertionError):
        _assert_resumes(read_batches, tmp_path, 1, EPOCH + 3)


def test_a_run_resumed_on_two_ranks_reads_what_one_has_left(make_data) -> None:
    one = make_data(batch_size=4).train_dataloader()
    batches = iter(one)
    read = [tuple(row.tolist()) for _ in range(6) for row in next(batches)]
    for rank in range(2):
        loader = make_data(2, rank, batch_size=4).train_dataloader()
        loader.load_state_dict(one.state_dict())
        read += _rows(loader)
    assert len(set(read)) == len(read)
    assert len(make_data().blocks("train")) - len(read) < 2 * 4
