"""The Lightning strategy for Streaming DiLoCo with replicas that join, leave and die.

Each replica is a separate job with its own Trainer: for Lightning, the world is one replica. The
strategy coordinates the replicas as follows:

- *Steps.* `trainer.global_step` is the position in the schedule that all replicas share. A joining
  replica starts at the position of the other replicas, which may be in the middle of an epoch.
- *Data.* There are `max_replicas` slots, each with a share of the training data. A replica trains
  on the share of its slot, starting at the position that corresponds to its step.
- *Unequal speed.* With `sync="time"`, slower replicas skip steps of the schedule: `global_step` and
  learning rates advance as on the other replicas, but every replica reads its data without gaps.
- *Validation and checkpoints.* Only the first of the current members validates and saves. If the
  fit depends on a monitored metric, every replica validates. All replicas use the same weights, so
  they get the same result.
- *Stopping.* `trainer.should_stop` on one replica stops all replicas after the same step. SIGTERM
  stops only the replica that receives it; if that replica has several ranks, it stops after the
  next step at which a fragment lands, that is, at which the result of an exchange is applied.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import time
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_commfree.comm.liveness import job_store
from lightning_commfree.comm.settings import check_choice, check_count
from lightning_commfree.comm.sockets import own_address
from lightning_commfree.diloco import default_outer_optimizer, split_into_fragments
from lightning_commfree.diloco.strategy import StreamingDiLoCoStrategy
from lightning_commfree.elastic.algorithm import ElasticDiLoCo
from lightning_commfree.elastic.lighthouse import LighthouseRendezvous
from lightning_commfree.elastic.membership import (
    ElasticMembership,
    Limits,
    Rendezvous,
    StateTransfer,
)
from lightning_commfree.elastic.replica_ranks import ReplicaRanks
from lightning_commfree.elastic.state_server import StateServer
from lightning_commfree.fit.checks import (
    REFUSED_IF_LOCAL,
    refuse_callbacks,
    refuse_manual,
)
from lightning_commfree.fit.clock import Clock
from lightning_commfree.fit.local_weights import LocalWeightsSession
from lightning_commfree.fit.ranks import Ranks
from lightning_commfree.fit.session import FitSession
from lightning_commfree.fit.stopping import Stopping
from lightning_commfree.host import TrainerFn, pl
from lightning_commfree.lightning_internals import (
    Patches,
    forget_loaders,
    skip_steps,
    validate_if,
)
from lightning_commfree.resume.data_position import (
    continue_at,
    step_schedulers,
    training_loaders,
)

RENDEZVOUS = "COMMFREE_RENDEZVOUS"
_SHORT = 40  # maximum number of characters in a setting that is sent in full
_DRAIN_S = 20.0  # how long to wait for in-flight exchanges after SIGTERM


class ElasticSession(LocalWeightsSession):
    """Fit session for one elastic replica.

    The replicas run independently: a hook may run after different steps on different replicas.
    """

    least_ranks = 2  # traffic is compared with DDP on 2 ranks or more: another replica may join
    same_hooks = False

    @override
    def begin(self, resumed: bool) -> None:
        del resumed
        self._trains = True
        FitSession.begin(self, resumed=True)

    @override
    def _restart(self) -> None:
        raise RuntimeError(
            "Weights were loaded in the middle of the fit (`load_state_dict`). Elastic replicas do"
            " not support this, because they would have to do it after the same step. Start another"
            " job from these weights, or use `StreamingDiLoCoStrategy`."
        )

    @override
    def after_step(self) -> None:
        sigterm, several = self._stopping.sigterm, self._ranks.size > 1
        diloco: Any = self.between
        # fragments land at the same steps on all ranks, so all ranks reach this collective
        if several and diloco.has_landed:
            flags = self._ranks.all_values(sigterm.requested + 2 * sigterm.requeue_requested)
            if any(flags):
                sigterm.agree(requeues=any(flag & 2 for flag in flags))
        if diloco.skipped:
            trainer = self._trainer
            skip_steps(trainer, diloco.skipped)
            step_schedulers(trainer, trainer.global_step, trainer.current_epoch)
            self.clock.steps += diloco.skipped
        super().after_step()


class _ElasticStopping(Stopping):
    """Stops all replicas if one of them requests a stop; SIGTERM stops only this replica."""

    def __init__(self, trainer: pl.Trainer, ranks: Ranks, clock: Clock, patches: Patches) -> None:
        super().__init__(trainer, ranks, clock, patches)
        self._several = True
        self._follow_loops(patches)

    @property
    @override
    def wanted(self) -> bool:
        return self._requested

    @override
    def agree_after_step(self) -> None:
        self._agreed = self._trainer.should_stop = True

    @override
    def agree_here(self) -> None:
        if self._trains and not self._ranks.interrupted:
            self._defer_stop()


class ElasticDiLoCoStrategy(StreamingDiLoCoStrategy):
    """Streaming DiLoCo with replicas that join, leave and die during the fit.

    Start one Trainer per replica, each with its own launcher. Also start a lighthouse, which tracks
    the replicas, on a machine that is not preempted (`commfree-lighthouse`). If a replica dies, the
    others repeat the exchange without it and lose no steps. A restarted replica joins again: it
    fetches the outer weights from another replica, and takes part in the next exchange. See
    `docs/elastic.md`.

    All replicas need the same model, settings, `max_steps` and `max_epochs`. They may have
    different batch sizes: a replica's outer gradient is weighted by the number of samples it was
    computed from.

    Args:
        rendezvous: URL of the lighthouse. If None, the value of the environment variable
            COMMFREE_RENDEZVOUS is used.
        max_replicas: number of slots, each with its share of the training data. The shares of empty
            slots are not trained on.
        min_replicas: minimum number of replicas. If there are fewer, all of them wait when the
            next fragment is due to land.
        heartbeat_timeout: maximum number of seconds between a replica's heartbeats. If a replica
            exceeds it, the others abandon their exchange with that replica. Use the same value as
            for the lighthouse.
        sync: how replicas of unequal speed stay together. "steps": every replica takes `sync_every`
            steps between two exchanges of a fragment, and faster replicas wait. "time": only the
            fastest replica takes all of these steps. The other replicas take part in the exchange
            after their current step, with the steps they have taken, and skip the remaining steps.
        **kwargs: as in `StreamingDiLoCoStrategy`, except that `replica_size` must be the number of
            ranks of this Trainer, and `evaluate` must be "outer". The default outer learning rate
            is 0.4, regardless of the number of replicas.

    Attributes:
        slot: this replica's slot; 0 until a fit has begun.

    Raises:
        ValueError: an argument is out of range, or not supported.
        ModuleNotFoundError: torchft is not installed.

    Example::

        strategy = ElasticDiLoCoStrategy(rendezvous="http://10.0.0.1:29510", sync_every=50)
        trainer = Trainer(strategy=strategy, devices=1, max_steps=10_000)
    """

    session_type = ElasticSession

    def __init__(
        self,
        rendezvous: str | None = None,
        max_replicas: int = 8,
        min_replicas: int = 1,
        heartbeat_timeout: float = 5.0,
        sync: str = "steps",
        **kwargs: Any,
    ) -> None:
        # The number of replicas changes, but the outer optimizer must be the same on all of them.
        default = default_outer_optimizer(replicas=1, sync_every=1)
        kwargs["outer_optimizer"] = kwargs.get("outer_optimizer") or default
        super().__init__(**kwargs)
        self.rendezvous = _checked_url(rendezvous or os.environ.get(RENDEZVOUS))
        check_count("max_replicas", max_replicas, 1)
        check_count("min_replicas", min_replicas, 1)
        if min_replicas > max_replicas:
            raise ValueError(
                f"`min_replicas={min_replicas}` is above `max_replicas={max_replicas}`, so the fit"
                " could never begin."
            )
        if not heartbeat_timeout > 0:
            raise ValueError(
                f"`heartbeat_timeout={heartbeat_timeout}` must be greater than 0 (in seconds)."
            )
        check_choice("sync", sync, ("steps", "time"))
        if sync == "time" and self.settings.replica_size > 1:
            raise ValueError(
                f"`sync='time'` does not support `replica_size={self.settings.replica_size}` yet:"
                " after every step, its ranks would have to agree on the steps to skip."
                " Use `sync='steps'`."
            )
        if self.settings.evaluate != "outer":
            raise ValueError(
                f"`evaluate={self.settings.evaluate!r}` needs all replicas for validation, but"
                " only one elastic replica runs it. Use `evaluate='outer'`."
            )
        LighthouseRendezvous(self.rendezvous)  # raises an error without torchft
        self._limits, self._sync = Limits(min_replicas, max_replicas), sync
        self._heartbeat_timeout_s = heartbeat_timeout
        self._started_s = self._waited_s = 0.0  # when training starts
        self.slot = 0

    def services(self, host: str, timeout_s: float) -> tuple[Rendezvous, StateTransfer]:
        """Create a client of the lighthouse, and a state server that listens on `host`."""
        return LighthouseRendezvous(self.rendezvous, timeout_s), StateServer(host)

    @property
    def is_first(self) -> bool:
        """Whether this replica is the first of the current members, which validates and saves."""
        return self._elastic.view.rank == 0 and not self._elastic.is_rejoining

    @property
    def _elastic(self) -> ElasticDiLoCo:
        assert isinstance(self._diloco, ElasticDiLoCo)
        return self._diloco

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        if not self.module.trainer.training:  # every replica validates on all data
            return super().distributed_sampler_kwargs
        mine = super().distributed_sampler_kwargs  # within this replica
        size = mine["num_replicas"]
        return {
            "num_replicas": self._limits.max_replicas * size,
            "rank": self.slot * size + mine["rank"],
        }

    # -- the hooks of a fit

    @override
    def setup_environment(self) -> None:
        size = self.settings.replica_size
        if self.world_size != size:
            raise ValueError(
                f"This Trainer has {self.world_size} ranks, but `replica_size={size}`. Each elastic"
                " replica has its own Trainer: start the script once per replica, with as many"
                " ranks (`devices` times `num_nodes`) as `replica_size`."
            )
        super().setup_environment()

    @override
    def stopping(self, trainer: pl.Trainer, clock: Clock) -> Stopping:
        return _ElasticStopping(trainer, self.ranks, clock, self.patches)

    @override
    def not_restored(self) -> list[str]:
        lost = "elastic replicas begin with the outer weights, without what was in flight"
        return [*super().not_restored(), lost]

    @override
    def begin(self, trainer: pl.Trainer) -> ElasticDiLoCo:
        name, settings = type(self).__name__, self.settings
        refuse_callbacks(trainer, name, REFUSED_IF_LOCAL)
        refuse_manual(name, self.module, "a joiner could not find its position in the data")
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
        timeout, host = self.ranks.timeout, own_address(str(urlsplit(self.rendezvous).hostname))
        rendezvous, transfer = self.services(host, timeout.total_seconds())
        membership = ElasticMembership(
            rendezvous,
            transfer,
            f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}",
            self.ledger,
            host,
            self._limits,
            timeout,
            self._heartbeat_timeout_s,
            self._replica_ranks(),
            by_time,
        )
        self._diloco = diloco = ElasticDiLoCo(
            self.module, fragments, settings, membership, self.channels.within, self.requests
        )
        diloco.optimizers = self.optimizers
        diloco.ignores_frozen = not self.module.automatic_optimization
        # a replica that rejoins skips steps of the schedule, so the fit must not end with an epoch
        epochs = trainer.max_steps == -1 or trainer.max_epochs not in (None, -1)
        diloco.may_rejoin = self.world_size == 1 and not by_time and not epochs
        if isinstance(transfer, StateServer):
            transfer.report = self._report_progress
        return diloco

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        diloco = self._elastic
        joined = diloco.begin(self._job_settings(trainer))
        self.slot = diloco.slot
        if joined:
            trainer.num_sanity_val_steps = 0  # the other replicas would wait for this one
        forget_loaders(trainer)  # a scheduler may have requested their length before `slot` was set
        validate_if(trainer, self.patches, lambda: self.is_first or _monitors(trainer))
        self.patches.put(
            trainer, "save_checkpoint", partial(self._save_if_first, trainer.save_checkpoint)
        )
        rank_zero_info(
            f"This replica is in slot {self.slot} of {self._limits.max_replicas}"
            + (f" and is joining after step {diloco.step}." if joined else ".")
        )

    @override
    def on_train_start(self) -> None:
        trainer = self.module.trainer
        if self._elastic.joined is not None:
            self._resume.skip()  # the other replicas are ahead of every checkpoint
            continue_at(trainer, self._elastic.step)
        batch_sizes = {getattr(one, "batch_size", None) for one in training_loaders(trainer)}
        if len(batch_sizes) == 1 and isinstance(size := batch_sizes.pop(), int):
            ranks = super().distributed_sampler_kwargs["num_replicas"]
            self._elastic.weight_per_step = size * trainer.accumulate_grad_batches * ranks
        self._started_s, self._waited_s = time.monotonic(), self.ledger.seconds_waited
        super().on_train_start()
        if trainer.max_steps != -1:
            self._elastic.last_step = self._elastic.step + trainer.max_steps - trainer.global_step

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        if self._diloco is None or self.is_first:
            super().remove_checkpoint(filepath)

    @override
    def teardown(self) -> None:
        """After SIGTERM, first wait for in-flight exchanges, so that other replicas get them."""
        trainer = self.module.trainer
        if self._diloco is not None and trainer.received_sigterm:
            self._elastic.drain(_DRAIN_S)
        super().teardown()

    def _replica_ranks(self) -> ReplicaRanks:
        if self.world_size == 1:
            return ReplicaRanks()
        store, name = job_store(), self.ranks.broadcast(secrets.token_hex(4))
        if store is None:
            raise RuntimeError(
                "Multi-rank elastic replicas need a TCPStore: do not set up the process group"
                " with another `init_method`."
            )
        return ReplicaRanks(self.global_rank, self.world_size, store, name)

    def _save_if_first(self, save: Any, *args: Any, **kwargs: Any) -> None:
        if self.is_first:
            save(*args, **kwargs)

    def _report_progress(self) -> dict[str, float]:
        """Return this replica's progress, which `commfree-lighthouse status` displays."""
        diloco, seconds = self._elastic, time.monotonic() - self._started_s
        return {
            "step": diloco.step,
            "steps_per_second": diloco.inner_steps / max(seconds, 1e-9),
            "stalled_seconds": self.ledger.seconds_waited - self._waited_s,
            "sent_bytes": self.ledger.bytes_sent,
        }

    def _job_settings(self, trainer: pl.Trainer) -> dict[str, str]:
        """Return the settings that must be the same on all replicas, as short strings.

        Values longer than `_SHORT` characters are hashed.
        """
        found = {
            **self._elastic.fingerprint(),
            "max_replicas": str(self._limits.max_replicas),
            "min_replicas": str(self._limits.min_replicas),
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
    parts = urlsplit(url or "")
    if parts.scheme != "http" or not parts.hostname or parts.port is None:
        raise ValueError(
            f"`rendezvous={url!r}` is not the URL of a lighthouse. Start one with"
            " `commfree-lighthouse --bind ADDRESS`, and pass `rendezvous='http://ADDRESS:29510'`,"
            f" or set {RENDEZVOUS}."
        )
    return str(url)


def _monitors(trainer: pl.Trainer) -> bool:
    """Return whether a callback or scheduler monitors a metric, which may come from validation."""
    callbacks: Any = trainer.callbacks  # type: ignore[attr-defined]
    return any(getattr(callback, "monitor", None) is not None for callback in callbacks) or any(
        config.reduce_on_plateau for config in trainer.lr_scheduler_configs
    )
