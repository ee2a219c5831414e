"""The figures of a report, each against a count by hand."""

from __future__ import annotations

import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from transformers import GPT2Config

from lightning_commfree import DominoTPStrategy, StreamingDiLoCoStrategy
from lightning_commfree.comm.text import human_bytes
from recipes.data.corpus import MarkovChain
from recipes.data.token_blocks import TokenBlocks
from recipes.data.token_data import TokenDataModule, unigram_loss
from recipes.data.tokenizer import byte_tokenizer
from recipes.training.evaluation import generate_text, token_loss
from recipes.training.language_model import LanguageModel
from recipes.training.optimizer import adamw_cosine
from recipes.training.plan_rows import _single_replica
from recipes.training.progress import RunRecorder
from recipes.training.report import RunReport
from recipes.training.summary import RunSummary, share, summary_rows
from recipes.training.traffic import TrafficMeter

BLOCK_SIZE, BATCH_SIZE, ACCUMULATE, STEPS = 16, 2, 3, 8
CONFIG = GPT2Config(vocab_size=257, n_positions=BLOCK_SIZE, n_embd=8, n_layer=2, n_head=2)


def _blocks(path, tokens, block_size):
    np.asarray(tokens, dtype="<u2").tofile(path)
    return TokenBlocks(path, block_size)


def test_unigram_loss_by_hand(tmp_path) -> None:
    train = _blocks(tmp_path / "train.uint16", [0, 0, 0, 1], 2)  # counts and one: 4, 2, 1 of 7
    # targets are tokens 1 to 4: the first is no target, and the last one fills no block
    validation = _blocks(tmp_path / "validation.uint16", [2, 0, 0, 1, 2, 1], 2)
    expected = -(2 * math.log(4 / 7) + math.log(2 / 7) + math.log(1 / 7)) / 4
    assert unigram_loss(train, validation, vocab_size=3) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (4_287_488, "4.29 MB"),
        (999_600, "1 MB"),
        (2.5e9, "2.5 GB"),
        (7e15, "7,000 TB"),
    ],
)
def test_human_bytes(num_bytes, text) -> None:
    assert human_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("times_less", "text"),
    [(1190.4, "1/1,190"), (12.34, "1/12.3"), (0.8, "1.25"), (5e-5, "20,000")],
)
def test_a_share_has_no_exponent(times_less, text) -> None:
    assert share(times_less) == text


@pytest.fixture
def data(tmp_path):
    corpus = MarkovChain(26, 400 * BLOCK_SIZE, 11 * BLOCK_SIZE)
    cache = str(tmp_path / "cache")
    return TokenDataModule(corpus, byte_tokenizer(), cache, BLOCK_SIZE, BATCH_SIZE)


@pytest.fixture
def fit(data, quiet_trainer, tmp_path):
    """Fit a small model with the report in its Trainer; return recorder, module and summary."""

    def run(devices=2, strategy=None, sample_tokens=5, **kwargs):
        (tmp_path / "run").mkdir()
        recorder = RunRecorder(data)
        report = RunReport(data, recorder, str(tmp_path / "run"), sample_tokens=sample_tokens)
        trainer = quiet_trainer(
            devices=devices,
            strategy=strategy or DDPStrategy(start_method="fork"),
            max_steps=STEPS,
            max_epochs=-1,
            accumulate_grad_batches=ACCUMULATE,
            val_check_interval=4 * ACCUMULATE,
            check_val_every_n_epoch=None,
            log_every_n_steps=2,
            callbacks=[recorder, report],
            **kwargs,
        )
        module = LanguageModel(CONFIG.to_dict(), lambda m: adamw_cosine(m, STEPS, warmup_steps=1))
        trainer.fit(module, datamodule=data)
        summary = json.loads((tmp_path / "run" / "summary.json").read_text())
        return recorder, module, RunSummary(**summary)

    return run


def test_a_ddp_runs_figures(fit, tmp_path, capfd) -> None:
    logger = CSVLogger(tmp_path, name="csv")
    _, module, summary = fit(logger=logger)
    parameters = sum(p.numel() for p in module.parameters())
    assert summary.steps == STEPS
    assert summary.tokens == STEPS * ACCUMULATE * 2 * BATCH_SIZE * BLOCK_SIZE
    # two ranks: a ring all-reduce sends every fp32 gradient once
    assert summary.bytes_in_steps == summary.ddp_bytes == STEPS * 4 * parameters
    # rank 0 gives its weights, and the two ranks' mean is half of that
    assert summary.ddp_start_bytes == 4 * parameters // 2
    assert summary.bytes_by_phase == {
        "start": {"broadcast": 2 * parameters},
        "steps": {"gradient": STEPS * 4 * parameters},
    }
    assert summary.bytes_sent == summary.ddp_bytes + summary.ddp_start_bytes
    assert not summary.bytes_are_counted
    assert 0 < summary.seconds_waited < summary.seconds, "by torch's own statistics"
    assert summary.perplexity == pytest.approx(math.exp(summary.validation_loss))
    assert summary.checkpoint is None, "there is no ModelCheckpoint in this Trainer"

    shown = capfd.readouterr().out
    assert shown.count("Before training") == shown.count("After training") == 1, "rank 0 alone"
    assert f"{summary.validation_loss:.4f}" in shown
    assert f"{parameters:,}" in shown
    rows = (tmp_path / "csv" / "version_0" / "metrics.csv").read_text()
    assert summary.metrics == str(tmp_path / "csv" / "version_0" / "metrics.csv")
    for name in ("train/loss", "tokens/s", "comm/bytes_sent", "val/loss", "final/val_loss"):
        assert name in rows.splitlines()[0]


def test_a_diloco_runs_figures_are_the_ledgers(fit, capfd) -> None:
    strategy = StreamingDiLoCoStrategy(
        sync_every=4, num_fragments=2, wire_dtype="fp32", evaluate="outer", start_method="fork"
    )
    _, module, summary = fit(strategy=strategy)
    parameters = sum(p.numel() for p in module.parameters())
    assert summary.bytes_are_counted
    assert summary.seconds_waited > 0
    assert summary.ddp_bytes == STEPS * 4 * parameters
    # two fragments, every fourth step: after steps 4 and 8, and 6; then the last exchange of both
    size = summary.bytes_by_phase["end"]["outer_gradient"]
    assert size > 4 * parameters
    assert summary.bytes_by_phase["steps"].keys() == {"outer_gradient"}
    assert size < summary.bytes_in_steps == summary.bytes_by_phase["steps"]["outer_gradient"]
    assert summary.bytes_in_steps < 2 * size
    tensors = [*module.parameters(), *module.buffers()]
    assert summary.bytes_by_phase["start"]["start"] == 8 * len(tensors), "hashes of equal weights"
    assert summary.bytes_by_phase.keys() == {"start", "steps", "end"}, "nothing for validations"
    assert summary.bytes_sent == sum(sum(sent.values()) for sent in summary.bytes_by_phase.values())
    # the panel before the run means the same bytes: of a cycle's steps
    shown = " ".join(capfd.readouterr().out.replace("│", " ").split())
    assert re.search(r"a save takes [\d.]+ \w?B more memory on each rank", shown)
    per_step, cycle = human_bytes(size / 4), human_bytes(size)
    assert (
        f"one rank sends {per_step} per step on average over a cycle, {cycle} per cycle of 4"
        f" steps: outer_gradient {per_step}"
    ) in shown
    rows = summary_rows(summary)
    assert "in training steps (counted), " in rows["one rank sent"]
    assert re.search(r"start .*\(start .*; end .* \(outer_gradient ", rows["besides"])
    sent = summary.bytes_in_steps
    assert f"this run's sent {share(summary.ddp_bytes / sent)} of that" in rows["fp32 DDP"]
    in_fit = human_bytes(sent + sum(summary.bytes_by_phase["end"].values()))
    assert f"Trained {STEPS} steps. Rank 0 sent {in_fit} (fp32 DDP would" in rows["in all"]
    ours, ddp = (f"{8e3 * x / STEPS / 20e6:.3g} ms" for x in (sent, summary.ddp_bytes))
    slow = f"would take {ours} on average, those of fp32 DDP {ddp} (computed)"
    assert slow in rows["at 20 Mbit/s"]


def test_the_loss_of_a_divided_model_is_that_of_the_whole_one(fit, data, capfd) -> None:
    _, module, summary = fit(strategy=DominoTPStrategy(start_method="fork"))
    whole = token_loss(module, data.val_dataloader())
    assert summary.validation_loss == pytest.approx(whole, rel=1e-5)
    shown = " ".join(capfd.readouterr().out.replace("│", " ").split())
    parameters = sum(p.numel() for p in module.parameters())
    assert f"{parameters:,}, of which {parameters:,} are trained; this rank holds " in shown
    # validations divide the model too, and saves put it together: none of it is a step's; what the
    # panel has foretold is what the steps sent
    per_step = summary.bytes_by_phase["steps"]["tensor_forward"] / STEPS
    assert f"tensor_forward {human_bytes(per_step)}" in shown.partition("After training")[0]
    assert summary.bytes_by_phase["validation"]["tensor_forward"] > 0
    assert "tensor_forward" not in summary.bytes_by_phase["end"]
    assert "tensor_state" not in summary.bytes_by_phase["steps"]


def test_one_rank_sends_nothing_and_writes_no_text_unasked(fit, tmp_path) -> None:
    recorder, _, summary = fit(devices=1, strategy="auto", sample_tokens=0)
    assert (summary.sample, "sample" in summary_rows(summary)) == ("", False)
    assert (tmp_path / "run" / "huggingface" / "config.json").is_file()
    assert summary.bytes_sent == summary.ddp_bytes == 0
    assert "none of it" in summary_rows(summary)["fp32 DDP"]
    # in this process, so the history can be looked at
    history = recorder.history
    # a short run: more often than every two steps, as rows are logged
    assert history.steps == list(range(1, STEPS + 1))
    assert history.bytes_sent == [0] * STEPS
    # of a whole batch, and not the share of it that is accumulated; the model knows nothing yet
    assert history.train_loss[0] == pytest.approx(math.log(257), abs=0.3)
    assert history.validation_steps == [4, 8]
    assert summary.validation_loss == pytest.approx(history.validation_loss[-1], rel=1e-6)


def test_a_strategy_that_nobody_can_count(quiet_trainer) -> None:
    trainer = quiet_trainer(accelerator="cpu")
    trainer.strategy.connect(LightningModule())
    trainer._accelerator_connector.strategy = FSDPStrategy.__new__(FSDPStrategy)
    with pytest.raises(TypeError, match="do not know what `FSDPStrategy` sends. Use a strategy of"):
        TrafficMeter(trainer, 64, 0)


def test_text_is_repeatable_and_fits_the_context() -> None:
    torch.manual_seed(1)
    module, tokenizer = LanguageModel(CONFIG.to_dict()), byte_tokenizer()
    before = torch.random.get_rng_state()
    texts = [generate_text(module, tokenizer, "ab", 8, seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].startswith("ab")
    assert torch.equal(torch.random.get_rng_state(), before)
    assert module.training
    # nothing to begin with, and more asked for than the context of 16 has
    for prompt in ("", "a" * 40):
        text = generate_text(module, tokenizer, prompt, 1000, seed=0)
        assert text.count("a") <= BLOCK_SIZE or prompt == ""


def test_one_replica_alone_is_told_what_diloco_makes_of_it() -> None:
    diloco = StreamingDiLoCoStrategy(replica_size=2)
    assert "look-ahead optimizer" in _single_replica(SimpleNamespace(strategy=diloco, world_size=2))
    assert _single_replica(SimpleNamespace(strategy=diloco, world_size=4)) == ""
    assert _single_replica(SimpleNamespace(strategy=DDPStrategy(), world_size=1)) == ""
