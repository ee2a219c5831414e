"""A run: checked, built from its configuration, and fitted. What pretraining and tuning share."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import instantiate
from lightning.fabric.plugins.environments.lsf import LSFEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from omegaconf import DictConfig, OmegaConf
from transformers.utils.logging import disable_progress_bar

from recipes.data.training_data import TrainingData
from recipes.training.language_model import LanguageModel
from recipes.training.loggers import FinishWandb
from recipes.training.progress import RunRecorder
from recipes.training.progress_bar import StepProgressBar
from recipes.training.report import CHECKPOINT_FOLDER, SUMMARY_FILE, RunReport
from recipes.training.threads import ThreadsAfterFork

Config = dict[str, Any]
Builder = Callable[[Config], tuple[TrainingData, LanguageModel]]

_LAUNCHERS = (TorchElasticEnvironment, SLURMEnvironment, LSFEnvironment)
_CKPT_WORDS = ("last", "best", "hpc")  # Lightning looks for these itself


def run_job(cfg: DictConfig, build: Builder) -> float | None:
    """Run one job of a Hydra application.

    Args:
        cfg: composed.
        build: makes data and module of a configuration.

    Returns:
        The validation loss on rank 0, for sweepers that look for the best; None on others.
    """
    config = cast(Config, OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True))
    _check_multirun(config)
    _quiet()
    trainer = fit(config, build)
    if not trainer.is_global_zero:
        return None
    summary = json.loads((Path(config["run_dir"]) / SUMMARY_FILE).read_text())
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
            launched.
        ValueError: the run has no length, or a part refuses a value; see theirs.
    """
    _check_ckpt_path(config["ckpt_path"])
    _check_length(config["trainer"]["max_steps"])
    pl.seed_everything(config["seed"], workers=True, verbose=False)
    config = _with_launcher(config)
    forks = config["strategy"]["start_method"] == "fork"
    callbacks = [ThreadsAfterFork()] if forks else []  # before there is a model
    data, module = build(config)
    trainer = build_trainer(config, data, callbacks)
    trainer.fit(module, datamodule=data, ckpt_path=config["ckpt_path"])
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
    loggers = [instantiate(logger, _convert_="all") for logger in config["logger"].values()]
    if loggers:
        callbacks += [LearningRateMonitor("step"), FinishWandb()]
    strategy = instantiate(config["strategy"], _convert_="all")
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
    if every_n_steps == 0:
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


def _with_launcher(config: Config) -> Config:
    # with any other start method Lightning launches its own processes even where torchrun or a
    # cluster has launched all of them already; "popen" takes those
    if not any(environment.detect() for environment in _LAUNCHERS):
        return config
    return {**config, "strategy": {**config["strategy"], "start_method": "popen"}}


def _check_ckpt_path(ckpt_path: str | None) -> None:
    if ckpt_path not in (None, *_CKPT_WORDS) and not Path(ckpt_path).exists():
        raise FileNotFoundError(
            f"ckpt_path='{ckpt_path}' does not exist (looked from '{Path.cwd()}'). Give a"
            " checkpoint, such as outputs/pretrain/.../checkpoints/last.ckpt, or null to start"
            " anew."
        )


def _check_length(max_steps: int) -> None:
    if max_steps < 1:
        raise ValueError(
            f"trainer.max_steps={max_steps} must be positive: the learning rate's cosine, the"
            " progress bar and the checkpoints need to know the run's length in optimizer steps."
        )


def _check_multirun(config: Config) -> None:
    start_method = _with_launcher(config)["strategy"]["start_method"]
    if HydraConfig.get().mode == RunMode.MULTIRUN and start_method == "popen":
        raise ValueError(
            "Hydra's multirun (-m) does not go with strategy.start_method=popen, which torchrun"
            " and clusters need too: each child process would run the whole sweep again, and later"
            " jobs would lose ranks without a word. Use strategy.start_method=fork or spawn, or"
            " run each job as a command of its own."
        )


def _quiet() -> None:
    """Leave out what Lightning says in every run and what this recipe has decided on purpose."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    disable_progress_bar()  # of transformers, when it writes and reads files
    warnings.filterwarnings("ignore", ".*does not have many workers", PossibleUserWarning)
    warnings.filterwarnings("ignore", ".*`isinstance\\(treespec, LeafSpec\\)` is deprecated")
