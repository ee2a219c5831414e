"""Rows of the panel before a run: the model, its data and the expected traffic."""

from __future__ import annotations

import os

import lightning.pytorch as pl

from lightning_commfree import ElasticDiLoCoStrategy, StreamingDiLoCoStrategy
from lightning_commfree.comm.text import counted, human_bytes
from lightning_commfree.diloco.codec import codec_of
from lightning_commfree.model.shards import local_tensor
from lightning_commfree.strategies import Traffic
from recipes.data.training_data import TrainingData
from recipes.training.language_model import LanguageModel
from recipes.training.progress import RunRecorder
from recipes.training.summary import shown
from recipes.training.traffic import by_tag


def plan_rows(
    trainer: pl.Trainer, module: LanguageModel, data: TrainingData, recorder: RunRecorder
) -> dict[str, str]:
    """Return the rows of the panel before a run, label to text; call in `on_fit_start`."""
    strategy, traffic = trainer.strategy, recorder.meter.plan
    sizes = {name: p.numel() for name, p in module.named_parameters()}
    held = sum(local_tensor(p).numel() for p in module.parameters())
    fragments = [sum(sizes[n] for n in names) for names in getattr(strategy, "fragments", [])]
    per_step = recorder.tokens_per_step(trainer)
    shares, _ = data.size_and_rank()  # with elastic replicas, those of empty slots too
    rows_per_step = shares * data.batch_size * trainer.accumulate_grad_batches
    epochs = f"({trainer.max_steps * rows_per_step / data.num_rows():.2f} epochs)"
    if batches := trainer.overfit_batches:  # type: ignore[attr-defined]
        epochs = f"on the same {counted(int(batches) * data.batch_size, 'row')} of each rank"
    model = f"{type(module.model).__name__}, vocabulary of {len(data.tokenizer):,}"
    if origin := module.model.config.name_or_path:  # a model with fresh weights has none
        model += f", from {shown(origin) if os.path.isdir(origin) else origin}"
    parameters, trained = recorder.num_parameters, recorder.num_trained
    count = f"{parameters:,}, of which {trained:,} are trained"
    if held != parameters:
        count += f"; this rank holds {held:,}"
    rows = {
        "model": model,
        "parameters": count,
        "data": data.describe(),
        "strategy": f"{type(strategy).__name__} on {counted(trainer.world_size, 'rank')}"
        + _single_replica(trainer),
        "fragments": " + ".join(f"{size:,}" for size in fragments) or "the model is not split",
        "tokens per step": f"{per_step:,}, in rows of {data.tokens_per_row()}",
        "steps": f"{trainer.max_steps:,} {epochs}",
        "one rank sends": _forecast(traffic),
        "fp32 DDP sends": f"{human_bytes(traffic.ddp_bytes_per_step)} per step, and"
        f" {human_bytes(recorder.meter.ddp_start_bytes)} before the first",
    }
    if isinstance(strategy, ElasticDiLoCoStrategy):
        rows["replica"] = f"slot {strategy.slot} of the job; all figures are those of this replica"
        rows["store"] = strategy.store
    if isinstance(strategy, StreamingDiLoCoStrategy):
        means = strategy.settings.evaluate == "mean"
        aside = sum(local_tensor(p).nbytes for p in module.parameters() if p.requires_grad)
        rows["a save takes"] = (
            f"{human_bytes(aside)} more memory on each rank, as does a validation: the model"
            f" then has the {'mean' if means else 'outer'} weights, beside a copy of its own"
        )
        if means and traffic.bytes_per_cycle:
            sent = human_bytes(traffic.bytes_per_cycle)
            rows["a validation sends"] = f"{sent} from each rank, as does a save outside of one"
        if codec_of(strategy.settings.wire_dtype).error_feedback:
            residual = 4 * trained // strategy.settings.replica_size
            rows["error feedback"] = (
                f"{human_bytes(residual)} on each rank, for what the wire has not sent yet"
            )
    return rows


def _forecast(traffic: Traffic) -> str:
    """Describe the expected traffic of training steps."""
    per_step = {tag: sent / traffic.cycle_steps for tag, sent in traffic.bytes_by_tag.items()}
    text = f"{human_bytes(traffic.bytes_per_step)} per step"
    if traffic.cycle_steps > 1:
        text += (
            f" on average over a cycle, {human_bytes(traffic.bytes_per_cycle)} per cycle of"
            f" {traffic.cycle_steps} steps"
        )
    return f"{text}: {by_tag(per_step)}" if traffic.bytes_per_cycle else text


def _single_replica(trainer: pl.Trainer) -> str:
    """Describe DiLoCo with a single replica, which exchanges nothing."""
    strategy = trainer.strategy
    if not isinstance(strategy, StreamingDiLoCoStrategy):
        return ""
    if isinstance(strategy, ElasticDiLoCoStrategy):  # others may join
        return ""
    if trainer.world_size > strategy.settings.replica_size:
        return ""
    return (
        ", a single replica: nothing is exchanged, and the outer optimizer turns the inner one into"
        " a look-ahead optimizer; strategy=ddp trains without it"
    )
