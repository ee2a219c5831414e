"""Speed by Lightning's `Throughput`, operations counted, a bar on a terminal and in a file."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from rich.console import Console
from transformers import GPT2Config, LlamaConfig

from recipes.training import progress, progress_bar
from recipes.training.language_model import LanguageModel
from recipes.training.progress import RunRecorder, flops_per_batch
from recipes.training.progress_bar import StepProgressBar

ROWS, CONTEXT = 4, 16


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    monkeypatch.setattr(progress_bar, "time", clock)
    return clock


def _speeds(clock, num_shares, world_size, pauses=()):
    """Play 30 batches of half a second, with a validation of 9 s before some of them."""
    data = SimpleNamespace(batch_size=ROWS, tokens_per_row=lambda: CONTEXT)
    recorder = RunRecorder(data)
    recorder.meter = SimpleNamespace(
        bytes_in_steps=lambda steps: 0, bytes_per_step=lambda: 0.0, seconds_waited=lambda: None
    )
    logged = []
    module = SimpleNamespace(log=lambda name, value, **_: logged.append((name, float(value))))
    shares = {"num_replicas": num_shares, "rank": 0} if num_shares > 1 else None
    trainer = SimpleNamespace(
        strategy=None,
        distributed_sampler_kwargs=shares,
        world_size=world_size,
        global_step=0,
        accumulate_grad_batches=1,
        log_every_n_steps=10,
        sanity_checking=True,
    )
    recorder.on_train_start(trainer, module)
    for batch in range(30):
        if batch in pauses:
            recorder.on_validation_start(trainer, module)
            clock.now += 9.0
            recorder.on_validation_end(trainer, module)
        clock.now += 0.5
        recorder.on_train_batch_end(trainer, module, {"loss": 1.0}, None, batch)
    return [value for name, value in logged if name == "tokens/s"]


@pytest.mark.parametrize(
    ("num_shares", "world_size"),
    [(1, 1), (2, 2), (1, 2)],  # one rank; data parallel; two ranks that share a model
)
def test_tokens_per_second_by_hand(num_shares, world_size, clock) -> None:
    speeds = _speeds(clock, num_shares, world_size)
    assert len(speeds) == 30 - 20, "20 batches make the first mean"
    assert speeds == pytest.approx([num_shares * ROWS * CONTEXT / 0.5] * len(speeds))


def test_validation_is_left_out_of_the_speed(clock) -> None:
    assert _speeds(clock, 1, 1, pauses=(5, 25)) == pytest.approx([ROWS * CONTEXT / 0.5] * 10)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(vocab_size=200, n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=2),
        LlamaConfig(
            vocab_size=200,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        ),
    ],
)
def test_operations_are_six_per_weight_and_token_and_those_of_attention(
    config, checkpointing
) -> None:
    module = LanguageModel(config.to_dict(), gradient_checkpointing=checkpointing)
    names = dict(module.model.named_modules())
    # weights of matrix products; GPT-2's head is its embedding, used as a matrix once
    linear = [m for n, m in names.items() if type(m).__name__ in ("Linear", "Conv1D")]
    weights = sum(m.weight.numel() for m in linear)
    # scores and their use are 2 products of CONTEXT x 64 per token and layer, and backward has 2
    # for each
    attention = 2 * 2 * 3 * 2 * CONTEXT * 64
    expected = ROWS * CONTEXT * (6 * weights + attention)
    assert flops_per_batch(module, ROWS, CONTEXT) == pytest.approx(expected, rel=1e-6)


def _play(bar, clock, max_steps=40, every=0.5, metrics=None):
    trainer = SimpleNamespace(max_steps=max_steps, global_step=0, progress_bar_metrics={})
    bar.on_train_start(trainer, None)
    for step in range(1, max_steps + 1):
        clock.now += every
        trainer.global_step = step
        trainer.progress_bar_metrics = {
            "train/loss": 3.1234, "val/loss": 3.4561, "tokens/s": 12345.4, "kB/step": 1.24
        }  # fmt: skip
        bar.on_train_batch_end(trainer)
        bar.on_train_batch_end(trainer)  # a micro-batch that only accumulates
    bar.on_train_end(trainer, None)


FIGURES = "loss 3.123, val 3.456, 12,345 tokens/s, 1.2 kB/step"


def test_in_a_file_a_line_every_ten_seconds_and_the_last_step(clock, capsys) -> None:
    _play(StepProgressBar(), clock, max_steps=45)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines] == ["step 20/45", "step 40/45", "step 45/45"]
    assert all(line.endswith(FIGURES) for line in lines)
    assert re.fullmatch(r"step 45/45, \d:\d\d:\d\d<0:00:00, .*", lines[-1])


def test_on_a_terminal_a_bar_that_moves(clock, capsys, monkeypatch) -> None:
    terminal = lambda: Console(force_terminal=True, width=120)  # noqa: E731
    monkeypatch.setattr(progress_bar, "Console", terminal)
    _play(StepProgressBar(), clock)
    shown = capsys.readouterr().out
    assert "\x1b[" in shown, "it is drawn over itself"
    plain = re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", shown)
    assert "step 40/40" in plain
    assert "━" in plain
    assert FIGURES in plain


def test_validations_and_saves_stand_in_the_bar(clock, capsys, monkeypatch) -> None:
    terminal = lambda: Console(force_terminal=True, width=80)  # noqa: E731
    monkeypatch.setattr(progress_bar, "Console", terminal)
    bar, saved = StepProgressBar(), []
    trainer = SimpleNamespace(
        max_steps=40,
        global_step=0,
        progress_bar_metrics={},
        num_val_batches=[7],
        is_global_zero=True,
        save_checkpoint=lambda path: saved.append(path),
    )
    bar.setup(trainer, None, "fit")
    bar.on_train_start(trainer, None)
    bar.on_validation_start(trainer, None)
    clock.now += 1.0
    bar.on_validation_batch_end(trainer, None, None, None, 4)
    bar.on_validation_end(trainer, None)
    trainer.save_checkpoint("folder/last.ckpt")
    bar.on_train_end(trainer, None)
    assert saved == ["folder/last.ckpt"]
    plain = re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", capsys.readouterr().out)
    assert "validating, 5 of 7" in plain
    assert "saving last.ckpt" in plain
