"""A run: checked, built from its configuration, and fitted. What pretraining and tuning share."""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
from hydra.utils import instantiate
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from omegaconf import DictConfig, OmegaConf
from torch import nn
from transformers.utils.logging import disable_progress_bar

from lightning_commfree import DominoTPStrategy
from recipes.data.training_data import TrainingData
from recipes.training.language_model import LanguageModel
from recipes.training.launch import check_launch, with_launcher
from recipes.training.length import settle_length
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
        build: makes data and module of a configuration.

    Returns:
        The validation loss on rank 0, for sweepers that look for the best; None on others.

    Raises:
        ValueError: the trained weights have no finite loss; figures and checkpoints are written.
        SystemExit: SIGTERM or Ctrl-C has stopped the run, after a checkpoint.
    """
    _quiet()
    settle_length(cfg)
    config = cast(Config, OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True))
    check_launch(config)
    trainer = fit(config, build)
    if not trainer.is_global_zero:
        return None
    summary = json.loads((Path(config["run_dir"]) / SUMMARY_FILE).read_text())
    if summary["failure"] is not None:
        raise ValueError(summary["failure"])
    return float(summary["validation_loss"])


def fit(config: Config, build: Builder) -> pl.Trainer:
    """Build everything that the configuration describes, and fit.

    Args:
        config: one of `conf/*.yaml` with its groups, composed and resolved to plain dicts and
            lists.
        build: makes data and module of it.

    Returns:
        The Trainer after its fit.

    Raises:
        FileNotFoundError: `ckpt_path` or a data path does not exist. Before any process is
            launched, as what follows.
        ValueError: the run has no length, its model does not fit into memory, its data are too
            few, or a part refuses a value; see theirs.
        SystemExit: SIGTERM or Ctrl-C has stopped the run, after a checkpoint.
    """
    max_steps = config["trainer"]["max_steps"]
    _check_length(max_steps)
    ckpt_path = find_checkpoint(config["ckpt_path"], config["run_dir"], max_steps)
    factory(config["optimizer"])(nn.Linear(1, 1))  # what it refuses it refuses here
    pl.seed_everything(config["seed"], workers=True, verbose=False)
    config = with_launcher(config)
    forks = config["strategy"]["start_method"] == "fork"
    callbacks = [ThreadsAfterFork()] if forks else []  # before there is a model
    data, module = build(config)
    trainer = build_trainer(config, data, callbacks)
    _prepare(data, trainer)
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    stop = next(callback for callback in callbacks if isinstance(callback, StopOnSignal))
    with stop.listening(trainer):
        trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return trainer


def build_trainer(
    config: Config, data: TrainingData, callbacks: Sequence[pl.Callback] = ()
) -> pl.Trainer:
    """Return the Trainer with strategy, loggers, the recipe's callbacks and the user's."""
    run_dir = config["run_dir"]
    recorder = RunRecorder(data)
    report = RunReport(data, recorder, run_dir, seed=config["seed"], **config["report"])
    callbacks = [*callbacks, recorder, report, StepProgressBar()]
    callbacks += build_checkpoints(
        run_dir, config["checkpoint_every_n_steps"], config["trainer"]["max_steps"]
    )
    callbacks += [instantiate(callback, _convert_="all") for callback in config["callbacks"]]
    callbacks += [StopOnSignal(run_dir)]  # after those whose state a checkpoint holds
    loggers = [instantiate(logger, _convert_="all") for logger in config["logger"].values()]
    if loggers:
        callbacks += [LearningRateMonitor("step"), LoggedConfig(config)]
    strategy = instantiate(config["strategy"], _convert_="all")
    if isinstance(strategy, DominoTPStrategy) and config.get("compile") is not None:
        raise ValueError(
            f"strategy=domino_tp does not go with compile={config['compile']}: it divides the model"
            " itself, layer by layer, and a compiled one cannot be divided. Set compile=null."
        )
    return factory(config["trainer"])(strategy=strategy, logger=loggers, callbacks=callbacks)


def build_checkpoints(run_dir: str, every_n_steps: int, max_steps: int) -> list[ModelCheckpoint]:
    """Return a callback that saves `last.ckpt` when the fit ends, and one for in between.

    One alone does not do: a `ModelCheckpoint` that saves every so many steps leaves out the last
    step when it is not a multiple. None of them saves at the end of an epoch: resumed from such a
    checkpoint Lightning 2.6.6, when the run's length is given in steps, cuts the next epoch short.
    """
    folder = f"{run_dir}/{CHECKPOINT_FOLDER}"
    last = ModelCheckpoint(
        folder,
        every_n_train_steps=max_steps,  # and in `on_train_end`, should the fit end before
        save_top_k=0,
        save_last=True,
        enable_version_counter=False,
    )
    if every_n_steps in (0, max_steps):  # two that save at the same steps Lightning refuses
        return [last]
    step = ModelCheckpoint(
        folder, "step-{step}", auto_insert_metric_name=False, every_n_train_steps=every_n_steps
    )
    return [step, last]


def factory(config: Config) -> Callable[..., Any]:
    """Return what makes the object that `config` describes, given the arguments it lacks.

    Objects are given to the call and not to `instantiate`, which would copy them.
    """
    return instantiate(config, _partial_=True, _convert_="all")


def _prepare(data: TrainingData, trainer: pl.Trainer) -> None:
    """Make the files of tokens and see that they suffice, in the process that launches the others.

    Lightning does both in the ranks: there an error comes with the tracebacks of all of them, and
    those that wait for the one that tokenizes give up after the strategy's `timeout`.
    """
    data.trainer = trainer
    data.prepare_data()
    data.setup("fit")
    # tokenizers work with threads, which do not survive a fork; without this word every forked
    # process warns of it
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _check_length(max_steps: int) -> None:
    if max_steps < 1:
        raise ValueError(
            f"trainer.max_steps={max_steps} must be positive: the learning rate's cosine, the"
            " progress bar and the checkpoints need to know the run's length in optimizer steps."
        )


def _quiet() -> None:
    """Leave out what Lightning says in every run and what this recipe has decided on purpose."""
    # the last: every rank's word on a signal, of which `StopOnSignal` tells once
    names = ("lightning.pytorch", "lightning.fabric", "lightning_commfree.strategies.signals")
    for name in names:
        logging.getLogger(name).setLevel(logging.WARNING)
    # that ranks are ended when one has left, which an error or a stop has said already
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    disable_progress_bar()  # of transformers, when it writes and reads files
    warnings.filterwarnings("ignore", ".*does not have many workers", PossibleUserWarning)
    warnings.filterwarnings("ignore", ".*`isinstance\\(treespec, LeafSpec\\)` is deprecated")
