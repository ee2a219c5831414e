"""The Lightning strategy for Distributed Lion, arXiv:2404.00438."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_commfree.comm.channel import Channel
from lightning_commfree.domino import DominoSettings
from lightning_commfree.fit.base import ReplicaStrategy
from lightning_commfree.fit.checks import (
    agree_on_overflow,
    compiled_as_a_whole,
    refuse_manual,
    refuse_max_norm,
    why_gradients_change,
)
from lightning_commfree.fit.session import FitSession
from lightning_commfree.host import callbacks, pl
from lightning_commfree.layouts import (
    FSDPSettings,
    TensorParallel,
    choose_layout,
    layout_name,
)
from lightning_commfree.lion import LionSettings, LionVotes, only_lion, refuse_without_momenta
from lightning_commfree.model.replication import AveragedBuffers
from lightning_commfree.model.shards import copy_to_cpu
from lightning_commfree.resume.contents import KEY

_WHY_NOT_MANUAL = (
    "its ranks exchange something at every optimizer step, but manual optimization may step any"
    " number of times per batch, and other optimizers on other ranks"
)


class LionSession(FitSession[LionVotes]):
    """Fit session for Distributed Lion, whose ranks vote at every step and hold equal weights."""

    exchanges_every_step = True

    @override
    def begin(self, resumed: bool) -> None:
        """Let the master copies follow weights that hooks have changed, then begin."""
        self.between.lion.follow_parameters()
        super().begin(resumed)

    @override
    def before_any_step(self, optimizer: Optimizer) -> None:
        """Raise a `RuntimeError` for an optimizer that `configure_optimizers` did not return."""
        if self._trainer.training and optimizer is not self.between.lion:
            raise RuntimeError(
                f"`{type(optimizer).__name__}` steps parameters of the module, but"
                " `configure_optimizers` did not return it. Its steps are not exchanged, so the"
                " ranks would end with different weights. Return it from `configure_optimizers`."
            )

    @override
    def step_left_out(self) -> None:
        """Count it and wait for all ranks; raise an `AgreedError` if one takes the step."""
        super().step_left_out()
        self._stopping.check_together(
            "An optimizer step was left out (`optimizer_step` did not call `optimizer.step`)",
            "Ranks that exchange something at every step must take the same steps. Agree on the"
            " condition first, for example with an all-reduce, or use `nonfinite='abstain'`.",
        )

    @override
    def validation_begins(self) -> None:
        """Average the buffers over all replicas; collective."""
        super().validation_begins()
        self.between.average_buffers()

    @override
    def module_state(self, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return `read()` with averaged buffers, copied; the module keeps its own. Collective."""
        if self._ranks.interrupted:
            return read()
        # a checkpoint contains the means, but saving must not change how a fit trains
        buffers = self.between.buffers.tensors()
        own = [buffer.clone() for buffer in buffers]
        self.between.average_buffers()
        state: dict[str, Any] = copy_to_cpu(read(), only=buffers)
        for buffer, values in zip(buffers, own, strict=True):
            buffer.copy_(values)
        return state

    @override
    def fit_ends(self) -> None:
        """Average the buffers over all replicas; collective."""
        self.between.average_buffers()


class DistributedLionStrategy(ReplicaStrategy):
    """Workers vote on the sign of every parameter's update instead of all-reducing gradients.

    Each worker keeps its gradient and momentum local. It sends its vote, one bit per parameter,
    and receives the result, about one bit per parameter. With N parameters and an odd number n of
    workers, a worker sends N (n - 1) / (4 n) bytes per step; fp32 DDP sends 8 N (n - 1) / n.
    The parameters remain bit-identical on all ranks. `configure_optimizers` must return a
    `DistributedLion`.

    Gradient clipping uses the norm of each worker's own gradient: the norm of the mean gradient
    cannot be computed without sending gradients. Clipping changes the weight of the gradient
    relative to the momentum, not the size of the step, which is `lr` for every parameter.
    Accumulated gradients are voted on once per optimizer step. A metric that `training_step` logs
    per step with `sync_dist=True` covers only that worker; a metric logged per epoch is averaged
    over all ranks.

    Args:
        vote: "majority": the sign of the sum of the votes; "average": the mean of the votes, so
            that the result uses ceil(log2(n + 1)) bits per parameter.
        ties: "zero": no update on a tie, so that the result uses a second bit per parameter if ties
            are possible; "random": a random sign, the same on all workers, so that the result uses
            one bit. A parameter whose update is exactly zero on every worker is never updated.
        nonfinite: how to handle NaN or Inf in a worker's gradient. "raise": all ranks stop with an
            error that names the worker. "abstain": that worker votes 0 on the affected bucket of
            parameters and does not update its momentum.
        node_size: k, the number of consecutive ranks that average their gradients in full precision
            and vote as one worker; each rank sends 1/k of the vote.
        inside: how these k ranks hold the model; only "ddp" if k is 1. "ddp": the full model on
            every rank. "fsdp" or an `FSDPSettings`: each rank holds 1/k of the parameters,
            gradients and momentum (FSDP2), votes on its shard and logs metrics for it; by default,
            a unit is a transformer block. "domino" or a `DominoSettings`: tensor parallelism for a
            transformers model; the k ranks get the same batch.
        overlap: whether to start the vote on a bucket during backward, when its last gradient is
            ready. Disabled with a warning if gradients may change after backward: through clipping,
            fp16 scaling, `node_size` above 1, or hooks between backward and step.
        check_drift_every: number of steps between checks that all ranks have the same parameters.
            The ranks compare hashes sent with the votes; a difference ends the fit. 0 disables the
            check.
        **ddp_kwargs: `start_method`, `process_group_backend`, `timeout`, ... as in `DDPStrategy`.
            Training survives a network outage of up to half of `timeout` (30 minutes by default),
            but no more than about 15 minutes, because Linux then drops the connections.

    Attributes:
        settings: the arguments above except `overlap`.
        ledger: bytes sent by this rank and seconds waited, by tag.

    Raises:
        ValueError: an argument is out of range.
        TypeError: an argument has the wrong type or does not exist.

    Example::

        strategy = DistributedLionStrategy(vote="majority", node_size=8)
        trainer = Trainer(strategy=strategy, devices=8, num_nodes=4)
    """

    session_type = LionSession

    def __init__(
        self,
        vote: str = "majority",
        ties: str = "zero",
        nonfinite: str = "raise",
        node_size: int = 1,
        inside: str | FSDPSettings | DominoSettings = "ddp",
        overlap: bool = True,
        check_drift_every: int = 100,
        **ddp_kwargs: Any,
    ) -> None:
        super().__init__(choose_layout(inside, node_size, "node_size"), **ddp_kwargs)
        self.settings = LionSettings(
            vote,
            ties,
            nonfinite,
            node_size,
            layout_name(inside),
            check_drift_every,
        )
        if ties == "random" and isinstance(self.inside, TensorParallel):
            raise ValueError(
                "`ties='random'` does not work with `inside='domino'`: the ranks of a tensor group"
                " would draw different signs for parameters that all of them hold. Leave `ties` at"
                " 'zero', or use `inside='fsdp'`."
            )
        if not isinstance(overlap, bool):
            raise TypeError(f"`overlap={overlap!r}` must be True or False.")
        self.overlap = overlap
        self._overlaps = False  # whether the latest fit overlapped votes with backward

    # -- the hooks of a fit

    @override
    def check_module(self) -> None:
        """Raise a `ValueError` for manual optimization, and as the layout does."""
        refuse_manual(type(self).__name__, self.module, _WHY_NOT_MANUAL)
        super().check_module()

    @override
    def drift_check_plan(self) -> tuple[int, Channel]:
        """Return `check_drift_every` and the channel of all ranks, whose weights must be equal."""
        return self.settings.check_drift_every, self.channels.world

    @override
    def not_restored(self) -> list[str]:
        """Return messages about state that is not restored, also `WeightAveraging`'s buffers."""
        lost, averaging = super().not_restored(), getattr(callbacks, "WeightAveraging", ())
        averages = any(isinstance(one, averaging) for one in self.module.trainer.callbacks)  # type: ignore[attr-defined]
        if averages and self.world_size > 1 and AveragedBuffers(self.module).averaged:
            lost.append(
                "`WeightAveraging` continues on every rank with rank 0's buffers (BatchNorm"
                " statistics), which are in its state"
            )
        return lost

    @override
    def make_algorithm(self, trainer: pl.Trainer) -> LionVotes:
        """Check the fit, warn about what limits votes, and return its `LionVotes`; collective."""
        lion = only_lion(type(self).__name__, self.optimizers)
        if self.world_size > 1:
            refuse_max_norm(type(self).__name__, self.module)
        agree_on_overflow(self.precision_plugin, self.channels.world)
        why = why_gradients_change(trainer, self.module, self.precision_plugin)
        if self.inside.size > 1:
            why.append(f"`node_size={self.inside.size}` averages them over the node first")
        if self.overlap and why:
            rank_zero_warn(
                "Votes start only after backward, despite `overlap=True`, because gradients may"
                f" change after backward: {'; '.join(why)}."
            )
        if trainer.gradient_clip_val:
            rank_zero_warn(
                f"`gradient_clip_val={trainer.gradient_clip_val}` clips each worker's gradient by"
                " its own norm before the vote. The norm of the mean gradient is unknown, because"
                " gradients are not exchanged."
            )
        self._overlaps = self.overlap and not why
        if self._overlaps and (compiled := compiled_as_a_whole(self.module)):
            rank_zero_warn(
                f"Votes start only when backward ends, despite `overlap=True`, because `{compiled}`"
                " is compiled as a whole, and torch.compile returns all of its gradients together."
                " Compile block by block instead: `for block in blocks: block.compile()`."
            )
        return LionVotes(
            self.module,
            lion,
            self.settings,
            self.channels,
            self._overlaps,
            self.requests,
            sharded=self.inside.states is not None,
        )

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load optimizer states; raise a `ValueError` if another optimizer saved them."""
        super().load_optimizer_state_dict(checkpoint)
        # Distributed Lion saves momentum buffers, which only a hook may have dropped since
        if checkpoint.get(KEY, {}).get("algorithm") != LionVotes.name:
            refuse_without_momenta(self.algorithm.lion, checkpoint.get("global_step", 0))
