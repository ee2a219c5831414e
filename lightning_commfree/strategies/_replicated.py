"""What our data-parallel strategies share: DDP without gradient sync. It knows no algorithm.

Launchers, samplers, `torch.compile` guard and device handling stay Lightning's `DDPStrategy`; what
it adds for gradients is taken away (the wrapper, its hooks) and what Lightning sends per batch is
too (the SIGTERM broadcast). In its place: a handshake and a common start, a channel to the other
replicas, a ledger, and the ledger's figures in the Trainer's loggers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.ledger import Ledger, ring_all_reduce_bytes
from lightning_commfree.comm.mesh import DATA, REPLICA, replica_mesh
from lightning_commfree.lightning_internals import set_ddp_group, syncs_batchnorm
from lightning_commfree.strategies._phases import CountingStrategy
from lightning_commfree.strategies._start import (
    check_ddp_kwargs,
    common_start,
    refuse_timed_validation,
)
from lightning_commfree.strategies._traffic import FitLog, Traffic
from lightning_commfree.strategies.signals import DeferredSigterm


class ReplicatedStrategy(CountingStrategy):
    """DDP without gradient sync; base of the strategies that replace its all-reduce.

    A subclass says what must be equal on all ranks (`_fingerprint`), prepares its algorithm
    (`_begin_fit`), runs it after each optimizer step (`_after_step`, which returns whether the
    ranks agreed to stop) and foretells its traffic (`_cycle`).

    Args:
        group_size: ranks that act as one on the channel; their gradients are averaged by DDP.
        **ddp_kwargs: what `DDPStrategy` takes, without its settings of gradient synchronization.

    Attributes:
        ledger: bytes sent by this rank to other groups and seconds waited, by tag.
        group_ledger: the same for what the strategy sends within the group; DDP's is not counted.

    Raises:
        TypeError: an argument that DDP has and that means nothing here, or one that nobody knows.
    """

    _group_argument = "replica_size"  # what a subclass calls `group_size`

    def __init__(self, group_size: int = 1, **ddp_kwargs: Any) -> None:
        ddp_kwargs = check_ddp_kwargs(type(self).__name__, ddp_kwargs, with_ddp=group_size > 1)
        super().__init__(**ddp_kwargs)
        self.ledger = Ledger()
        self.group_ledger = Ledger()
        self._group_size = group_size
        self._channel: Channel | None = None
        self._group_channel: Channel | None = None
        self._sigterm = DeferredSigterm()
        self._training_step_runs = False
        self._fit_log: FitLog | None = None
        self._traffic: Traffic | None = None

    @property
    def channel(self) -> Channel:
        """The channel to the other replicas; open from `setup_environment` to `teardown`."""
        assert self._channel is not None, (
            "the channel is open between `setup_environment` and `teardown` only"
        )
        return self._channel

    def traffic(self) -> Traffic:
        """Return what this rank will send; available from `on_fit_start` on."""
        assert self._traffic is not None, "the traffic is known from `on_fit_start` on"
        return self._traffic

    def figures(self) -> dict[str, float]:
        """Return the latest figures by name: `comm/*` and the algorithm's own.

        They are this rank's, and what its rows in the Trainer's loggers hold; `callback_metrics`
        does not. Nothing before the first step of a fit; after the fit those of its end.
        """
        return {} if self._fit_log is None else self._fit_log.figures()

    @property
    def _module(self) -> pl.LightningModule:
        assert self.lightning_module is not None, "the Trainer connects the module first"
        return self.lightning_module

    # -- life cycle, in the order in which the Trainer calls it

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        if self._channel is None:
            mesh = replica_mesh(self.world_size, self._group_size, self._group_argument)
            everybody = [list(range(self.world_size))]
            # gloo and CPU buffers also for CUDA models: the slow link is Ethernet, and a second
            # nccl communicator on a device can deadlock with the first
            world = Channel.open(
                everybody,
                self.global_rank,
                self.ledger,
                timeout=self.patience,
                full_duplex=self._group_size == 1,
                liveness=self.liveness,
            )
            self._channel = self._world_channel = world
            if self._group_size > 1:
                # the wider channel knows who is gone where a group only sees a member leave
                self._channel = Channel.open(
                    mesh.groups(REPLICA),
                    self.global_rank,
                    self.ledger,
                    timeout=self.patience,
                    wider=world,
                    full_duplex=True,
                    liveness=self.liveness,
                )
                self._group_channel = Channel.open(
                    mesh.groups(DATA),
                    self.global_rank,
                    self.group_ledger,
                    self.backend,
                    self.patience,
                    self.root_device,
                    world,
                    liveness=self.liveness,
                )

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            self._check_module(trainer)
        super().setup(trainer)
        if fitting:
            self._sigterm.install(trainer)
            self._begin_fit(trainer)
            self._traffic = self._forecast()
            ddp_bytes, cycle = self._traffic.ddp_bytes_per_step, self._traffic.cycle_steps
            self._fit_log = FitLog(trainer, self.ledger, ddp_bytes, cycle, self._figures)

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        try:
            super().setup_optimizers(trainer)
        except RuntimeError as error:
            if "multiple optimizers" not in str(error):
                raise
            # Lightning's advice, manual optimization, would be refused next
            raise ValueError(
                f"`{type(self).__name__}` needs exactly one optimizer, but `configure_optimizers`"
                " returned several. Put all parameters into one, with parameter groups where they"
                " differ."
            ) from error

    @override
    def configure_ddp(self) -> None:
        """Agree on what is trained and start from rank 0's weights.

        The DDP wrapper is put on within a group only.
        """
        channel = self._world_channel
        assert channel is not None, "`setup_environment` comes first"
        common_start(channel, self._module, self._fingerprint())
        if self._group_channel is not None:
            set_ddp_group(self, self._group_channel.group)
            super().configure_ddp()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._training_step_runs = True
        try:
            return super().training_step(*args, **kwargs)
        finally:
            self._training_step_runs = False

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        with self._named_in_group("gradients"):
            output = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self._after_step(self._sigterm.requested):
            self._sigterm.agree()
        assert self._fit_log is not None, "a fit has begun"
        self._fit_log.after_step()
        return output

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduce over all ranks, but not from within `training_step`.

        `self.log(..., sync_dist=True)` there would send at every step. A value that is logged per
        step stays within this rank's group; one that is logged per epoch is reduced over all ranks
        when the epoch ends.
        """
        if self._training_step_runs:
            if self._group_channel is None:
                return tensor
            group = self._group_channel.group
        return super().reduce(tensor, group, reduce_op)

    @override
    def on_train_end(self) -> None:
        self.figures()  # they stay when the algorithm goes
        super().on_train_end()

    @override
    def teardown(self) -> None:
        if self._fit_log is not None:
            self._fit_log.close()
        self._sigterm.remove()
        super().teardown()
        for channel in {self._channel, self._group_channel, self._world_channel} - {None}:
            assert channel is not None, "None was taken out"
            channel.close()
        self._channel = self._group_channel = self._world_channel = None
        set_ddp_group(self, None)

    # -- for subclasses

    @abstractmethod
    def _fingerprint(self) -> dict[str, str]:
        """Return the settings that must be equal on all ranks."""

    @abstractmethod
    def _begin_fit(self, trainer: pl.Trainer) -> None:
        """Prepare the algorithm; model and optimizers stand, all ranks hold the same weights."""

    @abstractmethod
    def _after_step(self, stop: bool) -> bool:
        """Run the algorithm after an optimizer step.

        Args:
            stop: whether this rank wants the training to stop; the others must learn of it.

        Returns:
            Whether all ranks stop now; the same on all ranks.
        """

    @abstractmethod
    def _cycle(self) -> tuple[Mapping[str, int], int]:
        """Return the bytes that this rank sends in a cycle by tag, and the steps of a cycle."""

    def _figures(self) -> dict[str, float]:
        """Return the algorithm's own figures for the Trainer's loggers, by name."""
        return {}

    # -- inside

    def _named_in_group(self, what: str) -> AbstractContextManager[None]:
        """The same for a body that computes too, and exchanges something within a group only."""
        world = None if self._group_channel is None else self._world_channel
        return nullcontext() if world is None else world.naming_lost(what, computing=True)

    def _check_module(self, trainer: pl.Trainer) -> None:
        name = type(self).__name__
        refuse_timed_validation(name, trainer)
        if not self._module.automatic_optimization:
            raise ValueError(
                f"`{name}` does not support manual optimization: it counts optimizer steps, and a"
                " LightningModule with `automatic_optimization=False` may take any number of them"
                " per batch. Set it to True, or use the strategy `ddp`."
            )
        if syncs_batchnorm(self) or any(
            isinstance(m, nn.SyncBatchNorm) for m in self._module.modules()
        ):
            raise ValueError(
                f"`{name}` does not support SyncBatchNorm, which exchanges statistics in every"
                " forward. Leave out `sync_batchnorm=True`: the strategy averages the statistics of"
                " ordinary BatchNorm layers when it needs them."
            )

    def _forecast(self) -> Traffic:
        trainable = sum(p.numel() for p in self._module.parameters() if p.requires_grad)
        ddp_bytes = ring_all_reduce_bytes(4 * trainable, self.world_size)
        return Traffic(*self._cycle(), float(ddp_bytes))
