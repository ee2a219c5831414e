"""The Lightning strategy for Streaming DiLoCo (arXiv:2501.18512)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_commfree.comm.channel import Channel
from lightning_commfree.diloco import (
    Codec,
    DiLoCoSettings,
    FixedTransport,
    OuterOptimizerFactory,
    StreamingDiLoCo,
    split_into_fragments,
)
from lightning_commfree.domino import DominoSettings
from lightning_commfree.fit.base import ReplicaStrategy
from lightning_commfree.fit.checks import (
    REFUSED_IF_LOCAL,
    refuse_callbacks,
    refuse_max_norm,
    refuse_modes,
)
from lightning_commfree.fit.local_weights import LocalWeightsSession
from lightning_commfree.fit.session import FitSession
from lightning_commfree.host import pl
from lightning_commfree.layouts import FSDPSettings, choose_layout, layout_name
from lightning_commfree.lightning_internals import steps_to_come


class DiLoCoSession(LocalWeightsSession):
    """Fit session for Streaming DiLoCo, which also needs the inner optimizers."""

    between: StreamingDiLoCo

    @override
    def follow_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Accept optimizers that a hook has set: their parameters are trained from now on."""
        self.between.optimizers = optimizers

    @override
    def before_any_step(self, optimizer: Optimizer) -> None:
        """Add an optimizer that `configure_optimizers` did not return."""
        optimizers = self.between.optimizers
        if self._trainer.training and not any(optimizer is one for one in optimizers):
            self.between.optimizers = [*optimizers, optimizer]
            with self.between.stepping():  # its parameters become a fragment
                pass

    @override
    def stops_after(self) -> int | None:
        """Return the step after which every replica will have received a stop requested now."""
        return self.between.stops_after

    @override
    def check_save(self) -> None:
        """Raise an error on all ranks if a checkpoint would contain NaN or Inf; collective."""
        self.between.refuse_to_save(self._world)


class StreamingDiLoCoStrategy(ReplicaStrategy):
    """Replicas train independently and exchange outer gradients in the background.

    Each replica takes optimizer steps on its own share of the data. Every `sync_every` steps, each
    fragment of the model is *launched*: while training continues, the replica sends the difference
    between the parameters on which all replicas last agreed and its local parameters.
    `overlap_steps` steps later, the fragment *lands*: an outer optimizer uses the mean difference
    as its gradient, and the result is mixed into the local parameters. Nothing is sent between
    exchanges.

    Validation, checkpoints (`state_dict`) and the end of `fit` use the mean of all replicas'
    weights. With `evaluate="outer"`, the former two use the *outer* weights, on which all replicas
    agree: each fragment's *global copy*, as opposed to a replica's local copy. `WeightAveraging`
    averages the outer weights. Gradient clipping, weight decay and learning-rate schedules act
    within a replica. A metric that `training_step` logs per step with `sync_dist=True` covers only
    that replica; a metric logged per epoch is averaged over all ranks.

    Frozen parameters are never sent. Parameters that a callback unfreezes during the fit
    (`BackboneFinetuning`) become a new fragment. Frozen parameters that hooks change differently
    across replicas (the teacher in BYOL or DINO) are averaged before validation and at the end of
    `fit`. The traffic forecast (`traffic()`) includes neither these averages nor new fragments.

    Args:
        sync_every: H, the number of inner (optimizer) steps between two exchanges of a fragment;
            the lower, the closer the loss to that of data parallelism. "auto" exchanges as often as
            the link hides: it begins with 10, measures the exchanges, and then chooses the shortest
            of 10, 20, 30, 50, 100 and 200 steps in which the link is busy for at most 80 % of the
            time and the work of exchanges takes at most 2 %. H and tau change again when the
            link or the steps do. Each change is logged and saved in checkpoints, and restarts the
            outer optimizer. Two fits may choose differently, and so may a fit and its resumption,
            so their weights may differ; with a number they do not. The paper uses 30 to 100. See
            `lightning_commfree.diloco.pace`.
        num_fragments: P, the number of fragments. If None, each fragment contains up to 3
            transformer blocks, and one additional fragment contains all other parameters; a model
            without blocks is one fragment, or up to 4 with "balanced".
        fragment_pattern: "strided" (blocks are assigned to fragments round-robin), "sequential"
            (each fragment gets consecutive blocks) or "balanced" (tensors are assigned so that
            fragments have about equal bytes; for models without blocks).
        overlap_steps: tau, the number of inner steps from launch to landing; 0 blocks training
            during the exchange. Several fragments may be in flight. If training waits, raise it,
            to 5 at most with a fixed `sync_every`. With `sync_every="auto"` leave it alone: tau is
            5 at first and grows as the link requires, and this is its smallest value, at most 8.
            See `docs/tuning.md`.
        mix: alpha in [0, 1], the weight of the local parameters when a fragment lands: 0 replaces
            them with the global copy, 1 keeps them.
        wire_dtype: the number format in which outer gradients are sent: "fp32", "bf16", "int8",
            "fp4", "int2", or your own codec. "int2" uses error feedback, which needs 4 bytes of
            memory per parameter. See `lightning_commfree.diloco.codec`.
        outer_optimizer: a factory that takes a list of fp32 parameters and returns a
            `torch.optim.Optimizer`. The default is SGD with Nesterov momentum 0.9. Its learning
            rate is 0.8 with at least four replicas and a `sync_every` of at least 100, otherwise
            0.4; see `lightning_commfree.diloco.default_outer_optimizer`. The factory may also
            return a tuple of an optimizer and a learning-rate scheduler, which is stepped whenever
            the fragment lands. With `start_method="spawn"`, it must be picklable: use
            `functools.partial`, not a lambda.
        replica_size: k, the number of consecutive ranks that form a replica, with data parallelism
            inside it. With `devices=k, num_nodes=M`, each node is one replica. Each of the k ranks
            holds and exchanges 1/k of the outer state.
        inside: how these k ranks hold the model; only "ddp" if k is 1. "ddp": the full model on
            every rank. "fsdp" or an `FSDPSettings`: each rank holds 1/k of the parameters,
            gradients and optimizer state (FSDP2); by default, each transformer block is an FSDP
            unit. "domino" or a `DominoSettings`: tensor parallelism for a transformers model, as in
            `DominoTPStrategy`; the k ranks get the same batch.
        nonfinite: how to handle NaN or Inf in a replica's weights when a fragment is launched.
            "raise": all ranks stop with an error that names the replica, and no checkpoint with
            such weights is written. "abstain": the replica is left out of that fragment's mean and
            continues from the global copy; see `lightning_commfree.diloco.nonfinite`.
        evaluate: the weights to use for validation and for checkpoints saved with it. "mean": the
            mean of the replicas' local weights, with which the fit also ends. Each validation, and
            each checkpoint that is saved outside of one, waits for an exchange of all fragments
            (half a byte per parameter in fp4). "outer": the outer weights, which need no exchange.
            They are the initial weights until a fragment first lands, and later up to `sync_every`
            steps old. The choice does not affect training.
        check_drift_every: number of cycles (of `sync_every` steps) between checks that all replicas
            have the same global copies. They compare hashes, which are sent with the exchange; a
            difference ends the fit. 0 disables the check.
        outer_device: "cpu" keeps the global copies and the outer optimizer's state in (pinned) host
            memory, which saves 8 bytes per parameter on the device, but training waits for the
            outer step at each landing. If None, they are on the parameters' device.
        **ddp_kwargs: `start_method`, `process_group_backend`, `timeout`, ... as in `DDPStrategy`.
            Training survives a network outage of up to half of `timeout` (30 minutes by default),
            but no more than about 15 minutes, because Linux then drops the connections.

    Attributes:
        settings: the arguments above.
        ledger: bytes that this rank has sent and seconds that it has waited, by tag.

    Raises:
        ValueError: an argument is out of range.
        TypeError: `outer_optimizer` is not callable, or an argument does not exist.

    Example::

        trainer = Trainer(strategy=StreamingDiLoCoStrategy(), devices=2, num_nodes=4)
    """

    session_type: type[FitSession[Any]] = DiLoCoSession

    def __init__(  # noqa: PLR0913 - flat keywords, as YAML files and LightningCLI set them
        self,
        sync_every: int | str = "auto",
        num_fragments: int | None = None,
        fragment_pattern: str = "strided",
        overlap_steps: int = 1,
        mix: float = 0.5,
        wire_dtype: str | Codec = "fp4",
        outer_optimizer: OuterOptimizerFactory | None = None,
        replica_size: int = 1,
        inside: str | FSDPSettings | DominoSettings = "ddp",
        nonfinite: str = "raise",
        evaluate: str = "mean",
        check_drift_every: int = 1,
        outer_device: str | None = None,
        **ddp_kwargs: Any,
    ) -> None:
        super().__init__(choose_layout(inside, replica_size, "replica_size"), **ddp_kwargs)
        self.settings = DiLoCoSettings(
            sync_every,
            num_fragments,
            fragment_pattern,
            overlap_steps,
            mix,
            wire_dtype,
            outer_optimizer,
            replica_size,
            layout_name(inside),
            nonfinite,
            evaluate,
            check_drift_every,
            outer_device,
        )
        self._diloco: StreamingDiLoCo | None = None  # during a fit
        self._fragments: list[list[str]] = []

    @property
    def fragments(self) -> list[list[str]]:
        """Parameter names of each fragment, in index order; empty before `on_fit_start`.

        Fragments of parameters that were unfrozen during the fit come last. Frozen parameters are
        not listed.
        """
        if self._diloco is not None:
            self._fragments = [list(outer.names[0]) for outer in self._diloco.fragments]
        return self._fragments

    @contextmanager
    def outer_weights(self) -> Iterator[None]:
        """Swap the outer weights into the LightningModule for the duration of a `with` block.

        With `evaluate="outer"`, validation and checkpoints use them automatically. Callbacks that
        inspect the model can use this context manager. With `replica_size` above 1, all ranks must
        call it, because each rank holds a shard. It does nothing outside a fit.

        Raises:
            RuntimeError: the `with` block has changed parameters.
        """
        if self._diloco is None:
            yield
        else:
            with self._diloco.weight_swap.outer_weights():
                yield

    # -- the hooks of a fit

    @override
    def drift_check_plan(self) -> tuple[int, Channel]:
        """Return the steps between checks for drift, and the channel of this replica's ranks."""
        # replicas train independently; exchanges compare their global copies
        settings = self.settings
        return settings.check_drift_every * settings.first_sync_every, self.channels.within

    @override
    def make_algorithm(self, trainer: pl.Trainer) -> StreamingDiLoCo:
        """Check Trainer and optimizers, split the model, and return the algorithm, warmed up."""
        refuse_callbacks(trainer, type(self).__name__, REFUSED_IF_LOCAL)
        refuse_modes(type(self).__name__, self.optimizers)
        if self.inside.size > 1:
            refuse_max_norm(type(self).__name__, self.module)
        settings = self.settings
        fragments = split_into_fragments(
            self.module, settings.num_fragments, settings.fragment_pattern, self.optimizers
        )
        self._diloco = StreamingDiLoCo(
            self.module,
            fragments,
            settings,
            FixedTransport(self.channels.between, timed=settings.is_auto),
            self.channels.within,
            self.requests,
            lambda: self.session.clock.missed,
        )
        self._diloco.warm_up()
        self._diloco.optimizers = self.optimizers
        self._diloco.say = rank_zero_info
        # in manual optimization, GANs freeze one network while they train another
        self._diloco.ignores_frozen = not self.module.automatic_optimization
        return self._diloco

    @override
    def on_train_start(self) -> None:
        """Show the hints and warnings of Streaming DiLoCo as well."""
        super().on_train_start()
        if self._diloco is not None:
            steps = steps_to_come(self.module.trainer)
            for text, warns in self._diloco.startup_messages(steps):
                rank_zero_warn(text) if warns else rank_zero_info(text)

    @override
    def teardown(self) -> None:
        self._fragments, self._diloco = self.fragments, None
        super().teardown()
