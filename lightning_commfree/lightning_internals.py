"""All uses of private Lightning names, and the features that are lost if a name is missing.

A later release of Lightning may rename them. When a fit begins, `probe` checks for missing names,
and a single warning lists the disabled features. Importing never fails, and neither a fresh fit nor
a resume at the end of an epoch needs any of these names, except if DDP averages gradients within a
replica or node (`GROUPS`).

Where Lightning has no hook, a function wraps a method of one object during a fit (`Patches`). If
several functions wrap the same method, the one applied last is outermost:

=============================== ===================================================================
method                          wrappers, innermost first
=============================== ===================================================================
trainer.save_checkpoint         agree to stop and swap in the shared weights (`fit.local_weights`);
                                check that all ranks save after the same step (`fit.session`); save
                                on one elastic replica only (`elastic.strategy`)
fit_loop.setup_data             use the same number of batches on all ranks (`fit.stopping`)
epoch_loop.on_run_start         begin an epoch with the saved order (`resume.data_position`); defer
                                stop requests and check the first batch (`fit.stopping`)
epoch_loop.reset                hide a warning about loaders (`hide_resume_warning`)
epoch_loop.on_advance_end       defer stop requests before a validation (`fit.stopping`)
fit_loop.on_advance_end         agree to stop after an epoch (`fit.stopping`)
val_loop.on_run_start           tell the session that a validation begins (`fit.session`)
val_loop.on_run_end             tell it that the validation has ended (`fit.session`)
automatic_optimization.         notice a batch without an optimizer step (`around_steps`)
_optimizer_step
epoch_loop._should_check_val_fx validate on one elastic replica only (`elastic.strategy`)
setup_data of evaluation loops  compare the numbers of batches of ranks that share a model
                                (`fit.evaluation`)
two methods of the checkpoint   find the checkpoint on any rank's disk (`around_loading`)
connector
two methods of the signal       handle SIGTERM for all ranks (`handle_signals`); leave an elastic
connector                       job (`when_terminated`)
epoch_loop.                     no broadcast per batch (`handle_signals`)
_broadcast_sigterm_tensor
logger_connector.log_metrics    add communication metrics to the loggers' rows (`add_to_rows`)
callbacks of `WeightAveraging`  average the shared weights (`fit.local_weights`)
precision.clip_grad_by_norm     clip by the norm of the full gradient
                                (`layouts.tensor_parallel`)
callbacks' `on_exception`       save only if all ranks stop after the same step (`fit.signals`); do
                                nothing in the process that launched the ranks (`CleanExitLauncher`)
module.cpu                      leave a model without values on `meta` after an error (`fit.base`)
=============================== ===================================================================
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from importlib.metadata import version
from operator import attrgetter
from typing import Any, NamedTuple, cast

from lightning_utilities.core.imports import RequirementCache
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_commfree.host import HOST, VARIABLE, SIGTERMException, pl


class Patches:
    """Replaces methods of individual objects, and restores them later.

    Patch only in the training process, because a patched object cannot be pickled.
    """

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Replace the method `name` on `owner`, leaving other instances of its class unchanged."""
        assert callable(getattr(owner, name)), f"{owner} has no method {name}"
        self._replaced.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, function)

    def remove(self) -> None:
        """Restore all replaced methods."""
        for owner, name, before in reversed(self._replaced):
            vars(owner).pop(name, None)
            if before is not None:  # an earlier patch of the same object
                setattr(owner, name, before)
        self._replaced = []


_LAUNCHERS = f"{pl.__name__}.strategies.launchers"
_CALL = f"{pl.__name__}.trainer.call"


class Feature(NamedTuple):
    """A feature that depends on private Lightning names."""

    lost: str  # description of the feature, for the warning that it is disabled
    # Attribute paths that start at the Trainer, or at a module as "module:name". A name with
    # "=value" is checked by writing the value: its owner must accept it.
    names: tuple[str, ...]

    def missing(self, trainer: pl.Trainer | None) -> list[str]:
        """Return the entries of `names` that the installed version of Lightning does not have.

        `trainer` is the Trainer to search, or None if all names start at a module.
        """
        return [name for name in self.names if not _exists(trainer, name)]

    def works(self, trainer: pl.Trainer | None) -> bool:
        """Return whether Lightning has all private names that this feature needs."""
        return not self.missing(trainer)


SIGTERM = Feature(
    "stopping all ranks together after SIGTERM, without Lightning's broadcast per batch",
    (
        "fit_loop.epoch_loop._broadcast_sigterm_tensor",
        "_signal_connector._sigterm_notifier_fn",
        "_signal_connector._slurm_sigusr_handler_fn",
        "_signal_connector.received_sigterm",
    ),
)
ROWS = Feature(
    "communication metrics in the loggers' rows (`strategy.figures()` still returns them)",
    ("_logger_connector.log_metrics", "_logger_connector._logged_metrics"),
)
LAUNCH = Feature(
    "clean exits of forked and spawned ranks (after SIGTERM their launcher may wait forever), and"
    " checks of settings before ranks are launched",
    (
        f"{_LAUNCHERS}:_MultiProcessingLauncher._wrapping_function",
        f"{_LAUNCHERS}:_MultiProcessingLauncher._recover_results_in_main_process",
        f"{_CALL}:_interrupt",
        f"{pl.__name__}:Trainer._teardown",
    ),
)
MID_EPOCH = Feature(
    "exact resume in the middle of an epoch (the epoch's data starts over)",
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
    "restoring the position of data loaders whose state needs pickle",
    ("fit_loop._combined_loader_states_to_load",),
)
LOADING = Feature(
    "sending checkpoints to machines that have none (copy them there before you resume)",
    ("_checkpoint_connector.resume_start", "_checkpoint_connector.resume_end"),
)
RELOAD = Feature(
    "the schedule of `reload_dataloaders_every_n_epochs` after a resume",
    ("fit_loop._last_train_dl_reload_epoch",),
)
STEPS = Feature(
    "noticing that an overridden `optimizer_step` has left out a step",
    ("fit_loop.epoch_loop.automatic_optimization._optimizer_step",),
)
METRICS = Feature(
    "the message that metrics are not restored after a resume in the middle of an epoch",
    ("fit_loop.epoch_loop._results",),
)
COMPILED = Feature(
    "a clear error for a compiled LightningModule, which cannot be sharded",
    ("lightning_module._compiler_ctx",),
)
TIMED = Feature(
    "the error that rejects a time interval as `val_check_interval`, because ranks may deadlock",
    ("_val_check_time_interval",) if RequirementCache(f"{HOST}>=2.6.0") else (),
)
EPOCHS = Feature(
    "equalizing epochs across ranks (give all ranks the same number of batches, or they hang)",
    ("fit_loop._combined_loader", "fit_loop._data_fetcher"),
)
GROUPS = Feature("`replica_size` and `node_size` above 1", ("strategy._ddp_kwargs",))
WORLD = Feature(
    "gloo between machines for Lightning's own collectives (set `NCCL_SOCKET_IFNAME` for GPUs)",
    ("strategy._process_group_backend",),
)
FEATURES = tuple(value for value in [*vars().values()] if isinstance(value, Feature))


def probe(trainer: pl.Trainer) -> None:
    """Warn once, when a fit begins, about features that do not work with this Lightning version."""
    missing = {feature.lost: names for feature in FEATURES if (names := feature.missing(trainer))}
    if missing:
        lost = "; ".join(f"{what} (no {', '.join(names)})" for what, names in missing.items())
        rank_zero_warn(
            f"lightning_commfree is not fully compatible with Lightning {version(HOST)}. Disabled"
            f" for this fit: {lost}. A later version of lightning_commfree may support them."
        )


def _exists(trainer: pl.Trainer | None, name: str) -> bool:
    """Return whether Lightning has a name; a value in it is written and then restored."""
    module, _, path = name.rpartition(":")
    path, _, value = path.partition("=")
    try:
        before = attrgetter(path)(import_module(module) if module else trainer)
        if not value:
            return True
        owner, _, last = path.rpartition(".")
        loop = attrgetter(owner)(trainer)
        setattr(loop, last, value)
        # the loop has a property named after each value, which is true while the value is set
        understood = bool(getattr(loop, value, False))
        setattr(loop, last, before)
    except (ImportError, AttributeError):
        return False
    return understood


# -- replacements for Lightning's methods during a fit


def handle_signals(
    trainer: pl.Trainer, patches: Patches, sigterm: Callable[..., None], slurm: Callable[..., None]
) -> Callable[..., None]:
    """Replace Lightning's SIGTERM and SLURM handlers; return the original SLURM handler.

    This also disables Lightning's SIGTERM broadcast on every batch. The original SLURM handler
    saves a checkpoint on all ranks and requeues the job.
    """
    if not SIGTERM.works(trainer):
        return lambda *_: None
    connector = trainer._signal_connector
    save_and_requeue: Callable[..., None] = connector._slurm_sigusr_handler_fn
    patches.put(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", lambda: None)
    patches.put(connector, "_sigterm_notifier_fn", sigterm)
    patches.put(connector, "_slurm_sigusr_handler_fn", slurm)
    return save_and_requeue


def when_terminated(trainer: pl.Trainer, patches: Patches, act: Callable[[], None]) -> None:
    """Call `act` when this process receives SIGTERM, after Lightning's own handler."""
    if not SIGTERM.works(trainer):
        return
    connector = trainer._signal_connector
    notify: Callable[..., None] = connector._sigterm_notifier_fn

    def handle(*args: Any) -> None:
        """Call Lightning's own SIGTERM handler, then `act`."""
        notify(*args)
        act()

    patches.put(connector, "_sigterm_notifier_fn", handle)


def set_sigterm_received(trainer: pl.Trainer) -> None:
    """Tell the Trainer that SIGTERM was received, so that it ends the fit after this step."""
    trainer._signal_connector.received_sigterm = True


def add_to_rows(
    trainer: pl.Trainer, patches: Patches, more: Callable[[Mapping[str, Any]], Mapping[str, Any]]
) -> None:
    """Add metrics to the rows of training steps that loggers get, not to `logged_metrics`.

    `more` takes the metrics that Lightning is about to log and returns the metrics to add. Rows of
    evaluations, which name their step, stay as they are.
    """
    if not ROWS.works(trainer):
        return
    connector = trainer._logger_connector
    log = connector.log_metrics

    def log_row(metrics: dict[str, Any], step: int | None = None) -> None:
        """Log a row of metrics with the additional ones, unless it has an explicit step."""
        # rows with an explicit step come from evaluation and from callbacks
        own = more(metrics) if metrics and step is None else {}
        log({**metrics, **own}, step)
        for name in own:
            connector._logged_metrics.pop(name, None)

    patches.put(connector, "log_metrics", log_row)


def around_steps(trainer: pl.Trainer, patches: Patches, wrap: Callable[..., None]) -> None:
    """Patch automatic optimization: `wrap(call, *args)` for `call`, its `_optimizer_step`."""
    if STEPS.works(trainer):
        loop = trainer.fit_loop.epoch_loop.automatic_optimization
        patches.put(loop, "_optimizer_step", partial(wrap, loop._optimizer_step))


def around_loading(
    trainer: pl.Trainer,
    patches: Patches,
    find: Callable[[Any], Any],
    done: Callable[[Any], None],
) -> None:
    """Let `find` choose the checkpoint that `fit`, `validate`, `test` or `predict` loads, if any.

    All ranks call `find` with the original path or None; it returns the path to load or None.
    `done` is called with that path after all ranks have loaded it.
    """
    if not LOADING.works(trainer):
        return
    connector, paths = trainer._checkpoint_connector, []
    start, end = connector.resume_start, connector.resume_end

    def start_with_found_path(path: Any = None, *args: Any, **kwargs: Any) -> None:
        """Start to load the checkpoint that `find` returns; collective."""
        paths.append(find(path))
        start(paths[-1], *args, **kwargs)

    def end_and_call_done() -> None:
        """End the loading, then call `done` with the path of the checkpoint."""
        end()  # includes a barrier
        while paths:
            done(paths.pop())

    patches.put(connector, "resume_start", start_with_found_path)
    patches.put(connector, "resume_end", end_and_call_done)


def hide_resume_warning(trainer: pl.Trainer, patches: Patches) -> None:
    """Hide Lightning's warning that resuming mid-epoch needs loaders with a `state_dict`.

    Call this if the position in the data is restored without a `state_dict`.
    """
    loop = trainer.fit_loop.epoch_loop
    reset = loop.reset

    def reset_quietly() -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before")
            reset()

    patches.put(loop, "reset", reset_quietly)


_Launcher: Any = getattr(import_module(_LAUNCHERS), "_MultiProcessingLauncher", object)


class _NoResult(NamedTuple):
    """Entry in the result queue from a rank that exits without a result."""

    by_sigterm: bool


class CleanExitLauncher(_Launcher):  # type: ignore[misc]
    """Lightning's process launcher, modified to exit when its ranks exit without a result.

    The problem with the original:

    1. A rank receives SIGTERM. All ranks stop after the same step with `SIGTERMException`, which
       ends each process with exit code 0.
    2. Lightning's launcher assumes success and waits forever for the first rank's result. No
       `on_exception` hook has run, because Lightning calls them in the launching process.

    With this launcher, the ranks run these hooks, the first rank reports that there is no result,
    and the launching process exits in the same way as the ranks.
    """

    def _wrapping_function(
        self, process_idx: int, trainer: pl.Trainer | None, *args: Any, **kwargs: Any
    ) -> None:
        """Run a rank; if it exits without a result, run its exit hooks and report that."""
        try:
            super()._wrapping_function(process_idx, trainer, *args, **kwargs)
        except SystemExit as end:
            by_sigterm = isinstance(end, SIGTERMException)
            if trainer is not None and by_sigterm:  # all ranks end after the same step
                import_module(_CALL)._interrupt(trainer, end)
                trainer._teardown()
            if process_idx == 0 and not end.code:  # a nonzero code reaches the launching process
                return_queue = args[3]  # after the function, its args and its kwargs
                return_queue.put(_NoResult(by_sigterm))
            raise

    def _recover_results_in_main_process(self, worker_output: Any, trainer: pl.Trainer) -> None:
        """Take over rank 0's result; for a `_NoResult`, silence `on_exception` and exit."""
        if not isinstance(worker_output, _NoResult):
            super()._recover_results_in_main_process(worker_output, trainer)
            return
        # `on_exception` has run on the ranks; in this process it would save the untrained model
        patches: Patches = cast(Any, trainer.strategy).patches
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            patches.put(callback, "on_exception", lambda *_: None)
        raise SIGTERMException if worker_output.by_sigterm else SystemExit


def with_clean_exits(
    launcher: Any, strategy: Any, start_method: str, check: Callable[[pl.Trainer | None], None]
) -> Any:
    """Return a launcher that calls `check` first, and exits even if ranks return no result.

    Forked and spawned ranks get a `CleanExitLauncher`. `check` runs in the launching process, so
    that unsupported settings are rejected immediately and only once. Return `launcher` unchanged if
    it is None or if a private name is missing.
    """
    if launcher is None or not LAUNCH.works(None):
        return launcher
    if start_method != "popen":
        launcher = CleanExitLauncher(strategy, start_method)
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
    """Call `check`, then `launch` with COMMFREE_HOST set; return the result of `launch`."""
    check(trainer)
    # a spawned process may import this package before Lightning, and must choose the same host
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = HOST
    try:
        return launch(function, *args, trainer=trainer, **kwargs)
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def data_fetcher(trainer: pl.Trainer) -> Any:
    """Return the object that fetches training batches, or None before loaders are set up."""
    # the learning-rate finder saves a checkpoint in `on_fit_start`, before loaders are set up
    return trainer.fit_loop._data_fetcher


def forget_loaders(trainer: pl.Trainer) -> None:
    """Make Lightning create the training loaders again when the training loop starts.

    Call this if they may have been created too early: reading `trainer.estimated_stepping_batches`,
    as some schedulers do, creates them.
    """
    if EPOCHS.works(trainer):
        trainer.fit_loop._combined_loader = None


def validate_if(trainer: pl.Trainer, patches: Patches, allowed: Callable[[], bool]) -> None:
    """Skip a validation run if `allowed()`, called when the run is due, returns False."""
    if MID_EPOCH.works(trainer):
        loop = trainer.fit_loop.epoch_loop
        is_due = loop._should_check_val_fx
        patches.put(loop, "_should_check_val_fx", lambda fetcher: is_due(fetcher) and allowed())


def set_step(trainer: pl.Trainer, step: int) -> None:
    """Set the number of completed optimizer steps that the loops and loggers use."""
    loop = trainer.fit_loop.epoch_loop
    progress: Any = loop.automatic_optimization.optim_progress.optimizer.step
    for tracker in (progress.total, progress.current):
        tracker.ready = tracker.completed = step
    if MID_EPOCH.works(trainer):
        loop._batches_that_stepped = step


def skip_steps(trainer: pl.Trainer, count: int) -> None:
    """Advance the step counters of loops and loggers by `count` steps that were not taken."""
    loop = trainer.fit_loop.epoch_loop
    progress: Any = loop.automatic_optimization.optim_progress.optimizer.step
    for tracker in (progress.total, progress.current):
        tracker.ready += count
        tracker.completed += count
    if MID_EPOCH.works(trainer):
        loop._batches_that_stepped += count


def restart_in_mid_epoch(trainer: pl.Trainer) -> None:
    """Make resumed loops continue after their latest batch, in the middle of an epoch."""
    loop = trainer.fit_loop
    loop.restarting = True  # Lightning sets this unless it considers the epoch finished
    loop._restart_stage = "restarted_mid_epoch"
    loop.epoch_loop._restart_stage = "restarted_on_last"


def validate_first(trainer: pl.Trainer) -> bool:
    """Make a resumed fit begin with a validation if one is due; return whether one is."""
    epoch_loop = trainer.fit_loop.epoch_loop
    due = epoch_loop._should_check_val_fx(data_fetcher(trainer))
    if due:
        epoch_loop.val_loop.restarting = False
        epoch_loop.val_loop._restart_stage = "restarted_mid_evaluation"
    return due


def count_step(trainer: pl.Trainer) -> None:
    """Increment the step counter that Lightning uses for loggers."""
    trainer.fit_loop.epoch_loop._batches_that_stepped += 1


def take_loader_states(trainer: pl.Trainer) -> list[dict[str, Any]]:
    """Remove and return the loader states that Lightning has not loaded yet."""
    states: list[dict[str, Any]] = []
    if LOADERS.works(trainer):
        states = trainer.fit_loop._combined_loader_states_to_load
        trainer.fit_loop._combined_loader_states_to_load = []
    return states


def epoch_metrics(trainer: pl.Trainer) -> list[str]:
    """Return the names of the metrics that training has logged so far in the current epoch."""
    if not METRICS.works(trainer):
        return []
    logged = trainer.fit_loop.epoch_loop._results.values()
    return sorted({one.meta.name for one in logged if one.meta.on_epoch and not one.has_reset})


def set_last_reload(trainer: pl.Trainer, epoch: int) -> None:
    """Record that the training loaders were last reloaded in epoch `epoch`."""
    if RELOAD.works(trainer):
        trainer.fit_loop._last_train_dl_reload_epoch = epoch


def is_compiled(module: pl.LightningModule) -> bool:
    """Return whether the module was compiled with `torch.compile`."""
    return getattr(module, "_compiler_ctx", None) is not None


def validation_seconds(trainer: pl.Trainer) -> float | None:
    """Return the time between validation runs in seconds; None if the interval is in batches."""
    return getattr(trainer, "_val_check_time_interval", None)


def set_world_backend(strategy: Any, backend: str) -> None:
    """Set the backend of the process group that the strategy will create.

    This does nothing if the strategy has no such setting in this version of Lightning.
    """
    if hasattr(strategy, "_process_group_backend"):
        strategy._process_group_backend = backend


def set_ddp_group(strategy: Any, group: Any | None) -> None:
    """Set the process group in which DDP averages gradients; None means all ranks.

    Raise a RuntimeError if a group is given, and this version of Lightning does not support groups.
    """
    try:
        strategy._ddp_kwargs["process_group"] = group
    except AttributeError as error:
        if group is not None:
            raise RuntimeError(
                f"lightning_commfree does not support {GROUPS.lost} with Lightning {version(HOST)}."
                " Use another version of Lightning."
            ) from error


def data_used_up(trainer: pl.Trainer) -> bool:
    """Return whether the most recently read batch is the last one of the epoch."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    return progress.is_last_batch or progress.current.ready >= trainer.num_training_batches


def may_stop_early(trainer: pl.Trainer, uncounted: int = 0) -> bool:
    """Return whether `min_epochs` and `min_steps` have been reached.

    `uncounted` is the number of completed steps that `trainer.global_step` does not include yet.
    """
    loop, steps = trainer.fit_loop, trainer.global_step + uncounted
    epoch: Any = loop.epoch_progress.current
    return epoch.processed >= (loop.min_epochs or 0) and steps >= (loop.min_steps or 0)


def accumulates(trainer: pl.Trainer) -> bool:
    """Return whether the latest batch only accumulates gradients, with no optimizer step."""
    ready = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    return ready % trainer.accumulate_grad_batches != 0 and not data_used_up(trainer)


def steps_to_come(trainer: pl.Trainer) -> int | None:
    """Return the maximum number of remaining steps in the fit; None if unknown.

    With manual optimization, each batch counts as a step, and the result is None if `max_steps` is
    set, because `max_steps` counts the steps of every optimizer.
    """
    manual = not trainer.lightning_module.automatic_optimization
    total = trainer.estimated_stepping_batches
    if not math.isfinite(total) or total < 0 or (manual and trainer.max_steps != -1):
        return None
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress.total
    return max(int(total) - (batches.processed if manual else trainer.global_step), 0)


def in_accumulation(trainer: pl.Trainer) -> bool:
    """Return whether gradients have been accumulated for an optimizer step that has not run yet."""
    batch: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    stepped = batch.processed == batch.ready and not accumulates(trainer)
    return not stepped and bool(batch.processed % trainer.accumulate_grad_batches)


def limit_epochs(trainer: pl.Trainer, batches: int) -> None:
    """Reduce the number of batches per epoch that Lightning takes from its training loaders."""
    loop = trainer.fit_loop
    loop.max_batches = batches
    loader, fetcher = loop._combined_loader, loop._data_fetcher
    assert loader is not None, "the loaders are set up"
    if loader.limits is not None:
        loader.limits = [min(limit, batches) for limit in loader.limits]
    if fetcher is not None:
        fetcher.length = batches  # for the current iterator; later ones follow the limits
    every = trainer.val_check_interval
    if isinstance(every, float) and trainer.val_check_batch not in (None, math.inf):
        trainer.val_check_batch = max(1, int(batches * every))  # as `setup_data` computes it


def is_last_batch(trainer: pl.Trainer) -> bool:
    """Return whether the latest batch is the last one in this rank's data."""
    return trainer.fit_loop.epoch_loop.batch_progress.is_last_batch


def end_epoch_after_this_batch(trainer: pl.Trainer) -> None:
    """Make the latest batch the epoch's last one."""
    trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = True


def has_no_batch(loop: Any) -> bool:
    """Return whether a loop tried to prefetch its first batch and found no data.

    Lightning prefetches only from loaders that have no length.
    """
    fetched = getattr(loop._data_fetcher, "batches", None)
    return fetched is not None and not fetched
