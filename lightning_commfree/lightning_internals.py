"""Every private name of Lightning that this package uses, and what is lost without it.

A later release may rename what is not public. When a fit begins, `probe` looks for names that the
installed Lightning lacks, and one warning says what is disabled. Nothing else is: importing never
fails, and a fresh fit and a resume at the end of an epoch work without any of these names.

For some things Lightning has no hook; there a function runs around a method of one object, while a
fit runs (`Patches`). Where two functions are put around the same method, the later one is outside:

=============================== ===================================================================
method                          functions, from the inside to the outside
=============================== ===================================================================
trainer.save_checkpoint         agree to stop, then show the shared weights (`local_weights`)
fit_loop.setup_data             equally many batches on all ranks (`stopping`)
epoch_loop.on_run_start         note random numbers (`resume.data_position`); hold wishes to stop,
                                and check the first batch (`stopping`)
epoch_loop.on_advance_end       hold wishes to stop ahead of a validation (`stopping`)
fit_loop.on_advance_end         agree to stop after an epoch (`stopping`)
strategy.process_dataloader     note random numbers (`resume.data_position`)
three of the signal connector   SIGTERM without a broadcast per batch (`handle_signals`)
logger_connector.log_metrics    figures of communication in the loggers' rows (`add_to_rows`)
callbacks of `WeightAveraging`  average the shared weights (`local_weights`)
precision.clip_grad_by_norm     clip by the norm of the whole gradient (`inside.domino`)
=============================== ===================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from operator import attrgetter
from typing import Any, NamedTuple, cast

import lightning
import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.imports import RequirementCache
from lightning_utilities.core.rank_zero import rank_zero_warn


class Patches:
    """Functions in place of methods of single objects, from `put` to `remove`.

    They must be put in the process that trains: a patched object does not pickle.
    """

    def __init__(self) -> None:
        self._put: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Let `owner.name` be `function`; on other objects of its class nothing changes."""
        assert callable(getattr(owner, name)), f"{owner} has no method {name}"
        self._put.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, function)

    def remove(self) -> None:
        """Give the objects their own methods back."""
        for owner, name, before in reversed(self._put):
            vars(owner).pop(name, None)
            if before is not None:  # another function had been put there
                setattr(owner, name, before)
        self._put = []


_LAUNCHERS = "lightning.pytorch.strategies.launchers"
_CALL = "lightning.pytorch.trainer.call"


class Feature(NamedTuple):
    """A use of some private names.

    Attributes:
        lost: what is disabled where one of them is missing.
        names: attributes, starting from the Trainer, or from a module: "module:name". "name=value"
            is only written: its owner must understand the value.
    """

    lost: str
    names: tuple[str, ...]

    def missing(self, trainer: pl.Trainer | None) -> list[str]:
        """Return the missing names; the Trainer may be None where all start from a module."""
        return [name for name in self.names if not _is_there(trainer, name)]

    def works(self, trainer: pl.Trainer | None) -> bool:
        """Return whether no name is missing."""
        return not self.missing(trainer)


SIGTERM = Feature(
    "one stop of all ranks after SIGTERM, and steps without Lightning's broadcast per batch",
    (
        "fit_loop.epoch_loop._broadcast_sigterm_tensor",
        "_signal_connector._sigterm_notifier_fn",
        "_signal_connector._slurm_sigusr_handler_fn",
        "_signal_connector.received_sigterm",
    ),
)
ROWS = Feature(
    "our figures in the loggers' rows (`strategy.figures()` has them)",
    ("_logger_connector.log_metrics", "_logger_connector._logged_metrics"),
)
LAUNCH = Feature(
    "an orderly end of forked and spawned ranks (after SIGTERM their launcher may wait for ever),"
    " and mistakes that are told before ranks start",
    (
        f"{_LAUNCHERS}:_MultiProcessingLauncher._wrapping_function",
        f"{_LAUNCHERS}:_MultiProcessingLauncher._recover_results_in_main_process",
        f"{_CALL}:_interrupt",
        "lightning.pytorch:Trainer._teardown",
    ),
)
MID_EPOCH = Feature(
    "exact resume in the middle of an epoch: data begin again there",
    (
        "fit_loop._data_fetcher",
        "fit_loop._restart_stage=restarted_mid_epoch",
        "fit_loop.epoch_loop._restart_stage=restarted_on_last",
        "fit_loop.epoch_loop.val_loop._restart_stage=restarted_mid_evaluation",
        "fit_loop.epoch_loop._batches_that_stepped",
        "fit_loop.epoch_loop._should_check_val_fx",
    ),
)
LOADERS = Feature(
    "the place of data loaders whose state only pickle can load, at a resume",
    ("fit_loop._combined_loader_states_to_load",),
)
RELOAD = Feature(
    "the rhythm of `reload_dataloaders_every_n_epochs` after a resume",
    ("fit_loop._last_train_dl_reload_epoch",),
)
COMPILED = Feature(
    "an error that says why a compiled LightningModule cannot be divided",
    ("lightning_module._compiler_ctx",),
)
TIMED = Feature(
    "the refusal of a time as `val_check_interval`, at which ranks may wait for each other",
    ("_val_check_time_interval",) if RequirementCache("lightning>=2.6.0") else (),
)
EPOCHS = Feature(
    "epochs of equally many batches on all ranks: give all of them equally many, or they hang",
    ("fit_loop._combined_loader", "fit_loop._data_fetcher"),
)
GROUPS = Feature("`replica_size` and `node_size` above 1", ("strategy._ddp_kwargs",))
FEATURES = tuple(value for value in [*vars().values()] if isinstance(value, Feature))


def probe(trainer: pl.Trainer) -> None:
    """Warn once if this Lightning lacks names, and say what is disabled; when a fit begins."""
    lacks = {feature.lost: names for feature in FEATURES if (names := feature.missing(trainer))}
    if lacks:
        lost = "; ".join(f"{what} (no {', '.join(names)})" for what, names in lacks.items())
        rank_zero_warn(
            "lightning_commfree does not support some internals of Lightning"
            f" {lightning.__version__}. Disabled for this fit: {lost}. A later version of"
            " lightning_commfree may support them."
        )


def _is_there(trainer: pl.Trainer | None, name: str) -> bool:
    module, _, path = name.rpartition(":")
    path, _, value = path.partition("=")
    try:
        before = attrgetter(path)(import_module(module) if module else trainer)
        if not value:
            return True
        owner, _, last = path.rpartition(".")
        loop = attrgetter(owner)(trainer)
        setattr(loop, last, value)
        understood = bool(getattr(loop, value, False))  # a property that says whether it has it
        setattr(loop, last, before)
    except (ImportError, AttributeError):
        return False
    return understood


# -- functions in place of Lightning's methods, while a fit runs


def handle_signals(
    trainer: pl.Trainer, patches: Patches, sigterm: Callable[..., None], slurm: Callable[..., None]
) -> None:
    """Let these handle SIGTERM and SLURM's signal; Lightning broadcasts nothing per batch."""
    if SIGTERM.works(trainer):
        connector = trainer._signal_connector
        patches.put(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", lambda: None)
        patches.put(connector, "_sigterm_notifier_fn", sigterm)
        patches.put(connector, "_slurm_sigusr_handler_fn", slurm)


def tell_sigterm(trainer: pl.Trainer) -> None:
    """Tell the Trainer that SIGTERM was received: it ends the fit after this step."""
    trainer._signal_connector.received_sigterm = True


def add_to_rows(
    trainer: pl.Trainer, patches: Patches, more: Callable[[Mapping[str, Any]], Mapping[str, Any]]
) -> None:
    """Add the result of `more` to the loggers' rows of metrics, and to nothing else."""
    if not ROWS.works(trainer):
        return
    connector = trainer._logger_connector
    log = connector.log_metrics

    def log_row(metrics: dict[str, Any], step: int | None = None) -> None:
        own = more(metrics) if metrics and step is None else {}  # with a step: a callback's
        log({**metrics, **own}, step)
        for name in own:
            connector._logged_metrics.pop(name, None)

    patches.put(connector, "log_metrics", log_row)


_Launcher: Any = getattr(import_module(_LAUNCHERS), "_MultiProcessingLauncher", object)


class _Left(NamedTuple):
    """What a rank that ended without a result puts in its place."""

    by_sigterm: bool


class OrderlyLauncher(_Launcher):  # type: ignore[misc]
    """Lightning's launcher of processes; it ends with `SystemExit` where the ranks did so."""

    def _wrapping_function(
        self, process_idx: int, trainer: pl.Trainer | None, *args: Any, **kwargs: Any
    ) -> None:
        try:
            super()._wrapping_function(process_idx, trainer, *args, **kwargs)
        except SystemExit as end:
            by_sigterm = isinstance(end, SIGTERMException)
            if trainer is not None and by_sigterm:  # all ranks end after the same step
                import_module(_CALL)._interrupt(trainer, end)
                trainer._teardown()
            if process_idx == 0 and not end.code:  # else the launching process sees the code
                return_queue = args[3]  # behind a function, its arguments and its keyword arguments
                return_queue.put(_Left(by_sigterm))
            raise

    def _recover_results_in_main_process(self, worker_output: Any, trainer: pl.Trainer) -> None:
        if not isinstance(worker_output, _Left):
            super()._recover_results_in_main_process(worker_output, trainer)
            return
        # `on_exception` has run on the ranks; here the model is untrained: do not save it
        patches: Patches = cast(Any, trainer.strategy).patches
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            patches.put(callback, "on_exception", lambda *_: None)
        raise SIGTERMException if worker_output.by_sigterm else SystemExit


def orderly(
    launcher: Any, strategy: Any, start_method: str, check: Callable[[pl.Trainer | None], None]
) -> Any:
    """Return a launcher whose ranks leave in order, in place of Lightning's.

    1. SIGTERM comes to a forked or spawned rank. All ranks stop after the same step and end by
       `SIGTERMException`, which leaves a process with exit code 0.
    2. Lightning's launcher finds that all have ended well and waits for the result of the first one
       for ever. No `on_exception` hook has run: Lightning calls them where it launches.

    Here the ranks run the hooks, which save what they save; the first rank says that it leaves
    without a result; and the launching process ends as the ranks did (`OrderlyLauncher`).

    Args:
        launcher: Lightning's; None: the ranks have been started by others.
        strategy: whose ranks start. It pickles, as a module that has its Trainer does.
        start_method: "popen", "fork", "spawn" or "forkserver".
        check: called in the launching process first: what cannot be trained is refused at once, and
            once.
    """
    if launcher is None or not LAUNCH.works(None):
        return launcher
    if start_method != "popen":
        launcher = OrderlyLauncher(strategy, start_method)
    launcher.launch = partial(_check_and_launch, check, launcher.launch)
    return launcher


def _check_and_launch(
    check: Callable[[pl.Trainer | None], None],
    launch: Callable[..., Any],
    function: Any,
    *args: Any,
    trainer: pl.Trainer | None = None,
    **kwargs: Any,
) -> Any:
    check(trainer)
    return launch(function, *args, trainer=trainer, **kwargs)


def data_fetcher(trainer: pl.Trainer) -> Any:
    """Return what hands out the training batches; None until there are loaders.

    They are set up after `on_fit_start`, in which a learning-rate finder saves.
    """
    return trainer.fit_loop._data_fetcher


def restart_in_mid_epoch(trainer: pl.Trainer) -> None:
    """Let the loops begin after a batch of an epoch."""
    loop = trainer.fit_loop
    loop.restarting = True  # Lightning sets it, except where it takes the epoch for finished
    loop._restart_stage = "restarted_mid_epoch"
    loop.epoch_loop._restart_stage = "restarted_on_last"


def validate_first(trainer: pl.Trainer) -> bool:
    """Run the validation that was due after the latest batch; return whether one was."""
    epoch_loop = trainer.fit_loop.epoch_loop
    due = epoch_loop._should_check_val_fx(data_fetcher(trainer))
    if due:
        epoch_loop.val_loop.restarting = False
        epoch_loop.val_loop._restart_stage = "restarted_mid_evaluation"
    return due


def count_step(trainer: pl.Trainer) -> None:
    """Count a step in the loggers' rows."""
    trainer.fit_loop.epoch_loop._batches_that_stepped += 1


def loaded_later(trainer: pl.Trainer) -> list[dict[str, Any]]:
    """Return the states of loaders that Lightning would load, and keep it from doing so."""
    states: list[dict[str, Any]] = []
    if LOADERS.works(trainer):
        states = trainer.fit_loop._combined_loader_states_to_load
        trainer.fit_loop._combined_loader_states_to_load = []
    return states


def reloaded_at(trainer: pl.Trainer, epoch: int) -> None:
    """Let the training loaders count as reloaded at this epoch."""
    if RELOAD.works(trainer):
        trainer.fit_loop._last_train_dl_reload_epoch = epoch


def is_compiled(module: pl.LightningModule) -> bool:
    """Return whether `torch.compile` has compiled it."""
    return getattr(module, "_compiler_ctx", None) is not None


def validation_seconds(trainer: pl.Trainer) -> float | None:
    """Return the time between validations, None where batches are counted."""
    return getattr(trainer, "_val_check_time_interval", None)


def set_ddp_group(strategy: Any, group: Any | None) -> None:
    """Let DDP average gradients within a process group, None: in the world.

    Raises:
        RuntimeError: this Lightning has no way to tell DDP.
    """
    try:
        strategy._ddp_kwargs["process_group"] = group
    except AttributeError as error:
        if group is not None:
            raise RuntimeError(
                f"This version of Lightning does not support {GROUPS.lost}."
            ) from error


def data_used_up(trainer: pl.Trainer) -> bool:
    """Return whether the latest batch that was read is the epoch's last one."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    return progress.is_last_batch or progress.current.ready >= trainer.num_training_batches


def may_stop_early(trainer: pl.Trainer, uncounted: int = 0) -> bool:
    """Return whether `min_epochs` and `min_steps` are reached.

    Args:
        trainer: in its fit.
        uncounted: optimizer steps that the Trainer has not counted yet.
    """
    loop, steps = trainer.fit_loop, trainer.global_step + uncounted
    epoch: Any = loop.epoch_progress.current
    return epoch.processed >= (loop.min_epochs or 0) and steps >= (loop.min_steps or 0)


def accumulates(trainer: pl.Trainer) -> bool:
    """Return whether no optimizer step follows the latest batch that was read."""
    ready = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    return ready % trainer.accumulate_grad_batches != 0 and not data_used_up(trainer)


def steps_to_come(trainer: pl.Trainer) -> int | None:
    """Return how many steps the fit still takes at most; None if that is unknown.

    With manual optimization these are batches, each of which may step. `max_steps` says nothing of
    them then: it counts the steps of every optimizer.
    """
    manual = not trainer.lightning_module.automatic_optimization
    total = trainer.estimated_stepping_batches
    if not math.isfinite(total) or total < 0 or (manual and trainer.max_steps != -1):
        return None
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress.total
    return max(int(total) - (batches.processed if manual else trainer.global_step), 0)


def in_accumulation(trainer: pl.Trainer) -> bool:
    """Return whether there are gradients of batches whose optimizer step is still to come."""
    batch: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    stepped = batch.processed == batch.ready and not accumulates(trainer)
    return not stepped and bool(batch.processed % trainer.accumulate_grad_batches)


def limit_epochs(trainer: pl.Trainer, batches: int) -> None:
    """Lower the batches of an epoch that Lightning has found in its training loaders."""
    loop = trainer.fit_loop
    loop.max_batches = batches
    loader, fetcher = loop._combined_loader, loop._data_fetcher
    assert loader is not None, "the loaders are set up"
    if loader.limits is not None:
        loader.limits = [min(limit, batches) for limit in loader.limits]
    if fetcher is not None:
        fetcher.length = batches  # of the iterator that is there; later ones follow the limits
    every = trainer.val_check_interval
    if isinstance(every, float) and trainer.val_check_batch not in (None, math.inf):
        trainer.val_check_batch = max(1, int(batches * every))  # as `setup_data` computes it


def is_last_batch(trainer: pl.Trainer) -> bool:
    """Return whether the latest batch is the last one of this rank's data."""
    return trainer.fit_loop.epoch_loop.batch_progress.is_last_batch


def end_epoch_after_this_batch(trainer: pl.Trainer) -> None:
    """Make the latest batch the epoch's last one."""
    trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = True


def has_no_batch(trainer: pl.Trainer) -> bool:
    """Return whether a loader without a length, from which Lightning reads ahead, had no batch."""
    fetched = getattr(data_fetcher(trainer), "batches", None)
    return fetched is not None and not fetched
