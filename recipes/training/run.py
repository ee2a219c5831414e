"""Check, build and fit a run from its configuration, for pretraining and fine-tuning."""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
from hydra.utils import instantiate
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from torch import nn
from transformers.utils.logging import disable_progress_bar

from lightning_commfree import DistributedLion, DistributedLionStrategy, DominoTPStrategy
from recipes.configuration.resolved import config_tree, save_config
from recipes.data.training_data import TrainingData
from recipes.stages import is_first_rank
from recipes.training.callbacks import build_callbacks
from recipes.training.elastic import is_elastic, own_folder
from recipes.training.language_model import LanguageModel
from recipes.training.launch import check_launch, with_launcher
from recipes.training.length import apply_token_budget
from recipes.training.loggers import LoggedConfig
from recipes.training.progress import RunRecorder
from recipes.training.progress_bar import StepProgressBar
from recipes.training.report import CHECKPOINT_FOLDER, SUMMARY_FILE, RunReport
from recipes.training.resume import find_checkpoint
from recipes.training.stopping import StopOnSignal
from recipes.training.threads import ThreadsAfterFork

Config = dict[str, Any]
Builder = Callable[[Config], tuple[TrainingData, LanguageModel]]


def run_job(cfg: DictConfig, build: Builder) -> float | None:
    """Run one job of a Hydra application.

    Args:
        cfg: composed.
        build: creates data and module from a configuration.

    Returns:
        The validation loss on rank 0, for Hydra sweepers that optimize it; None on other ranks.

    Raises:
        ValueError: the final loss is not finite; figures and checkpoints are still written.
        SystemExit: SIGTERM or Ctrl-C has stopped the run, after saving a checkpoint.
    """
    _quiet()
    apply_token_budget(cfg)
    config = cast(Config, OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True))
    check_launch(config)
    if config["print_config"] and is_first_rank():
        Console().print(config_tree(config))
    trainer = fit(config, build)
    if not trainer.is_global_zero:
        return None
    summary = json.loads((Path(config["run_dir"]) / SUMMARY_FILE).read_text())
    if summary["failure"] is not None:
        raise ValueError(summary["failure"])
    return float(summary["validation_loss"])


def fit(config: Config, build: Builder) -> pl.Trainer:
    """Build everything in the configuration, and fit.

    Args:
        config: one of `conf/*.yaml` with its groups, composed and resolved to plain dicts and
            lists.
        build: creates data and module from it.

    Returns:
        The Trainer after its fit.

    Raises:
        FileNotFoundError: `ckpt_path` or a data path does not exist. Raised before any process is
            launched, as is the next one.
        ValueError: the run has no length, its model does not fit into memory, there is too little
            data, the strategy cannot use the optimizer or a callback, or a constructor refuses a
            value.
        SystemExit: SIGTERM or Ctrl-C has stopped the run, after saving a checkpoint.
    """
    max_steps = config["trainer"]["max_steps"]
    _check_length(max_steps)
    ckpt_path = find_checkpoint(
        config["ckpt_path"], config["run_dir"], max_steps, config["trainer"]["num_nodes"]
    )
    _check_optimizer(config)  # before slow parts
    chosen = build_callbacks(config)
    pl.seed_everything(config["seed"], workers=True, verbose=False)
    config = with_launcher(config)
    forks = config["strategy"]["start_method"] == "fork"
    first = [ThreadsAfterFork()] if forks else []  # before the model exists
    data, module = build(config)
    trainer = build_trainer(config, data, first, chosen)
    _prepare(data, trainer)
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    stop = next(callback for callback in callbacks if isinstance(callback, StopOnSignal))
    holds = is_elastic(config["strategy"]) and is_first_rank()
    with own_folder(config["run_dir"]) if holds else nullcontext(), stop.listening(trainer):
        if is_first_rank():
            save_config(config, config["run_dir"])
        trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return trainer


def build_trainer(
    config: Config,
    data: TrainingData,
    first: Sequence[pl.Callback] = (),
    chosen: Sequence[pl.Callback] = (),
) -> pl.Trainer:
    """Build the Trainer with strategy, loggers and callbacks.

    Args:
        config: as for `fit`.
        data: the run's data.
        first: callbacks that run before the recipe's own.
        chosen: callbacks that run after them, from `callbacks=...`.
    """
    run_dir = config["run_dir"]
    recorder = RunRecorder(data)
    report = RunReport(data, recorder, run_dir, seed=config["seed"], **config["report"])
    callbacks = [*first, recorder, report, StepProgressBar()]
    callbacks += build_checkpoints(
        run_dir, config["checkpoint_every_n_steps"], config["trainer"]["max_steps"]
    )
    # last, after the callbacks whose state is in a checkpoint
    callbacks += [*chosen, StopOnSignal(run_dir)]
    loggers = [instantiate(logger, _convert_="all") for logger in config["logger"].values()]
    if loggers:
        callbacks += [LoggedConfig(config)]
        if not any(isinstance(callback, LearningRateMonitor) for callback in callbacks):
            callbacks += [LearningRateMonitor("step")]
    strategy = instantiate(config["strategy"], _convert_="all")
    if isinstance(strategy, DominoTPStrategy) and config.get("compile") is not None:
        raise ValueError(
            f"strategy=domino_tp cannot be combined with compile={config['compile']}: it shards the"
            " model layer by layer, which a compiled model does not allow. Set compile=null."
        )
    return factory(config["trainer"])(strategy=strategy, logger=loggers, callbacks=callbacks)


def build_checkpoints(run_dir: str, every_n_steps: int, max_steps: int) -> list[ModelCheckpoint]:
    """Return a callback that saves `last.ckpt` when the fit ends, and one that saves during it.

    One is not enough: a `ModelCheckpoint` that saves every n steps skips the last step if it is not
    a multiple of n. None of them saves at the end of an epoch: after resuming from such a
    checkpoint, Lightning 2.6.6 cuts the next epoch short if the run's length is given in steps.
    """
    folder = f"{run_dir}/{CHECKPOINT_FOLDER}"
    last = ModelCheckpoint(
        folder,
        every_n_train_steps=max_steps,  # and in `on_train_end`, if the fit ends earlier
        save_top_k=0,
        save_last=True,
        enable_version_counter=False,
    )
    if every_n_steps in (0, max_steps):  # Lightning refuses two that save at the same steps
        return [last]
    step = ModelCheckpoint(
        folder, "step-{step}", auto_insert_metric_name=False, every_n_train_steps=every_n_steps
    )
    return [step, last]


def factory(config: Config) -> Callable[..., Any]:
    """Return a function that creates the object in `config` from its remaining arguments.

    Objects must be passed to this function instead of `instantiate`, which would copy them.
    """
    return instantiate(config, _partial_=True, _convert_="all")


def _prepare(data: TrainingData, trainer: pl.Trainer) -> None:
    """Create the files of tokens and check their size, in the launching process.

    Lightning does both in the ranks, where an error comes with the tracebacks of all of them, and
    where ranks that wait for the one that tokenizes give up after the strategy's `timeout`.
    """
    data.trainer = trainer
    data.prepare_data()
    data.setup("fit")
    # tokenizers use threads, which do not survive a fork; without this setting every forked process
    # prints a warning
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _check_length(max_steps: int) -> None:
    if max_steps < 1:
        raise ValueError(
            f"trainer.max_steps={max_steps} must be positive: the learning rate's cosine, the"
            " progress bar and the checkpoints need to know the run's length in optimizer steps."
        )


def _check_optimizer(config: Config) -> None:
    """Raise for illegal values, and for an optimizer that the strategy cannot use."""
    try:
        made = factory(config["optimizer"])(nn.Linear(1, 1))
    except TypeError as error:
        raise ValueError(
            f"`optimizer` cannot be created: {error}. Its `_target_` is called with the module and"
            " the section's other keys. Start from a file in `conf/optimizer/`."
        ) from error
    optimizer = made["optimizer"] if isinstance(made, dict) else made
    strategy = config["strategy"]["_target_"].rpartition(".")[2]
    if strategy == DistributedLionStrategy.__name__ and not isinstance(optimizer, DistributedLion):
        raise ValueError(
            f"strategy=distributed_lion cannot use {type(optimizer).__name__}, which does not vote."
            " Set optimizer=distributed_lion, or optimizer=distributed_lion_finetune for"
            " fine-tuning."
        )


def _quiet() -> None:
    """Silence messages that Lightning prints in every run, and warnings that do not apply here."""
    # the last one prints a signal on every rank; `StopOnSignal` prints it once
    names = ("lightning.pytorch", "lightning.fabric", "lightning_commfree.fit.signals")
    for name in names:
        logging.getLogger(name).setLevel(logging.WARNING)
    # it prints that ranks are terminated, which an error or a stop has already reported
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    disable_progress_bar()  # transformers' bars for reading and writing files
    # validation data are not shuffled
    warnings.filterwarnings("ignore", "You requested to overfit but enabled val")
    # `configure_model` of a `LanguageModel` creates no layers
    warnings.filterwarnings("ignore", "You're using the WeightAveraging callback with a model")
    warnings.filterwarnings("ignore", ".*does not have many workers", PossibleUserWarning)
    warnings.filterwarnings("ignore", ".*`isinstance\\(treespec, LeafSpec\\)` is deprecated")
