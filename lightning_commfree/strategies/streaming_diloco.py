"""Streaming DiLoCo, arXiv:2501.18512, in Lightning's life cycle."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_commfree.comm.view import FixedMembership
from lightning_commfree.diloco import (
    Codec,
    DiLoCoSettings,
    OuterOptimizerFactory,
    StreamingDiLoCo,
    default_outer_optimizer,
    split_into_fragments,
)
from lightning_commfree.domino import DominoSettings
from lightning_commfree.lightning_internals import steps_to_come
from lightning_commfree.strategies.base import ReplicaStrategy
from lightning_commfree.strategies.checks import REPLICAS, refuse_callbacks
from lightning_commfree.strategies.inside import FSDPSettings, chosen, name_of


class StreamingDiLoCoStrategy(ReplicaStrategy):
    """Replicas train apart and exchange outer gradients while they continue to compute.

    Every replica takes its own optimizer steps on its own share of the data. After every
    `sync_every` of them a fragment of the model is launched: the difference between the parameters
    on which all replicas last agreed and the local ones travels while training continues.
    `overlap_steps` later it lands: the mean difference is the gradient of an outer optimizer, and
    the result is mixed into the local parameters. Between exchanges a run sends nothing.

    Validation and the `state_dict` of checkpoints use the *outer* weights, on which all replicas
    agree; `fit` ends with the mean of all replicas' weights on all ranks. `WeightAveraging`
    averages the outer weights. Gradient clipping, weight decay and learning-rate schedules act
    inside a replica. A metric that `training_step` logs per step with `sync_dist=True` stays the
    replica's own; per epoch it means all ranks.

    Frozen parameters are never sent. Parameters that a callback thaws between two steps
    (`BackboneFinetuning`) become a fragment of their own. Frozen ones that hooks move apart on the
    replicas (the teacher of BYOL or DINO) are averaged at validations and at the end of `fit`. The
    forecast `traffic()` does not know of either.

    Args:
        sync_every: H, inner (optimizer) steps between two syncs of one fragment. 30 to 100 in the
            paper; 1 is the worst.
        num_fragments: P. None: 3 transformer blocks per fragment, plus one fragment for everything
            else.
        fragment_pattern: "strided" (block i to fragment i mod P), "sequential" (consecutive blocks)
            or "balanced" (tensors, equal bytes; for models without blocks).
        overlap_steps: tau, inner steps from launch to landing; 0 blocks. Several fragments may be
            in flight. At most 5 is advised.
        mix: alpha in [0, 1], weight of the local parameters at a landing: 0 takes the global ones,
            1 ignores them.
        wire_dtype: how outer gradients are rounded for the wire: a name, or a codec of your own;
            see `lightning_commfree.diloco.codec`.
        outer_optimizer: factory, from a list of fp32 parameters to a `torch.optim.Optimizer`; None
            for `SGD(lr=0.4, momentum=0.9, nesterov=True)`. It may return a tuple of the optimizer
            and a learning-rate scheduler, stepped with every landing of its fragment. With
            `start_method="spawn"` it must pickle: a `functools.partial`, not a lambda.
        replica_size: k, consecutive ranks that form one replica: data parallelism inside it, with
            `devices=k, num_nodes=M` one replica per node. Each of its ranks holds and exchanges 1/k
            of the outer state.
        inside: how they hold the model. "ddp": every rank all of it. "fsdp": 1/k of its parameters,
            gradients and optimizer state, in units of a transformer block, or those of an
            `FSDPSettings` (FSDP2). "domino", or a `DominoSettings`: a part of every layer of a
            transformers model, as `DominoTPStrategy` divides it; they see the same batch.
        nonfinite: what happens when a replica's weights hold NaN or Inf as a fragment of them
            leaves. "raise": all ranks stop and name it, and no checkpoint with such weights is
            written. "abstain": it does not count in that fragment's mean and goes on from the
            global copy; see `lightning_commfree.diloco.nonfinite`.
        evaluate: what a validation, and the checkpoints written for it, hold. "outer": the outer
            weights, which until a fragment's first landing are the initial ones, and later up to
            `sync_every` steps old. "mean": the plain mean of the replicas' local weights, exchanged
            for it (N/2 bytes in fp4): early stopping and best checkpoints
            then mean something in short runs. A checkpoint without a validation at its step takes
            an exchange of its own. Nothing is trained on it: the fit goes the same way.
        check_drift_every: cycles from one comparison of the replicas' global copies to the next,
            by a hash that travels with the exchange; a difference ends the fit. 0: never.
        outer_device: "cpu" keeps global copies and outer optimizer in (pinned) host memory: 8 bytes
            per parameter less on the device. None: where the parameters are.
        **ddp_kwargs: `start_method`, `process_group_backend`, `timeout`, ... as `DDPStrategy` takes
            them. A link may be down for half of `timeout` (30 minutes by default), and for at most
            about 15 minutes, after which Linux gives its connections up.

    Attributes:
        settings: the arguments above.
        ledger: bytes sent by this rank and seconds waited, by tag.

    Raises:
        ValueError: an argument outside its range.
        TypeError: `outer_optimizer` cannot be called, or an argument is unknown.

    Example::

        strategy = StreamingDiLoCoStrategy(sync_every=50, overlap_steps=2)
        trainer = Trainer(strategy=strategy, devices=2, num_nodes=4)
    """

    def __init__(  # noqa: PLR0913 - flat keywords, as YAML files and LightningCLI set them
        self,
        sync_every: int = 100,
        num_fragments: int | None = None,
        fragment_pattern: str = "strided",
        overlap_steps: int = 1,
        mix: float = 0.5,
        wire_dtype: str | Codec = "fp4",
        outer_optimizer: OuterOptimizerFactory | None = None,
        replica_size: int = 1,
        inside: str | FSDPSettings | DominoSettings = "ddp",
        nonfinite: str = "raise",
        evaluate: str = "outer",
        check_drift_every: int = 1,
        outer_device: str | None = None,
        **ddp_kwargs: Any,
    ) -> None:
        super().__init__(chosen(self, inside, replica_size, "replica_size"), **ddp_kwargs)
        self.settings = DiLoCoSettings(
            sync_every,
            num_fragments,
            fragment_pattern,
            overlap_steps,
            mix,
            wire_dtype,
            default_outer_optimizer if outer_optimizer is None else outer_optimizer,
            replica_size,
            name_of(inside),
            nonfinite,
            evaluate,
            check_drift_every,
            outer_device,
        )
        self._diloco: StreamingDiLoCo | None = None  # of the fit that runs
        self._fragments: list[list[str]] = []

    @property
    def fragments(self) -> list[list[str]]:
        """The parameter names of every fragment, fragment 0 first; from `on_fit_start` on.

        Fragments that join while a fit runs come after the others: thawed parameters, and, without
        names here, frozen ones that hooks move.
        """
        if self._diloco is not None:
            self._fragments = [list(outer.names[0]) for outer in self._diloco.fragments]
        return self._fragments

    @contextmanager
    def outer_weights(self) -> Iterator[None]:
        """Let the LightningModule hold the outer weights in the body, the local ones after it.

        Validation and checkpoints do this by themselves. A callback that looks at the model in
        between may use it; on all ranks with `replica_size` above 1, whose ranks hold a shard each.
        Outside of a fit nothing changes.

        Raises:
            RuntimeError: the body has written to parameters.
        """
        if self._diloco is None:
            yield
        else:
            with self._diloco.weight_swap.outer_weights():
                yield

    # -- the hooks of a fit

    @override
    def begin(self, trainer: pl.Trainer) -> StreamingDiLoCo:
        refuse_callbacks(trainer, type(self).__name__, REPLICAS)
        how = self.settings.num_fragments, self.settings.fragment_pattern
        fragments = split_into_fragments(self.module, *how)
        replicas, within = FixedMembership(self.channels.between), self.channels.within
        self._diloco = StreamingDiLoCo(self.module, fragments, self.settings, replicas, within)
        self._diloco.optimizers = self.optimizers
        return self._diloco

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        if self._diloco is not None:
            steps = steps_to_come(self.module.trainer)
            for text, warns in self._diloco.startup_messages(steps):
                rank_zero_warn(text) if warns else rank_zero_info(text)

    @override
    def teardown(self) -> None:
        self._fragments, self._diloco = self.fragments, None
        super().teardown()
