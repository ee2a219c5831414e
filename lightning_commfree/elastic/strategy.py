"""The Lightning strategy for Streaming DiLoCo with replicas that join, leave and die.

Each replica is a separate job with its own Trainer: for Lightning, the world is one replica. The
replicas share a store, which contains the job's log (`elastic.log`):

- *Steps.* `trainer.global_step` is the position in the schedule that all replicas share. A joining
  replica starts at the position of the newest state in the log, which may be in the middle of an
  epoch. A late one skips steps: `global_step` and learning rates advance as on the other replicas,
  but every replica reads its data without gaps.
- *Data.* There are `max_replicas` slots, each with a share of the training data. A replica trains
  on the share of its slot, starting at the position that corresponds to its step.
- *Validation and checkpoints.* Only the first replica validates and saves, which is the one with
  the smallest slot in the latest commit. If the fit depends on a monitored metric, every replica
  validates. All replicas use the same weights, so they get the same result.
- *Stopping.* `trainer.should_stop` on one replica stops all replicas after the same step. SIGTERM
  stops only the replica that receives it, on all its ranks after the same step. If a callback then
  saves a checkpoint (`OnExceptionCheckpoint`), this contains the replica's own state, from which it
  continues, unless its slot has another owner by then.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import socket
import sys
import time
from copy import copy
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.settings import check_choice, check_count
from lightning_commfree.diloco import default_outer_optimizer, split_into_fragments
from lightning_commfree.diloco.strategy import DiLoCoSession, StreamingDiLoCoStrategy
from lightning_commfree.elastic.algorithm import ElasticDiLoCo
from lightning_commfree.elastic.log import TERMINATED, JobLog
from lightning_commfree.elastic.ranks import ReplicaRanks
from lightning_commfree.elastic.transport import StoreTransport
from lightning_commfree.fit.checks import (
    REFUSED_IF_LOCAL,
    refuse_callbacks,
    refuse_manual,
    refuse_max_norm,
)
from lightning_commfree.fit.clock import Clock
from lightning_commfree.fit.ranks import Ranks
from lightning_commfree.fit.session import FitSession
from lightning_commfree.fit.stopping import Stopping
from lightning_commfree.host import SIGTERMException, TrainerFn, pl
from lightning_commfree.lightning_internals import (
    Patches,
    forget_loaders,
    set_step,
    skip_steps,
    steps_to_come,
    validate_if,
    when_terminated,
)
from lightning_commfree.resume.data_position import (
    continue_at,
    step_schedulers,
    training_loaders,
)
from lightning_commfree.stores.retrying import Retrying
from lightning_commfree.stores.store import LEGAL, SCHEMES, open_store, probe

STORE = "COMMFREE_STORE"
_SHORT = 40  # maximum number of characters in a setting that is stored in full
_LEAVE_S = 15.0  # how long a replica that leaves may wait for anything
_ASK_AGAIN_S = 24.0  # pause before asking for a slot again


class ElasticSession(DiLoCoSession):
    """Fit session for one elastic replica.

    The replicas run independently: a hook may run after different steps on different replicas.
    """

    between: ElasticDiLoCo

    least_ranks = 2  # traffic is compared with DDP on 2 ranks or more: another replica may join
    same_hooks = False

    @override
    def begin(self, resumed: bool) -> None:
        del resumed
        diloco = self.between
        diloco.land_postponed()
        if diloco.postponed:
            raise SIGTERMException
        self._follow_skipped()
        if diloco.ended:  # meanwhile
            self._trainer.should_stop = True
        self._trains = True
        FitSession.begin(self, resumed=True)

    @override
    def _restart(self) -> None:
        """Refuse weights that were loaded in the middle of a fit."""
        raise RuntimeError(
            "Weights were loaded in the middle of the fit (`load_state_dict`). Elastic replicas do"
            " not support this, because they would have to do it after the same step. Start another"
            " job from these weights, or use `StreamingDiLoCoStrategy`."
        )

    @override
    def after_step(self) -> None:
        """Count skipped steps in the Trainer, and end a fit whose steps are over."""
        diloco = self.between
        trainer = self._trainer
        self._follow_skipped()
        if diloco.step >= diloco.last_step and diloco.step != trainer.max_steps:
            # `max_epochs`: a replica that has skipped steps still has batches
            self._stopping.agree_after_step()
        sigterm = self._stopping.sigterm  # a replica of one rank leaves it to Lightning
        flags = diloco.ranks.gather(sigterm.requested + 2 * sigterm.requeue_requested)
        if any(flags):
            sigterm.agree(requeues=any(flag & 2 for flag in flags))
        super().after_step()

    def _follow_skipped(self) -> None:
        """Move the Trainer's step, its schedulers and the clock on by the skipped steps."""
        diloco = self.between
        trainer = self._trainer
        if diloco.skipped:
            skip_steps(trainer, diloco.skipped)
            step_schedulers(trainer, trainer.global_step, trainer.current_epoch)
            self.clock.steps += diloco.skipped

    @override
    def stops_after(self) -> int | None:
        return FitSession.stops_after(self)


class _ElasticStopping(Stopping):
    """Stops all replicas if one of them requests a stop; SIGTERM stops only this replica."""

    def __init__(self, trainer: pl.Trainer, ranks: Ranks, clock: Clock, patches: Patches) -> None:
        super().__init__(trainer, ranks, clock, patches)
        if not self._several:
            self._several = True
            self._follow_loops(patches)

    @property
    @override
    def wanted(self) -> bool:
        """Whether a stop was requested; SIGTERM does not count."""
        return self._requested

    @override
    def agree_after_step(self) -> None:
        """Stop: the exchange has told all replicas already."""
        self._agreed = self._trainer.should_stop = True

    @override
    def agree_here(self) -> None:
        """Turn `trainer.should_stop` into a request for the next exchange; ask no replica."""
        if self._trains and not self._ranks.interrupted:
            self._defer_stop()


class ElasticDiLoCoStrategy(StreamingDiLoCoStrategy):
    """Streaming DiLoCo with replicas that join, leave and die during the fit.

    Start one Trainer per replica, each with its own launcher, and give all of them the same store:
    a folder, a TCPStore (`commfree-store serve`) or a bucket. No replica connects to another one.
    If a replica dies, the others continue after a short wait (`grace`) and lose no steps. A
    restarted replica joins again: it reads the outer weights from the store, and takes part in the
    next exchange. A job that dies as a whole continues from the store. A replica may have several
    ranks (`replica_size`), which connect to each other; it ends if one of them dies. See
    `docs/elastic.md`.

    All replicas need the same model, settings, `max_steps` and `max_epochs`. They may have
    different batch sizes: a replica's outer gradient is weighted by the number of samples it was
    computed from.

    Args:
        store: URL of the store, such as "file:///mnt/share/run1", "tcp://10.0.0.1:29510" or
            "s3://bucket/run1". One store is for one job. If None, the value of the environment
            variable COMMFREE_STORE is used.
        grace: seconds for which training waits, when a fragment is due to land, for replicas that
            have not sent it yet. A replica that comes later loses nothing: its steps count in the
            fragment's next exchange. "auto": 0.5 s, and twice the mean time of a request. In the
            last round of a fit, 10 times as long, because no exchange follows.
        min_replicas: minimum number of replicas. If there are fewer, all of them wait when the
            next fragment is due to land. Those that start first do not wait for others otherwise:
            the first exchanges may be those of one replica, and the others join. The forecast of
            `traffic()` is for this number, without the state that one replica stores at most
            every four cycles.
        max_replicas: number of slots, each with its share of the training data. The shares of empty
            slots are not trained on.
        sync: how replicas of unequal speed stay together. "steps": every replica takes `sync_every`
            steps between two exchanges of a fragment, and faster replicas wait for up to `grace`.
            "time": only the fastest replica takes all of these steps. The other replicas take part
            in the exchange after their current step, with the steps they have taken, and skip the
            remaining steps.
        **kwargs: as in `StreamingDiLoCoStrategy`, except that `replica_size` must be the number of
            ranks of this Trainer, and `evaluate` "outer". The default outer learning rate is 0.4,
            regardless of the number of replicas. With `sync_every="auto"`, the slowest link counts.

    Attributes:
        slot: this replica's slot; 0 until a fit has begun.

    Raises:
        ValueError: an argument is out of range, or not supported.

    Example::

        strategy = ElasticDiLoCoStrategy(store="file:///mnt/share/run1")
        trainer = Trainer(strategy=strategy, devices=1, max_steps=10_000)
    """

    session_type = ElasticSession

    def __init__(
        self,
        store: str | None = None,
        grace: str | float = "auto",
        min_replicas: int = 1,
        max_replicas: int = 8,
        sync: str = "steps",
        **kwargs: Any,
    ) -> None:
        kwargs = {"evaluate": "outer", **kwargs}
        # The number of replicas changes, but the outer optimizer must be the same on all of them.
        default = default_outer_optimizer(replicas=1, sync_every=1)
        kwargs["outer_optimizer"] = kwargs.get("outer_optimizer") or default
        super().__init__(**kwargs)
        self.store = _checked_url(store or os.environ.get(STORE))
        if grace != "auto" and not (isinstance(grace, int | float) and grace >= 0):
            raise ValueError(f"`grace={grace!r}` must be 'auto' or a number of seconds.")
        check_count("max_replicas", max_replicas, 1)
        check_count("min_replicas", min_replicas, 1)
        if min_replicas > max_replicas:
            raise ValueError(
                f"`min_replicas={min_replicas}` is above `max_replicas={max_replicas}`, so the fit"
                " could never begin."
            )
        check_choice("sync", sync, ("steps", "time"))
        if self.settings.evaluate != "outer":
            raise ValueError(
                f"`evaluate={self.settings.evaluate!r}` needs all replicas for validation, but"
                " only one elastic replica runs it. Use `evaluate='outer'`."
            )
        self._grace_s = None if grace == "auto" else float(grace)
        self._min_replicas, self._max_replicas, self._sync = min_replicas, max_replicas, sync
        self._starts_at = 0  # the step before this fit, by its own checkpoint
        self.slot = 0

    @property
    def is_first(self) -> bool:
        """Whether this replica is the one that validates and saves now."""
        return self._elastic.is_first

    @property
    def _elastic(self) -> ElasticDiLoCo:
        """The algorithm; only during a fit."""
        assert isinstance(self._diloco, ElasticDiLoCo)
        return self._diloco

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        module = self.lightning_module  # None before a fit, when only the number of shares is known
        if module is not None and not module.trainer.training:  # a replica validates on all data
            return super().distributed_sampler_kwargs
        within = super().distributed_sampler_kwargs
        size = within["num_replicas"]
        return {
            "num_replicas": self._max_replicas * size,
            "rank": self.slot * size + within["rank"],
        }

    # -- the hooks of a fit

    @override
    def setup_environment(self) -> None:
        """Check that the Trainer has `replica_size` ranks; then set these up as the base does."""
        if self.world_size != (size := self.settings.replica_size):
            raise ValueError(
                f"This Trainer has {self.world_size} ranks, but `replica_size={size}`. Each elastic"
                " replica has its own Trainer: start the script once per replica, with"
                f" `Trainer(devices={size})`."
            )
        super().setup_environment()

    @override
    def setup_distributed(self) -> None:
        if self.world_size > 1:
            super().setup_distributed()
        else:  # no process group: it would listen on a port, and a single rank needs none
            self.set_world_ranks()

    @override
    def stopping(self, trainer: pl.Trainer, clock: Clock) -> Stopping:
        return _ElasticStopping(trainer, self.ranks, clock, self.patches)

    @override
    def not_restored(self) -> list[str]:
        lost = "elastic replicas begin with the outer weights, without what was in flight"
        return super().not_restored() + ([] if self._elastic.continues else [lost])

    @override
    def make_algorithm(self, trainer: pl.Trainer) -> ElasticDiLoCo:
        name, settings = type(self).__name__, self.settings
        refuse_callbacks(trainer, name, REFUSED_IF_LOCAL)
        refuse_manual(name, self.module, "a joiner could not find its position in the data")
        if self.inside.size > 1:
            refuse_max_norm(name, self.module)
        by_time = self._sync == "time"
        if by_time and (trainer.max_steps == -1 or trainer.max_epochs not in (None, -1)):
            raise ValueError(
                "`sync='time'` needs `Trainer(max_steps=...)` without `max_epochs`: replicas that"
                " run at different speeds finish an epoch at different times, so the fit can only"
                " end at a common step."
            )
        fragments = split_into_fragments(
            self.module, settings.num_fragments, settings.fragment_pattern, self.optimizers
        )
        store, for_states = open_store(self.store), open_store(self.store)
        probe(Retrying(store, self.ranks.timeout.total_seconds()))
        host = re.sub("[^A-Za-z0-9-]", "-", socket.gethostname())
        log = JobLog(
            store,
            self.broadcast(f"{host}-{os.getpid()}-{secrets.token_hex(4)}"),
            lambda flight: transport.message_bytes(flight),
            self._min_replicas,
            self._grace_s,
            by_time and self.global_rank == 0,
            self._replica_ranks(),
            lambda flight, members: transport.reduction(flight, members),
            for_states=for_states,
        )
        transport = StoreTransport(log, self.ledger)
        self._diloco = diloco = ElasticDiLoCo(
            self.module, fragments, settings, transport, self.channels.within, self.requests
        )
        diloco.say = rank_zero_info
        diloco.warm_up()
        diloco.optimizers = self.optimizers
        when_terminated(trainer, self.patches, lambda: log.leave(_LEAVE_S))
        return diloco

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        diloco = self._elastic
        self._starts_at, had_left = diloco.step, diloco.left_at is not None
        self.slot = self._take_slot(trainer)
        if diloco.step != self._starts_at:
            trainer.num_sanity_val_steps = 0
        forget_loaders(trainer)  # a scheduler may have requested their length before `slot` was set
        validate_if(trainer, self.patches, lambda: self.is_first or _monitors(trainer))
        self.patches.put(
            trainer, "save_checkpoint", partial(self._save_if_first, trainer.save_checkpoint)
        )
        if diloco.ended:
            set_step(trainer, diloco.step)
            trainer.should_stop = True
            rank_zero_info(
                f"The job in {self.store} has ended after step {diloco.step}. This replica has"
                " its final weights."
            )
            return
        if had_left and not diloco.continues:
            rank_zero_warn(
                "The checkpoint's state of a replica that has left is not used: it is from another"
                " job, or another replica has taken its slot since, perhaps one that has continued"
                " from it. This replica begins with the outer weights."
            )
        whose = " with its own state" if diloco.continues else ""
        rank_zero_info(
            f"This replica is in slot {self.slot} of {self._max_replicas}, and continues the job in"
            f" {self.store}{whose} after step {diloco.step}."
        )

    def _take_slot(self, trainer: pl.Trainer) -> int:
        """Create the job or join it; wait for a slot if all are taken."""
        timeout, begin_s = self.ranks.timeout, time.monotonic()
        settings = self._job_settings(trainer)
        while (slot := self._elastic.begin(settings, self._max_replicas)) is None:
            text = f"All {self._max_replicas} slots of the job in {self.store} are taken"
            if time.monotonic() - begin_s > timeout.total_seconds():
                raise RuntimeError(
                    f"{text}, and none became free in {timeout}. Start fewer replicas, or another"
                    " job with a larger `max_replicas`."
                )
            rank_zero_info(f"{text}. This replica waits for one.")
            time.sleep(_ASK_AGAIN_S)
        return slot

    @override
    def on_train_start(self) -> None:
        trainer, diloco = self.module.trainer, self._elastic
        if diloco.step != self._starts_at:
            self._resume.skip()  # the job is ahead of this replica's checkpoint
            continue_at(trainer, diloco.step)
        batch_sizes = {getattr(one, "batch_size", None) for one in training_loaders(trainer)}
        if len(batch_sizes) == 1 and isinstance(size := batch_sizes.pop(), int):
            shares = super().distributed_sampler_kwargs["num_replicas"]
            diloco.weight_per_step = size * trainer.accumulate_grad_batches * shares
        super().on_train_start()
        steps = trainer.max_steps - trainer.global_step if trainer.max_steps != -1 else None
        if trainer.max_epochs not in (None, -1):
            steps = steps_to_come(trainer)
        if steps is not None:
            diloco.last_step = diloco.step + steps

    @override
    def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
        if self._diloco is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        self.session.check_save()
        try:
            self._resume.save(checkpoint, filepath, storage_options)
        except (OSError, RuntimeError) as error:
            rank_zero_warn(
                f"The checkpoint {filepath} was not saved, and training continues:"
                f" {type(error).__name__}: {error}. The log in {self.store} is complete without it."
            )

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        if self._diloco is None or self.is_first:
            super().remove_checkpoint(filepath)

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Leave the job; after SIGTERM, end with exit code 143."""
        super().on_exception(exception)
        if self._diloco is not None:
            log = self._elastic.transport.log
            log.say_leaving()
            log.leave(_LEAVE_S)
        if isinstance(exception, SIGTERMException):
            exception.code = TERMINATED

    def _replica_ranks(self) -> ReplicaRanks:
        """Return the connections between the ranks of this replica; collective."""
        if self.world_size == 1:
            return ReplicaRanks()
        decisions = copy(self.channels.world)
        decisions.ledger = self.group_ledger  # nothing goes to other replicas
        messages, states = (
            Channel.open(
                [decisions.ranks],
                self.global_rank,
                self.group_ledger,
                timeout=self.ranks.timeout,
                parent=self.channels.world,
            )
            for _ in range(2)
        )
        return ReplicaRanks(decisions, messages, states)

    def _save_if_first(self, save: Any, *args: Any, **kwargs: Any) -> None:
        """Save if this replica is the first, or if SIGTERM ends it and it may continue."""
        # SIGTERM ends a fit between two steps; anything else may do so within one
        leaves, why_not = isinstance(sys.exc_info()[1], SIGTERMException), ""
        if leaves and self.restore_checkpoint_after_setup:
            why_not = "the weights of a model on `meta` are restored only after it has joined"
        elif leaves and not self._elastic.leave(_LEAVE_S):
            why_not = f"{self.store} did not confirm its messages within {_LEAVE_S:.0f} s"
        if why_not:
            rank_zero_warn(
                f"This replica's own state is not saved, because {why_not}. When it is started"
                " again, it joins."
            )
        if self.is_first or (leaves and not why_not):
            save(*args, **kwargs)

    def _job_settings(self, trainer: pl.Trainer) -> dict[str, str]:
        """Return the settings that must be the same on all replicas, as short strings.

        Values longer than `_SHORT` characters are hashed.
        """
        found = {
            **self._elastic.fingerprint(),
            "max_replicas": str(self._max_replicas),
            "min_replicas": str(self._min_replicas),
            "max_steps": str(trainer.max_steps),
            "max_epochs": str(trainer.max_epochs),
            "sync": self._sync,
            "model": self._elastic.model_hash(),
        }
        return {
            name: value if len(value) <= _SHORT else hashlib.sha256(value.encode()).hexdigest()[:12]
            for name, value in found.items()
        }


def _checked_url(url: str | None) -> str:
    """Return the URL of the store, or raise a `ValueError`."""
    if url is None:
        raise ValueError(
            f"`store=None`, and the environment variable {STORE} is not set: all replicas need the"
            f" URL of a store that they reach. {LEGAL}"
        )
    if urlsplit(url).scheme not in SCHEMES:
        raise ValueError(f"`store={url!r}` is not the URL of a store. {LEGAL}")
    return url


def _monitors(trainer: pl.Trainer) -> bool:
    """Return whether a callback or scheduler monitors a metric, which may come from validation."""
    callbacks: Any = trainer.callbacks  # type: ignore[attr-defined]
    return any(getattr(callback, "monitor", None) is not None for callback in callbacks) or any(
        config.reduce_on_plateau for config in trainer.lr_scheduler_configs
    )
