"""Loggers with one CSV file or W&B run per job, and the configuration as hyperparameters."""

from __future__ import annotations

import csv
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from typing_extensions import override

RUN_ID_FILE = "wandb_run_id.txt"


class LoggedConfig(pl.Callback):
    """Log the configuration as hyperparameters when the fit begins.

    It does so in the training process: a logger that opens its files or its run before a fork would
    lose everything written after it.

    Args:
        config: of the whole job, in plain dicts and lists.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for logger in trainer.loggers:
            logger.log_hyperparams(self._config)


class CsvJobLogger(CSVLogger):
    """Lightning's `CSVLogger`, but a resumed job continues in the same file.

    Lightning's starts a new folder or deletes the existing file. This one keeps the rows before the
    first step that is logged again, and drops rows that the job had logged after its checkpoint.

    Args:
        save_dir: the run's folder.
        name: of a folder in `save_dir`.
    """

    def __init__(self, save_dir: str, name: str = "csv") -> None:
        super().__init__(save_dir, name, version=0)
        self._kept: list[dict[str, str]] = []  # rows of the resumed run

    @property
    @override
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The writer of the file."""
        if self._experiment is None:
            self._open()
        return super().experiment

    @override
    @rank_zero_only
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        if self._kept and step is not None:
            before = [row for row in self._kept if int(row["step"]) < step]
            if len(before) < len(self._kept):
                Path(self.experiment.metrics_file_path).unlink()
                self._write(before)
            self._kept = []
        super().log_metrics(metrics, step)

    def _open(self) -> None:
        file = Path(self.log_dir) / ExperimentWriter.NAME_METRICS_FILE
        if file.exists():
            with file.open(newline="") as rows:
                self._kept = list(csv.DictReader(rows))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*Previous log files in this directory")
            super().experiment  # noqa: B018 - it deletes the file
        self._write(self._kept)

    def _write(self, rows: list[dict[str, str]]) -> None:
        writer: Any = self._experiment
        writer.metrics, writer.metrics_keys = [*rows], []
        writer.save()


class WandbJobLogger(WandbLogger):
    """Lightning's `WandbLogger` with one run per job, opened and closed by rank 0's process.

    Lightning relies on W&B to end a run when the interpreter exits. A forked worker does not exit
    that way and would lose every row it logged, and the next job of a sweep would write into the
    first job's run. Under spawn Lightning opens the run in the launching process; here only rank
    0's process ever has one. The id of the run is written to `wandb_run_id.txt` in `save_dir` as
    soon as it is known, so that a later job can continue the run.

    Args:
        **kwargs: for `WandbLogger`, which passes unknown ones to `wandb.init`.

    Raises:
        ValueError: (at the first use) W&B cannot open the run.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # Lightning 2.6.6 always passes it, and W&B 0.31 warns that it has no effect
        self._wandb_init.pop("anonymous", None)

    @property
    @override
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The open W&B run."""
        if self._experiment is None:
            self._open()
        return super().experiment

    def _open(self) -> None:
        import wandb  # here: importing it takes a second, which only this logger needs

        try:
            run = super().experiment
        except (wandb.Error, ValueError) as error:
            raise ValueError(
                f"W&B could not open a run: {str(error).rstrip('.')}. Without an account or a"
                " network use logger.wandb.mode=offline (`wandb sync` uploads such a run later) or"
                " disabled."
            ) from error
        self._wandb_init["id"] = run.id  # later rows, after the end, would continue this run
        if not run.disabled:
            (Path(self.save_dir or ".") / RUN_ID_FILE).write_text(f"{run.id}\n")

    @override
    def finalize(self, status: str) -> None:
        super().finalize(status)
        if self._experiment is not None:
            self._experiment.finish(exit_code=int(status == "failed"))
            self._experiment = None

    @override
    def __getstate__(self) -> dict[str, Any]:
        # without WandbLogger's state, which opens the run to pass it to the spawned process
        return dict(self.__dict__)
