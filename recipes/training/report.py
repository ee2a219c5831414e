"""Print a panel before and after a run, and write its results."""

from __future__ import annotations

import copy
import math
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers import CSVLogger
from typing_extensions import override

from lightning_commfree import DominoTPStrategy
from lightning_commfree.comm.ledger import VALIDATION
from lightning_commfree.comm.text import counted
from lightning_commfree.model.shards import is_shard
from lightning_commfree.resume.files import write_atomic
from lightning_commfree.resume.folders import is_folder, read_folder
from recipes.data.training_data import TrainingData
from recipes.stages import stage
from recipes.training.elastic import reading_all_rows
from recipes.training.evaluation import generate_text, token_loss
from recipes.training.failure import diverged, on_error
from recipes.training.figures import draw_run
from recipes.training.language_model import LanguageModel
from recipes.training.plan_rows import plan_rows
from recipes.training.progress import RunRecorder
from recipes.training.summary import RunSummary, print_panel, summary_rows, write_json

SUMMARY_FILE = "summary.json"
HISTORY_FILE = "history.json"
CHECKPOINT_FOLDER = "checkpoints"
EXPORT_FOLDER = "huggingface"


class RunReport(pl.Callback):
    """Print a panel before and a summary after a fit, on rank 0, and export the trained model.

    Everything happens inside the training processes: under fork and spawn the ledger, the history
    and the loggers exist only there. The summary is created in `on_fit_end` instead of
    `on_train_end`, because a strategy may still change the weights in its own `on_train_end`, which
    runs after those of all callbacks. The loss of a tensor-parallel model is computed before its
    weights are gathered, and its sample is generated on the CPU. A fit that ends with an error
    leaves the same files, except the export and the sample.

    Args:
        data: the run's data.
        recorder: of the run; must come before this callback in the Trainer's list.
        run_dir: folder for all files.
        prompt: beginning of the generated text; None: the beginning of the validation text.
        sample_tokens: number of tokens to generate; 0 generates no text.
        seed: of the generated text.
        evaluate_before: also evaluate the model before training.
    """

    def __init__(
        self,
        data: TrainingData,
        recorder: RunRecorder,
        run_dir: str,
        prompt: str | None = None,
        sample_tokens: int = 100,
        seed: int = 0,
        evaluate_before: bool = False,
    ) -> None:
        self._data = data
        self._recorder = recorder
        self._run_dir = Path(run_dir)
        self._prompt = prompt
        self._sample_tokens = sample_tokens
        self._seed = seed
        self._evaluate_before = evaluate_before
        self._initial_loss: float | None = None
        self._final_loss: float | None = None
        self._train_start = 0.0
        self._seconds = 0.0  # of training, once it has ended

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if trainer.is_global_zero:
            on_error(
                trainer,
                lambda error: self._report_failure(trainer, "Ended by an error", str(error)),
            )

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, LanguageModel), "the report reads a LanguageModel"
        if trainer.is_global_zero:
            rows = plan_rows(trainer, pl_module, self._data, self._recorder)
            print_panel("Before training", rows)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, LanguageModel), "the report reads a LanguageModel"
        if self._evaluate_before:
            self._initial_loss = self._evaluate(trainer, pl_module)
        self._train_start = time.monotonic()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, LanguageModel), "the report reads a LanguageModel"
        if isinstance(trainer.strategy, DominoTPStrategy):
            # the weights are final, and gathered they may be too large for one device
            start = time.monotonic()
            self._final_loss = self._evaluate(trainer, pl_module)
            self._train_start += time.monotonic() - start

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, LanguageModel), "the report reads a LanguageModel"
        self._seconds = time.monotonic() - self._train_start if self._train_start else 0.0
        if self._final_loss is None:
            # the strategy's teardown has moved the module to the CPU, but the ranks reduce their
            # sums on the device of their process group
            pl_module.to(trainer.strategy.root_device)
            self._final_loss = self._evaluate(trainer, pl_module)
        if trainer.is_global_zero:
            self._conclude(trainer, pl_module, self._final_loss)
        pl_module.cpu()

    def _evaluate(self, trainer: pl.Trainer, module: LanguageModel) -> float:
        """Return the loss over the whole validation split; collective if the model is sharded."""
        with reading_all_rows(trainer):
            batches = self._data.val_dataloader()
        ledger = self._recorder.meter.ledger
        during = nullcontext() if ledger is None else ledger.during(VALIDATION)
        told = stage("validating", len(batches), shown=trainer.is_global_zero)
        with during, told as advance:
            return token_loss(module, batches, advance)

    def _conclude(self, trainer: pl.Trainer, module: LanguageModel, loss: float) -> None:
        losses = {
            "val": loss,
            "unigram": self._data.baseline_loss(),
            "initial": self._initial_loss,
        }
        final = {f"final/{name}_loss": loss for name, loss in losses.items() if loss is not None}
        for logger in trainer.loggers:
            logger.log_metrics(final, step=trainer.global_step)
            logger.save()
        failure = diverged(loss, self._recorder.history, self._run_dir)
        if failure is not None:
            self._report_failure(trainer, "After training", failure)
            return
        summary = self._summarize(trainer, loss)
        if any(map(is_shard, module.parameters())):  # rank 0 has only a shard of them
            assert summary.checkpoint is not None, "a fit ends with one"
            module = load_trained(Path(summary.checkpoint))
        with stage("exporting the model"):
            huggingface, adapter = self._export(module)
        with stage("writing a sample"):
            sample = self._sample(module)
        self._write(
            replace(summary, sample=sample, huggingface=huggingface, adapter=adapter),
            "After training",
        )

    def _report_failure(self, trainer: pl.Trainer, title: str, failure: str) -> None:
        """Write the figures and files of a failed run."""
        for logger in trainer.loggers:
            logger.finalize("failed")
        if self._train_start and not self._seconds:
            self._seconds = time.monotonic() - self._train_start
        loss = math.nan if self._final_loss is None else self._final_loss
        self._write(replace(self._summarize(trainer, loss), failure=failure), title)

    def _write(self, summary: RunSummary, title: str) -> None:
        write_json(summary, self._run_dir / SUMMARY_FILE)
        write_json(self._recorder.history, self._run_dir / HISTORY_FILE)
        print_panel(title, summary_rows(summary))

    def _summarize(self, trainer: pl.Trainer, validation_loss: float) -> RunSummary:
        """Return the figures, without those that need the weights."""
        meter, steps = self._recorder.meter, self._recorder.steps_done
        sent = meter.sent(steps)
        return RunSummary(
            steps=steps,
            tokens=steps * self._recorder.tokens_per_step(trainer),
            seconds=self._seconds,
            validation_loss=validation_loss,
            perplexity=math.exp(validation_loss) if validation_loss < 700 else math.inf,
            initial_loss=self._initial_loss,
            unigram_loss=self._data.baseline_loss(),
            bytes_in_steps=meter.bytes_in_steps(steps),
            bytes_sent=sum(sum(tags.values()) for tags in sent.values()),
            bytes_by_phase=sent,
            bytes_are_counted=meter.ledger is not None,
            ddp_bytes=round(steps * meter.plan.ddp_bytes_per_step),
            ddp_start_bytes=meter.ddp_start_bytes,
            seconds_waited=meter.seconds_waited(),
            sample="",
            checkpoint=_newest_checkpoint(self._run_dir / CHECKPOINT_FOLDER),
            huggingface=None,
            metrics=_metrics_file(trainer),
            figure=self._draw(trainer, validation_loss),
            stopped_early=_why_stopped(trainer),
        )

    def _sample(self, module: LanguageModel) -> str:
        if not self._sample_tokens:
            return ""
        tokenizer, prompt = self._data.tokenizer, self._prompt
        if prompt is None:
            prompt = self._data.prompt()
        return generate_text(module, tokenizer, prompt, self._sample_tokens, self._seed)

    def _export(self, module: LanguageModel) -> tuple[str, str | None]:
        """Write a folder for `from_pretrained`; with adapters, also a folder with only these."""
        folder, adapter = self._run_dir / EXPORT_FOLDER, None
        model: Any = module.model
        if module.hparams["lora"] is not None:
            adapter = str(self._run_dir / "adapter")
            # the vocabulary is the base model's; by default peft asks the hub for its size
            model.save_pretrained(adapter, save_embedding_layers=False)
            # merge a copy, in host memory: the module itself keeps its adapters
            model = copy.deepcopy(model.cpu()).merge_and_unload()
        model.save_pretrained(folder)
        self._data.tokenizer.save_pretrained(folder)
        return str(folder), adapter

    def _draw(self, trainer: pl.Trainer, final_loss: float) -> str:
        path = self._run_dir / "run.png"
        title = f"{type(trainer.strategy).__name__} on {counted(trainer.world_size, 'rank')}"
        ddp_bytes = self._recorder.meter.plan.ddp_bytes_per_step
        draw_run(self._recorder.history, final_loss, ddp_bytes, title, path)
        return str(path)


def _newest_checkpoint(folder: Path) -> str | None:
    files = list(folder.glob("*.ckpt"))
    return str(max(files, key=lambda file: file.stat().st_mtime)) if files else None


def _why_stopped(trainer: pl.Trainer) -> str | None:
    for callback in trainer.early_stopping_callbacks:
        # Lightning 2.6 and later
        if reason := getattr(callback, "stopping_reason_message", None):
            return str(reason).removesuffix(" Signaling Trainer to stop.")
    return None


def _metrics_file(trainer: pl.Trainer) -> str | None:
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger):
            return str(Path(logger.log_dir) / "metrics.csv")
    return None


def load_trained(checkpoint: Path) -> LanguageModel:
    """Load the module from a checkpoint file, or from a folder, converted to a temporary file."""
    if not is_folder(checkpoint):
        return LanguageModel.load_from_checkpoint(checkpoint, map_location="cpu")
    with TemporaryDirectory(dir=checkpoint.parent) as place:
        file = Path(place) / "one.ckpt"
        write_atomic(read_folder(checkpoint), file)
        return LanguageModel.load_from_checkpoint(file, map_location="cpu")
