"""Clean stops: SIGTERM and Ctrl-C end all ranks after the same step, with a checkpoint.

Lightning's own handlers do not work here. Its SIGTERM handler starts a collective wherever the
process happens to be, possibly between other collectives; Ctrl-C raises in the middle of a step, a
different one on every rank; and a forked rank that exits by either returns 0, so its parent waits
forever. Here a handler only sets a flag:

1. Step 101: the launching process, which does not train, receives SIGTERM and forwards it. Each
   rank sets its flag.
2. The ranks agree. Strategies of this project send the flag with their next exchange; under other
   strategies the ranks reduce their flags after every step, instead of Lightning's broadcast before
   every batch.
3. Step 102: all ranks know. They save `last.ckpt`, callbacks and loggers close their files, and the
   run exits with 128 + the signal's number, as shells report processes ended by a signal.

A signal to an elastic replica ends only that replica, and only the first replica saves.

The first process to receive the signal prints it, strategies of this project print which step will
be the last, and rank 0 prints the cost of a second Ctrl-C, which ends everything at once, and the
command that resumes. Further SIGTERMs have no effect.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.strategies.launchers import (
    _MultiProcessingLauncher,
    _SubprocessScriptLauncher,
)
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.multiprocessing.spawn import ProcessExitedException
from typing_extensions import override

from lightning_commfree import ElasticDiLoCoStrategy
from lightning_commfree.strategies import ReplicaStrategy
from recipes.stages import is_first_rank
from recipes.training.report import CHECKPOINT_FOLDER
from recipes.training.resume import resume_command
from recipes.training.summary import shown

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_EXIT_CODES = tuple(128 + signum for signum in _SIGNALS)
_FIRST = (
    "\n{}: the run ends with a checkpoint, after the same step on all ranks."
    "\nA second Ctrl-C ends it at once, losing all steps since the last checkpoint.\n"
)
_FIRST_ELASTIC = (
    "\n{}: this replica leaves the job after its current step, and the others continue."
    "\nA second Ctrl-C ends it at once.\n"
)


class StopOnSignal(pl.Callback):
    """End a fit cleanly on SIGTERM and SIGINT. Must come after callbacks that run at every step.

    Args:
        run_dir: the run's folder; `last.ckpt` is saved with its other checkpoints.
    """

    def __init__(self, run_dir: str) -> None:
        self._run_dir = run_dir
        self._pid = os.getpid()  # of the process that owns the handlers
        self._launcher: Any = None  # of the ranks; None in a rank
        self._received: signal.Signals | None = None
        # the first signal on this machine: ranks receive their launcher's SIGINT as SIGTERM
        self._first = multiprocessing.RawValue("i", 0)
        self._resume = resume_command(run_dir)  # here: a spawned rank has another command line
        self._first_words = _FIRST
        self._interrupts = 0
        self._step = 0
        self._is_launched = False  # by another process, which has received it too
        self._cost_printed = False

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the launcher, whose processes cannot be pickled (spawn)."""
        return {**self.__dict__, "_launcher": None}

    @contextmanager
    def listening(self, trainer: pl.Trainer) -> Iterator[None]:
        """Handle signals during the body, which calls `trainer.fit`.

        Raises:
            SystemExit: the fit was stopped; its code is 128 + the signal's number.
        """
        if threading.current_thread() is not threading.main_thread():
            yield  # Python allows handlers only in the main thread
            return
        before = {signum: signal.getsignal(signum) for signum in _SIGNALS}
        self._launcher = trainer.strategy.launcher
        if isinstance(trainer.strategy, ElasticDiLoCoStrategy):
            self._first_words = _FIRST_ELASTIC
        self._listen()
        try:
            yield
        except ProcessExitedException as error:
            raise self._exit_for(error) from error
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)

    # -- in a rank

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if os.getpid() != self._pid:  # launched by another process, which has its own handlers
            self._pid, self._launcher, self._is_launched = os.getpid(), None, True
            self._listen()
        # replaces Lightning's handler and its broadcast; a strategy that installs its own handler
        # does so later than this
        trainer._signal_connector._sigterm_notifier_fn = _nothing  # type: ignore[method-assign, assignment]
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = _nothing  # type: ignore[method-assign]

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._step = trainer.global_step
        if self._received is not None:  # before the strategy could set its flag
            signal.raise_signal(signal.SIGTERM)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any
    ) -> None:
        if trainer.global_step == self._step:
            return  # gradients are still being accumulated, which most checkpoints do not contain
        self._step = trainer.global_step
        if not self._any_rank_received(trainer):
            self._print_cost(trainer)
            return
        if self._step >= trainer.max_steps:  # only the report is left, and nothing to resume
            trainer._signal_connector.received_sigterm = False
            return
        path = f"{self._run_dir}/{CHECKPOINT_FOLDER}/last.ckpt"
        trainer.save_checkpoint(path)
        signum = signal.Signals(self._first.value or signal.SIGTERM)
        if trainer.is_global_zero:
            print(
                f"\nStopped by {signum.name} after step {self._step}; {self._then(trainer, path)}",
                flush=True,
            )
        self._leave(trainer, pl_module, Stopped(_exit_code(trainer, signum)))

    def _print_cost(self, trainer: pl.Trainer) -> None:
        """Print once, on rank 0, the cost of a second Ctrl-C before the last step."""
        elastic = isinstance(trainer.strategy, ElasticDiLoCoStrategy)  # its steps are in the store
        if self._received is None or self._cost_printed or elastic or not trainer.is_global_zero:
            return
        self._cost_printed = True
        folder = Path(self._run_dir) / CHECKPOINT_FOLDER
        newest = max(folder.glob("*.ckpt"), key=lambda file: file.stat().st_mtime, default=None)
        lost = f"all steps after '{newest}'" if newest else "all steps: there is no checkpoint yet"
        print(f"A second Ctrl-C would lose {lost}.", flush=True)

    def _then(self, trainer: pl.Trainer, path: str) -> str:
        """Return how to continue a run that has stopped after saving `path`."""
        if isinstance(trainer.strategy, ElasticDiLoCoStrategy):
            return "the other replicas continue. To join them again, run the same command."
        return f"'{shown(path)}' is saved. {self._resume}"

    def _any_rank_received(self, trainer: pl.Trainer) -> bool:
        """Return whether any rank has its flag set; the same on all ranks after the same step."""
        if _strategy_agrees(trainer):
            return trainer.received_sigterm
        if trainer.world_size == 1:
            return self._received is not None
        flags = torch.tensor(float(self._received is not None), device=trainer.strategy.root_device)
        dist.all_reduce(flags)
        return bool(flags)

    def _leave(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stopped: Stopped) -> None:
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if isinstance(trainer.strategy.launcher, _MultiProcessingLauncher):
            # Lightning notifies them only in the launching process, where they have nothing open
            for callback in callbacks:
                callback.on_exception(trainer, pl_module, stopped)
            for logger in trainer.loggers:
                logger.finalize("failed")
        for callback in callbacks:
            callback.teardown(trainer, pl_module, "fit")
        # the launching process ends all ranks when the first one exits
        trainer.strategy.barrier("stopped")
        raise stopped

    # -- signals

    def _listen(self) -> None:
        signal.signal(signal.SIGTERM, self._on_signal)
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as set by nohup and `&`
            signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, signum: int, _: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # a process forked from this one without its own handlers, such as a data worker: its
            # parent handles Ctrl-C
            if signum == signal.SIGTERM:
                _end_now(signum)
            return
        self._interrupts += signum == signal.SIGINT
        if self._interrupts > 1:
            if self._launcher is not None:
                self._launcher.kill(signal.SIGKILL)
            _end_now(signum)
        if self._received is None:
            self._received = signal.Signals(signum)
            self._first.value = self._first.value or signum
            if is_first_rank() and not self._is_launched:
                _write_now(self._first_words.format(self._received.name))
            if self._launcher is not None:
                # never SIGINT: a terminal sends it to all processes itself, and a rank would take
                # the forwarded one for a second Ctrl-C
                self._launcher.kill(signal.SIGTERM)
            if signum == signal.SIGINT:
                signal.raise_signal(signal.SIGTERM)  # previous handlers, such as the strategy's

    def _exit_for(self, error: ProcessExitedException) -> BaseException:
        """Return the exit of a run whose rank exited with `error`, or `error` itself."""
        if self._received is None:
            return SystemExit(error.exit_code) if error.exit_code in _EXIT_CODES else error
        if error.exit_code not in _EXIT_CODES:
            print(f"Stopped by {self._received.name} before the first step; nothing was saved.")
        return SystemExit(128 + self._received)


class Stopped(SIGTERMException):
    """The exit of a run whose ranks have all stopped after the same step and saved."""


def _strategy_agrees(trainer: pl.Trainer) -> bool:
    ours = isinstance(trainer.strategy, ReplicaStrategy)
    return ours and trainer.world_size > 1


def _exit_code(trainer: pl.Trainer, signum: signal.Signals) -> int:
    # Lightning's launcher and `srun --kill-on-bad-exit` kill the first rank as soon as another one
    # exits with an error, even if the first is still closing its loggers' files
    environment = getattr(trainer.strategy, "cluster_environment", None)
    is_first = True
    if isinstance(environment, SLURMEnvironment):
        is_first = trainer.is_global_zero  # srun exits with the largest code of all ranks
    elif isinstance(trainer.strategy.launcher, _SubprocessScriptLauncher):
        is_first = not isinstance(environment, LightningEnvironment) or trainer.local_rank == 0
    return 128 + signum if is_first else 0


def _write_now(text: str) -> None:
    """Write from a signal handler; `print` is not reentrant."""
    try:
        file = sys.stdout.fileno()
    except (OSError, ValueError):  # a notebook's output is not a file
        file = 1
    os.write(file, text.encode())


def _end_now(signum: int) -> None:
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)


def _nothing(*_: object) -> None:
    pass
