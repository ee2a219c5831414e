"""What loggers need beyond Lightning: the whole configuration, one CSV file or W&B run per job."""

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
    """Hands the configuration to every logger as hyperparameters, when the fit begins.

    In the process that trains: a logger that has opened its files or its run before a fork would
    lose what is written after it.

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
    """Lightning's `CSVLogger` with one file per job: a job that is resumed goes on in it.

    Lightning's begins a new folder, or deletes the file that is there. Here the rows before the
    first step that is logged again are kept, whatever the job had logged behind its checkpoint.

    Args:
        save_dir: the run's folder.
        name: of a folder in it.
    """

    def __init__(self, save_dir: str, name: str = "csv") -> None:
        super().__init__(save_dir, name, version=0)
        self._kept: list[dict[str, str]] = []  # rows of the run that is resumed

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
    """Lightning's `WandbLogger` with one run per job, opened and closed by the process of rank 0.

    Lightning's leaves the end of a run to W&B, which sees to it when an interpreter exits. A forked
    worker leaves without that, and every row that it logged would be lost; and the next job of a
    sweep would write into the first one's run. Under spawn Lightning opens the run in the process
    that launches; here no process but rank 0's ever has one. The run's id is written to
    `wandb_run_id.txt` in `save_dir` as soon as there is one, for a later job to go on with it.

    Args:
        **kwargs: of `WandbLogger`; what it does not know goes to `wandb.init`.

    Raises:
        ValueError: (at the first use) W&B cannot open the run.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # Lightning 2.6.6 hands it on always, and W&B 0.31 then warns that it means nothing any more
        self._wandb_init.pop("anonymous", None)

    @property
    @override
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The open run, W&B's own object."""
        if self._experiment is None:
            self._open()
        return super().experiment

    def _open(self) -> None:
        import wandb  # in here: a second that only those who use it shall wait for

        try:
            run = super().experiment
        except (wandb.Error, ValueError) as error:
            raise ValueError(
                f"W&B could not open a run: {str(error).rstrip('.')}. Without an account or a"
                " network take logger.wandb.mode=offline (`wandb sync` uploads such a run later) or"
                " disabled."
            ) from error
        self._wandb_init["id"] = run.id  # what is logged after the end would go on with this run
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
        # not WandbLogger's, which opens the run to hand it to the spawned process
        return dict(self.__dict__)
