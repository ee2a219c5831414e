"""A clean end: SIGTERM and Ctrl-C stop all ranks after the same step, with a checkpoint.

Lightning's own way does not do. Its SIGTERM handler sends a collective from wherever the process
happens to be, between others that are under way; Ctrl-C raises in the middle of a step, on every
rank in another one; and a forked rank that leaves by either exits with 0, for which its parent
waits for ever. Here a handler only takes a note:

1. Step 101: the launching process, which does not train, is sent SIGTERM and passes it on. The
   ranks take a note, each wherever it is.
2. The ranks agree. Strategies of ours let the note travel with their next exchange; under all
   others the ranks add up their notes after every step, in place of the broadcast that Lightning
   makes before every batch.
3. Step 102: all know. They save `last.ckpt`, callbacks and loggers let go of what they hold, and
   all leave with 128 + the signal's number, as a shell counts processes that a signal has ended.

Who hears it first says so, a strategy of ours which step will be the last, and rank 0 what a second
Ctrl-C costs until then: it ends everything at once. SIGTERM may come as often as it likes.
"""

from __future__ import annotations

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
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import (
    _MultiProcessingLauncher,
    _SubprocessScriptLauncher,
)
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.multiprocessing.spawn import ProcessExitedException
from typing_extensions import override

from lightning_commfree.strategies import ReplicaStrategy
from recipes.stages import is_first_rank
from recipes.training.report import CHECKPOINT_FOLDER

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_EXIT_CODES = tuple(128 + signum for signum in _SIGNALS)
_FIRST = (
    "\n{}: the run ends with a checkpoint, after the same step on all ranks."
    "\nA second Ctrl-C ends at once, without one: what was trained since the last is lost.\n"
)


class StopOnSignal(pl.Callback):
    """Ends a fit cleanly on SIGTERM and SIGINT. Put it behind the callbacks that see every step.

    Args:
        run_dir: the run's folder; `last.ckpt` goes where its other checkpoints are.
    """

    def __init__(self, run_dir: str) -> None:
        self._run_dir = run_dir
        self._pid = os.getpid()  # of the process whose handlers these are
        self._launcher: Any = None  # of other processes, in the one that launches them
        self._noted: signal.Signals | None = None
        self._interrupts = 0
        self._step = 0
        self._is_launched = False  # by another process, which has heard it too
        self._has_told = False

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the launcher, which has processes in it (spawn)."""
        return {**self.__dict__, "_launcher": None}

    @contextmanager
    def listening(self, trainer: pl.Trainer) -> Iterator[None]:
        """Take notes of signals in the body, in which `trainer.fit` is called.

        Raises:
            SystemExit: the fit was stopped; with 128 + the signal's number.
        """
        if threading.current_thread() is not threading.main_thread():
            yield  # Python lets no other thread have handlers
            return
        before = {signum: signal.getsignal(signum) for signum in _SIGNALS}
        self._launcher = trainer.strategy.launcher
        self._listen()
        try:
            yield
        except ProcessExitedException as error:
            raise self._as_exit(error) from error
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)

    # -- in a rank

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if os.getpid() != self._pid:  # launched by another process, which has handlers of its own
            self._pid, self._launcher, self._is_launched = os.getpid(), None, True
            self._listen()
        # Lightning's handler and its broadcast; when they are registered ours stays behind them,
        # and a strategy that puts a note of its own in their place does so later than this
        trainer._signal_connector._sigterm_notifier_fn = _nothing  # type: ignore[method-assign, assignment]
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = _nothing  # type: ignore[method-assign]

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._step = trainer.global_step
        if self._noted is not None:  # before the strategy could take a note
            signal.raise_signal(signal.SIGTERM)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any
    ) -> None:
        if trainer.global_step == self._step:
            return  # accumulation is not over, which most checkpoints do not hold
        self._step = trainer.global_step
        if not self._all_know(trainer):
            self._tell_cost(trainer)
            return
        if self._step >= trainer.max_steps:  # what is left is the report, and then nothing to go on
            trainer._signal_connector.received_sigterm = False
            return
        path = f"{self._run_dir}/{CHECKPOINT_FOLDER}/last.ckpt"
        trainer.save_checkpoint(path)
        signum = self._noted or signal.SIGTERM
        if trainer.is_global_zero:
            print(
                f"\nStopped by {signum.name} after step {self._step}; '{path}' is saved. To go on,"
                f" give the same command with hydra.run.dir='{self._run_dir}' ckpt_path=last",
                flush=True,
            )
        self._leave(trainer, pl_module, Stopped(_exit_code(trainer, signum)))

    def _tell_cost(self, trainer: pl.Trainer) -> None:
        """Say once, on rank 0, what a second Ctrl-C costs where the last step is not this one."""
        if self._noted is None or self._has_told or not trainer.is_global_zero:
            return
        self._has_told = True
        folder = Path(self._run_dir) / CHECKPOINT_FOLDER
        newest = max(folder.glob("*.ckpt"), key=lambda file: file.stat().st_mtime, default=None)
        lost = f"what follows '{newest}'" if newest else "all steps: there is no checkpoint yet"
        print(f"A second Ctrl-C would lose {lost}.", flush=True)

    def _all_know(self, trainer: pl.Trainer) -> bool:
        """Return whether any rank has a note; the same on all ranks after the same step."""
        if _asks_the_strategy(trainer):
            return trainer.received_sigterm
        if trainer.world_size == 1:
            return self._noted is not None
        notes = torch.tensor(float(self._noted is not None), device=trainer.strategy.root_device)
        dist.all_reduce(notes)
        return bool(notes)

    def _leave(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stopped: Stopped) -> None:
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        if isinstance(trainer.strategy.launcher, _MultiProcessingLauncher):
            # Lightning tells them in the launching process only, where they hold nothing
            for callback in callbacks:
                callback.on_exception(trainer, pl_module, stopped)
            for logger in trainer.loggers:
                logger.finalize("failed")
        for callback in callbacks:
            callback.teardown(trainer, pl_module, "fit")
        # the launching process ends all ranks when the first one leaves
        trainer.strategy.barrier("stopped")
        raise stopped

    # -- signals

    def _listen(self) -> None:
        signal.signal(signal.SIGTERM, self._on_signal)
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as nohup and `&` set it
            signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, signum: int, _: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # a process that was forked from this one and has no handlers of its own, such as one
            # that reads data: Ctrl-C is its parent's business
            if signum == signal.SIGTERM:
                _end_now(signum)
            return
        self._interrupts += signum == signal.SIGINT
        if self._interrupts > 1:
            if self._launcher is not None:
                self._launcher.kill(signal.SIGKILL)
            _end_now(signum)
        if self._noted is None:
            self._noted = signal.Signals(signum)
            if is_first_rank() and not self._is_launched:
                _write_now(_FIRST.format(self._noted.name))
            if self._launcher is not None:
                # never SIGINT: a terminal sends that to all processes by itself, and a rank would
                # take what is passed on for a second Ctrl-C
                self._launcher.kill(signal.SIGTERM)
            if signum == signal.SIGINT:
                signal.raise_signal(signal.SIGTERM)  # whoever else listens: the strategy

    def _as_exit(self, error: ProcessExitedException) -> BaseException:
        """Return the exit of a run whose rank has left with `error`, or `error` itself."""
        if self._noted is None:
            return SystemExit(error.exit_code) if error.exit_code in _EXIT_CODES else error
        if error.exit_code not in _EXIT_CODES:
            print(f"Stopped by {self._noted.name} before the first step; nothing was saved.")
        return SystemExit(128 + self._noted)


class Stopped(SIGTERMException):
    """All ranks have stopped after the same step and have saved; a `SystemExit`."""


def _asks_the_strategy(trainer: pl.Trainer) -> bool:
    ours = isinstance(trainer.strategy, ReplicaStrategy)
    return ours and trainer.world_size > 1


def _exit_code(trainer: pl.Trainer, signum: signal.Signals) -> int:
    # a rank that another rank's process has launched: Lightning kills the first at once when the
    # second leaves with an error, whatever it is doing
    strategy = trainer.strategy
    is_launched = (
        isinstance(strategy.launcher, _SubprocessScriptLauncher)
        and isinstance(strategy, ParallelStrategy)
        and isinstance(strategy.cluster_environment, LightningEnvironment)
        and trainer.local_rank != 0
    )
    return 0 if is_launched else 128 + signum


def _write_now(text: str) -> None:
    """Write from a signal's handler: not by `print`, in the middle of which it may have come."""
    try:
        file = sys.stdout.fileno()
    except (OSError, ValueError):  # of a notebook, whose output is no file
        file = 1
    os.write(file, text.encode())


def _end_now(signum: int) -> None:
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)


def _nothing(*_: object) -> None:
    pass
