"""Base class of all strategies, which implements the hooks that Lightning calls.

Launchers, samplers, the `torch.compile` guard and device handling come from Lightning's
`DDPStrategy`. Its gradient wrapper is used only within a replica of several ranks that hold the
full model, and its per-batch SIGTERM broadcast is not used. During a fit:

1. `setup` checks that all ranks have the same settings, copies rank 0's weights to the others
   and creates the cross-replica algorithm (`make_algorithm`). A resumed fit then restores its state
   (`ExactResume`).
2. Lightning runs every optimizer step as usual, inside `FitSession.step`. After each step (as
   counted by `clock`), the algorithm runs the exchanges that are due.
3. All ranks have taken the same number of steps whenever validation runs, a checkpoint is saved, or
   training ends (`Stopping`). If replicas train on local weights, the session first swaps weights
   into the module that are the same on all replicas (`local_weights`).
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.job import DEFAULT_TIMEOUT, RankInfo, ReplicaChannels
from lightning_commfree.comm.ledger import START, STEPS, Ledger, Traffic
from lightning_commfree.comm.requests import Requests
from lightning_commfree.fit.checks import (
    check_batch,
    check_ddp_kwargs,
    refuse_meta,
)
from lightning_commfree.fit.clock import Clock
from lightning_commfree.fit.contracts import Algorithm, Layout
from lightning_commfree.fit.drift import DriftCheck
from lightning_commfree.fit.evaluation import check_evaluation
from lightning_commfree.fit.fit import Fit
from lightning_commfree.fit.local_weights import LocalWeightsSession
from lightning_commfree.fit.ranks import Ranks
from lightning_commfree.fit.session import FitLog, FitSession, OutsideOfFit
from lightning_commfree.fit.signals import save_on_sigterm_only, warn_unsaved
from lightning_commfree.fit.stopping import Stopping
from lightning_commfree.fit.unwrappable import Unwrappable
from lightning_commfree.host import (
    CheckpointIO,
    DDPStrategy,
    DoublePrecision,
    LightningOptimizer,
    SIGTERMException,
    TrainerFn,
    is_overridden,
    other_is_imported,
    pl,
    wrong_host,
)
from lightning_commfree.lightning_internals import (
    CleanExitLauncher,
    Patches,
    probe,
    set_ddp_group,
    with_clean_exits,
)
from lightning_commfree.model.meta_init import on_meta
from lightning_commfree.model.replication import share_random_state
from lightning_commfree.resume.checkpoint_io import with_atomic_writes
from lightning_commfree.resume.contents import saved_dtypes
from lightning_commfree.resume.data_position import attach_order
from lightning_commfree.resume.exact import ExactResume
from lightning_commfree.resume.files import FilePath, verified_reading
from lightning_commfree.resume.optimizers import restore_dtypes

# users can set its level above INFO to hide the summary at the end of a fit
_logger = logging.getLogger("lightning_commfree")

# advice for errors from torch, keyed by a part of the error's text
_ADVICE = {
    "data is not allocated yet": (
        "A hook reads the values of a sharded tensor (`DTensor`) as if it were a plain one, as"
        " Lightning's `grad_norm` does. For the norm of all gradients use"
        " `trainer.strategy.grad_norm()`; for one tensor, `tensor.full_tensor()` on all ranks of"
        " the replica."
    ),
    "'fsdp::chunk_cat' with arguments from the 'Sparse": (
        "FSDP2 (`inside='fsdp'`) cannot train a parameter with sparse gradients. Use `sparse=False`"
        " where the model calls `nn.functional.embedding`."
    ),
}


class ReplicaStrategy(DDPStrategy):
    """Base class for strategies that train replicas of a model and keep them synchronized.

    A subclass sets `settings`, creates the cross-replica algorithm in `make_algorithm`, and may
    override `session_type`, the class that holds the state of a fit.

    Args:
        inside: layout of the model across the ranks of a replica.
        **ddp_kwargs: arguments of `DDPStrategy`, except those for gradient synchronization.

    Attributes:
        ledger: counts the bytes that this rank sends to other replicas and the seconds that it
            waits for them, by tag.
        group_ledger: counts the bytes sent within a replica, by tag. FSDP's bytes are computed from
            a formula; DDP's are not counted.
        session: state of the current fit, and its hooks.
        ddp_kwargs: the arguments of `DDPStrategy` that differ from its defaults.
        patches: wrappers around Lightning's methods during a fit.
        requests: what this rank and the others request with their next exchange; from
            `make_algorithm` on.
        liveness: whether ranks detect lost ranks (`comm.liveness`); set it before `fit`.
        own_save_folders: whether each rank writes its state into the folder of the path that it
            passes to `save_checkpoint`, and not into the folder of rank 0's path.
    """

    settings: Any
    requests: Requests
    liveness = True
    own_save_folders = False
    session_type: type[FitSession[Any]] = LocalWeightsSession
    model: Any
    _trainers_accelerator: Any = None

    def __init__(self, inside: Layout, **ddp_kwargs: Any) -> None:
        # LightningCLI follows the name `ddp_kwargs` to DDP's own arguments, so it must be kept
        ddp_kwargs = check_ddp_kwargs(
            type(self), ddp_kwargs, inside.size > 1 and inside.states is None
        )
        super().__init__(**ddp_kwargs)
        self.ddp_kwargs = ddp_kwargs
        self.inside, self.patches = inside, Patches()
        self.ledger = Ledger()
        self.group_ledger = Ledger(follows=self.ledger)
        self.session: FitSession[Any] = OutsideOfFit()
        self.requests = Requests()
        self._prepared: list[Optimizer] = []  # already passed to `inside` and the algorithm
        self._checked: set[str] = set()  # "train", "validate": their first batch has been checked
        self._was_on_meta = False  # the model had no values before it was sharded
        self._log: FitLog | None = None
        self._drift: DriftCheck | None = None
        self.ranks = Ranks(
            self,
            ddp_kwargs.get("timeout", DEFAULT_TIMEOUT),
            ddp_kwargs.get("process_group_backend"),
            inside.mesh,
            self._open_channels,
        )
        self._launch_method = ddp_kwargs.get("start_method", "popen")
        self._clean_launcher: Any = None
        self.checkpoint_io = ddp_kwargs.get("checkpoint_io")
        self._resume = ExactResume(self, self.ranks, inside, self.patches)

    @override
    def __repr__(self) -> str:
        # a Trainer from the other Lightning package quotes this in the error that it raises
        return f"<{wrong_host(type(self).__name__)}>" if other_is_imported() else super().__repr__()

    def fingerprint(self) -> dict[str, str]:
        """Return the settings that must be the same on all ranks."""
        return dict(self.settings.fingerprint())

    @abstractmethod
    def make_algorithm(self, trainer: pl.Trainer) -> Algorithm:
        """Create and return the cross-replica algorithm; called by `setup`.

        By then the model and optimizers exist, and all ranks have the same settings and weights.
        """

    def stopping(self, trainer: pl.Trainer, clock: Clock) -> Stopping:
        """Create and return the object that decides when the fit stops."""
        return Stopping(trainer, self.ranks, clock, self.patches)

    def drift_check_plan(self) -> tuple[int, Channel]:
        """Return the steps between checks of `DriftCheck` (0: none), and the channel that they use.

        The channel connects the ranks whose weights must be equal.
        """
        return 0, self.channels.world

    def not_restored(self) -> list[str]:
        """Return messages about state that resuming this fit would not reproduce."""
        return []

    @property
    def module(self) -> pl.LightningModule:
        """The LightningModule; available once the Trainer has connected it."""
        module: pl.LightningModule | None = self.lightning_module
        if module is None:
            raise RuntimeError(
                f"This `{type(self).__name__}` has no LightningModule yet. It gets one when its"
                " Trainer runs `fit`, `validate`, `test` or `predict`."
            )
        return module

    @property
    def channels(self) -> ReplicaChannels:
        """The channels between all ranks, between replicas and within this replica."""
        return self.ranks.channels

    @property
    def algorithm(self) -> Any:
        """The cross-replica algorithm; available from `setup` to `teardown`."""
        return self.session.between

    def traffic(self) -> Traffic:
        """Return a forecast of the bytes that this rank sends; available from `on_fit_start` on."""
        if self._log is None:
            raise RuntimeError(
                "`traffic()` is not available yet: it needs state that `fit` creates. Call it in"
                " `on_fit_start` or later."
            )
        return self._log.traffic

    def figures(self) -> dict[str, float]:
        """Return this rank's latest metrics by name, as sent to the Trainer's loggers."""
        return {} if self._log is None else self._log.figures()

    def _open_channels(self, info: RankInfo) -> ReplicaChannels:
        """Open and return the channels of this rank; collective."""
        mesh, ledgers = self.inside.mesh(info.size), (self.ledger, self.group_ledger)
        return ReplicaChannels.open(mesh, info, ledgers, self.liveness)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments for the sampler: ranks that need the same batch count as one."""
        size = self.inside.size if self.inside.same_batch else 1
        return {"num_replicas": self.world_size // size, "rank": self.global_rank // size}

    # -- the hooks of a fit, in the order in which the Trainer calls them

    @property
    @override
    def accelerator(self) -> Any:
        """The accelerator that the Trainer has set."""
        return self._trainers_accelerator or super().accelerator

    @accelerator.setter
    def accelerator(self, accelerator: Any) -> None:
        """Keep the accelerator; raise a `RuntimeError` if another Trainer has set one before."""
        # Every Trainer that is given this strategy sets this, but the devices and launcher of the
        # first one would be kept. Lightning's own attribute remains empty; otherwise its check
        # would complain about accelerators.
        if self._trainers_accelerator is not None:
            raise RuntimeError(
                f"This `{type(self).__name__}` was already passed to another Trainer. Create a"
                " new strategy for each Trainer, or pass its registered name instead."
            )
        self._trainers_accelerator = accelerator

    @property
    @override
    def launcher(self) -> Any:
        """Lightning's launcher, made to check settings first and to exit cleanly."""
        if self._clean_launcher is None:
            check = self._check_before_launch
            self._clean_launcher = with_clean_exits(
                super().launcher, self, self._launch_method, check
            )
        return self._clean_launcher

    def _check_before_launch(self, trainer: pl.Trainer | None) -> None:
        """Reject unsupported settings in the launching process, before any rank starts."""
        if trainer is None or trainer.state.fn != TrainerFn.FITTING:
            return
        self.inside.mesh(self.world_size)
        hooks = ("configure_model", "configure_sharded_model", "setup")  # may change the module
        if not any(is_overridden(name, self.module, pl.LightningModule) for name in hooks):
            self.inside.fit = self._new_fit(trainer)
            self.check_module()

    def check_module(self) -> None:
        """Raise a `ValueError` if the strategy or its layout does not support the module.

        If possible, it is called before ranks are launched, in any case before `make_algorithm`.
        """
        self.inside.check()

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        """The user's checkpoint plugin, or else an `AtomicCheckpointIO`."""
        return self._checkpoint_plugin

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        """Set the plugin; make it write atomically if it is None or a wrapper."""
        self._checkpoint_plugin = with_atomic_writes(io, maps=self.inside.states is not None)

    @override
    def setup_environment(self) -> None:
        """Join the job and open the channels, before any loader is created; collective."""
        self.ledger.phase = START
        self.ranks.join(super().setup_environment)
        self.inside.fit = self._new_fit(self.module.trainer)
        self._resume.install(self.module.trainer)  # before the first loader is made

    def _new_fit(self, trainer: pl.Trainer) -> Fit:
        """Return a description of the Trainer's run, for layouts and checks."""
        return Fit(
            type(self).__name__,
            trainer,
            self.module,
            self.ranks,
            self.patches,
            self.precision_plugin,
            self.checkpoint_io,
            self.root_device,
            self.fingerprint(),
            self.ddp_kwargs,
            self._optimizers_of_fit,
            self._wrap_in_ddp,
            isinstance(self.launcher, CleanExitLauncher),
        )

    def _optimizers_of_fit(self) -> list[Optimizer]:
        return self.optimizers

    def _wrap_in_ddp(self) -> DistributedDataParallel:
        """Wrap the module in DDP over this replica's ranks, and return the wrapper."""
        set_ddp_group(self, self.channels.within.group)
        super().configure_ddp()
        wrapped: DistributedDataParallel = self.model
        return wrapped

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Return the loader as Lightning prepares it, with its order recorded if it is to train."""
        prepared = super().process_dataloader(dataloader)
        attach_order(self.module.trainer, prepared)
        return prepared

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        """Set up the model and, for a fit, the algorithm and its session; collective."""
        check_evaluation(trainer, self.ranks, self.inside, self.patches)
        if trainer.state.fn != TrainerFn.FITTING:
            if self.inside.states is not None:
                refuse_meta(type(self).__name__, self.module)
            if self._shares_model:
                self._set_up_shards(trainer)
            else:
                super().setup(trainer)
            return
        self._checked.clear()
        self._resume.before_setup()
        probe(trainer)
        save_on_sigterm_only(trainer, self.ranks, self.patches)
        self.check_module()
        # counted before sharding, while every rank has the full model
        numel = sum(p.numel() for p in self.module.parameters() if p.requires_grad)
        # before `super().setup` creates the schedulers, which may ask for the length of an epoch
        clock = Clock(spans_batch=not self.module.automatic_optimization)
        stopping = self.stopping(trainer, clock)
        super().setup(trainer)
        self.inside.check_optimizers(self.optimizers)
        self.requests = stopping.requests
        between = self.make_algorithm(trainer)
        self._prepared = [*self.optimizers]
        self.session = self.session_type(
            trainer, self.ranks, between, stopping, self.patches, numel
        )
        every, channel = self.drift_check_plan()
        checks = every and channel.size > 1
        self._drift = DriftCheck(self.inside.fit, self.session, every, channel) if checks else None
        self._log = self.session.log
        self._resume.begin(trainer, self.session.between)

    def _set_up_shards(self, trainer: pl.Trainer) -> None:
        """Run Lightning's `setup` without its broadcast of rank 0's shards to other ranks."""
        self.accelerator.setup(trainer)
        self.precision_plugin.convert_module(self.module)
        self.module.to(self.root_device)
        self.setup_precision_plugin()

    @override
    def model_to_device(self) -> None:
        """Move the module to its device, unless a fit is about to shard it."""
        if self.inside.states is None or self.module.trainer.state.fn != TrainerFn.FITTING:
            super().model_to_device()

    @override
    def configure_ddp(self) -> None:
        """Let the layout set up the model: shard it, or wrap it in DDP within a replica."""
        self._was_on_meta = self.restore_checkpoint_after_setup
        self.inside.prepare()
        if self.model is self.lightning_module:  # not wrapped by DDP
            self.model = Unwrappable(self.module)

    @override
    def on_train_start(self) -> None:
        """Restore the position of a resumed fit, and begin the session; collective."""
        super().on_train_start()
        # after the hooks, which may advance the RNG
        resumed = self._resume.restore_position(self.not_restored)
        if self.inside.same_batch:
            share_random_state(self.channels.within, self.module.device)
        self.session.begin(resumed)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Begin a batch of the session, and compare weights across ranks if a check is due."""
        super().on_train_batch_start(batch, batch_idx)
        self.session.batch_begins()
        if self._drift is not None:
            self._drift.before_step()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Check the first batch, then step inside `FitSession.training`; errors name lost ranks."""
        self.ledger.phase = STEPS
        self._check_first_batch("train", (args, kwargs))
        with self.session.training(), self.ranks.guarded("forward"):
            return super().training_step(*args, **kwargs)

    @override
    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run backward, and combine gradients within the replica; errors name lost ranks."""
        inside = self.inside.backward(steps=not self.session.accumulates)
        with self.ranks.guarded("backward"), inside, self.session.backward(closure_loss):
            return super().backward(closure_loss, *args, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Context manager for accumulating gradients without synchronizing; called by Lightning."""
        with self.session.accumulating(), super().block_backward_sync():
            yield

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Check the first batch if ranks share a model, then validate; errors name lost ranks."""
        self._check_first_batch("validate", (args, kwargs))
        with self._evaluating():
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluating():
            return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluating():
            return super().predict_step(*args, **kwargs)

    def _check_first_batch(self, verb: str, batch: Any) -> None:
        """Raise a `ValueError` if ranks that need the same first batch differ in it; collective."""
        if self.inside.same_batch and self._shares_model and verb not in self._checked:
            self._checked.add(verb)
            check_batch(self.channels.within, verb, batch)

    @property
    def _shares_model(self) -> bool:
        """Whether the ranks of a replica currently hold shards of one model."""
        states = self.inside.states
        return states is not None and states.shares_model

    def _evaluating(self) -> AbstractContextManager[None]:
        """Return a context manager in which errors name lost ranks, if ranks share a model."""
        return self.ranks.guarded("evaluation") if self._shares_model else nullcontext()

    @override
    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Take the step inside `FitSession.step`, which exchanges; refuse unknown optimizers."""
        if [*map(id, self._prepared)] != [*map(id, self.optimizers)]:
            self._prepare_replaced()
        if not any(optimizer is one for one in self._prepared):
            raise RuntimeError(
                f"The optimizer being stepped (`{type(optimizer).__name__}`) is not in"
                " `trainer.optimizers`, so it was not prepared for this strategy. To replace an"
                " optimizer during a fit, assign a new list (`trainer.optimizers = [new]`) instead"
                " of modifying the old one, in a hook between two steps (`on_train_batch_start` or"
                " `on_train_batch_end`)."
            )
        with self.session.step(optimizer):
            return super().optimizer_step(optimizer, *args, **kwargs)

    def _prepare_replaced(self) -> None:
        """Pass optimizers that a hook has set on the Trainer to the algorithm and the layout."""
        self.session.follow_optimizers(self.optimizers)
        self.inside.check_optimizers(self.optimizers)
        self._prepared = [*self.optimizers]

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """Return the norm of the full model's gradient; collective over the ranks of a replica.

        Use it in `on_before_optimizer_step`, where gradients are complete. If ranks hold shards, a
        norm computed from the module's own `parameters()` would cover only this rank's shards. With
        Streaming DiLoCo and Distributed Lion, the result is the norm of this replica's gradient.

        Args:
            norm_type: p in the p-norm, above 0; `math.inf` for the largest absolute value.

        Returns:
            A scalar tensor, the same on all ranks of the replica; 0 if there are no gradients.

        Raises:
            ValueError: `norm_type` is not above 0.
        """
        if not norm_type > 0:
            raise ValueError(f"`norm_type={norm_type}` must be above 0, or `math.inf`.")
        return self.inside.grad_norm(self.module, norm_type)

    @override
    def on_train_end(self) -> None:
        """Synchronize and compare weights for the last time, and print a summary; collective."""
        self.session.fit_ends()
        if self._drift is not None:
            self._drift.compare()  # a short fit may not have compared them at all
        # this is the last point in a fit that all ranks reach together
        self._resume.remove_leftovers()
        super().on_train_end()
        self._report()

    def _report(self) -> None:
        """Print a summary of the fit on rank 0, unless the library's logger is set above INFO."""
        log, quiet = self.session.log, _logger.level > logging.INFO
        is_trial = bool(self.module.trainer.fast_dev_run)  # type: ignore[attr-defined]
        if log.steps and self.world_size > 1 and not (is_trial or quiet):
            apart = self.inside.size > 1 and self.group_ledger is not self.ledger
            rank_zero_info(log.summary(" to other replicas" if apart else ""))

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Warn and advise; after SIGTERM, requeue the SLURM job if its signal has arrived."""
        # also called in the process that forked the ranks, which has no process group
        if isinstance(exception, KeyboardInterrupt) and self.num_nodes * self.num_processes > 1:
            warn_unsaved("Ctrl-C interrupted the ranks in the middle of different steps")
        for symptom, advice in _ADVICE.items():
            if symptom in str(exception):
                rank_zero_warn(advice)
        if isinstance(exception, SIGTERMException):
            self.session.requeue()
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        """End the session, release the layout, remove patches and close channels; collective."""
        session, self.session = self.session, OutsideOfFit()
        session.end()
        self.requests, self._drift = Requests(), None  # a Trainer can be pickled after a fit
        if type(self.model) is Unwrappable:
            self.model = self.lightning_module
        if self.lightning_module is not None and on_meta(self.lightning_module):
            # An error ended the fit before the model had values. Lightning moves it to the CPU,
            # which would raise another error and hide the first.
            self.patches.put(self.lightning_module, "cpu", lambda: self.lightning_module)
        self.inside.release()
        self._was_on_meta = False
        self._resume.end()
        super().teardown()
        self.patches.remove()
        set_ddp_group(self, None)
        self.ranks.leave()  # last: the calls above may be collective

    # -- Lightning's collectives; errors name lost ranks

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks, or return at once if the fit is interrupted."""
        self.ranks.collective("barrier", super().barrier, *args, **kwargs)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return rank `src`'s object or, if the fit is interrupted, this rank's own."""
        return self.ranks.collective("broadcast", super().broadcast, obj, src)

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over all ranks or, in a training step, over this replica's ranks only.

        If a training step reduced over all ranks, every metric that it logs per step with
        `sync_dist=True` would cost a round trip over the slow link.
        """
        if self.session.computing:
            if self.inside.size == 1:
                return tensor
            group = self.channels.within.group
        return self.ranks.collective("reduce", super().reduce, tensor, group, reduce_op)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights to save (`FitSession.module_state`), gathered if sharded."""
        read, states = super().lightning_module_state_dict, self.inside.states
        if states is None:
            return self.session.module_state(read)
        return self.session.module_state(lambda: states.module_state_to_save(read))

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state to save; if sharded, gathered on rank 0 and collective."""
        raw = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        state, states = super().optimizer_state(raw), self.inside.states
        return state if states is None else states.optimizer_state_to_save(raw, state)

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether Lightning must load weights after sharding: the model begins on `meta`."""
        # a model on `meta` has values only once it is sharded
        return self._was_on_meta or (self.inside.states is not None and bool(on_meta(self.module)))

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights of a checkpoint; if the model is sharded, this rank's shards of them."""
        if isinstance(self.precision_plugin, DoublePrecision):
            self.module.double()  # Lightning converts it later, after fp32 has rounded the weights
        states = self.inside.states
        with self._resume.loading_model():
            shards = checkpoint if states is None else states.with_module_shards(checkpoint)
            super().load_model_state_dict(shards, strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore this rank's own state, then load optimizer states without rounding them."""
        self._resume.before_optimizers()
        states = self.inside.states
        shards = checkpoint if states is None else states.with_optimizer_shards(checkpoint)
        super().load_optimizer_state_dict(shards)
        restore_dtypes(self.optimizers, shards["optimizer_states"], saved_dtypes(checkpoint))

    @override
    def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint and every rank's state, unless the fit is interrupted; collective."""
        if not self.ranks.interrupted:
            self.session.check_save()
            self._resume.save(checkpoint, filepath, storage_options, self.own_save_folders)

    @override
    def remove_checkpoint(self, filepath: FilePath) -> None:
        """Remove a checkpoint and its rank files."""
        super().remove_checkpoint(filepath)
        self._resume.remove(filepath)

    @override
    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load and verify a checkpoint; for a fit, read this rank's own state too (collective)."""
        with verified_reading(checkpoint_path):  # later releases of Lightning pass more arguments
            checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        weights_only = kwargs.get("weights_only", args[0] if args else None)
        self._resume.read(checkpoint_path, checkpoint, weights_only)
        return checkpoint
