"""Distributed Lion, arXiv:2404.00438, in Lightning's life cycle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_commfree.domino import DominoSettings
from lightning_commfree.lion import LionSettings, VotingSession, only_lions, refuse_without_momenta
from lightning_commfree.strategies.base import ReplicaStrategy
from lightning_commfree.strategies.checks import agree_on_overflow, why_gradients_change
from lightning_commfree.strategies.inside import FSDPSettings, TensorParallel, chosen, name_of
from lightning_commfree.strategies.lockstep import LockstepSession


class DistributedLionStrategy(ReplicaStrategy):
    """Workers vote on the sign of every parameter's step instead of all-reducing gradients.

    Every worker keeps its gradient and its momentum to itself and sends one bit per parameter up;
    the result comes down in about as many. With odd n that is N (n - 1) / 4 n bytes a step for N
    parameters and n workers, where fp32 DDP sends 8 N (n - 1) / n. The parameters stay
    bit-identical on all ranks. `configure_optimizers` must return `DistributedLion`.

    Gradient clipping acts on a worker's own gradient by its own norm: the norm of the mean gradient
    cannot be known without sending gradients. It weighs the gradient against the momentum and does
    not shorten the step, which is `lr` for every parameter. Accumulated gradients are voted on once
    per optimizer step. A metric that `training_step` logs per step with `sync_dist=True` stays the
    worker's own; per epoch it means all ranks.

    Args:
        vote: "majority": the sign of the sum of votes; "average": their mean, in ceil(log2(n + 1))
            bits down.
        ties: "zero": a tie moves nothing, which takes a second bit down where there is one;
            "random": a tie is drawn, once for all workers, and one bit comes down. On a parameter
            where all workers have an exact zero nothing moves either way.
        momentum_sync_every: steps from one averaging of the workers' momenta to the next, at 64 /
            `momentum_sync_every` bits per parameter and step; 0: never, as in the paper.
        nonfinite: what happens when a worker's gradient holds NaN or Inf. "raise": all ranks stop
            and name it. "abstain": that worker votes 0 on that bucket of parameters and leaves its
            momentum as it was.
        node_size: k, consecutive ranks that average their gradients in full precision and vote as
            one worker; each carries 1/k of the vote.
        inside: how they hold the model. "ddp": every rank all of it. "fsdp": 1/k of its parameters,
            gradients and momentum, in units of a transformer block, or those of an `FSDPSettings`
            (FSDP2); each rank votes on its part, and its figures are of that part. "domino", or a
            `DominoSettings`: a part of every layer of a transformers model; they see the same
            batch.
        overlap: start a bucket's vote during backward, when its last gradient is there. Switched
            off, with a message, where gradients are changed after backward: clipping, fp16 scaling,
            `node_size` above 1, hooks between backward and step.
        check_drift_every: steps from one comparison of the ranks' parameters to the next, by a hash
            that travels with the votes; a difference ends the fit. 0: never.
        **ddp_kwargs: `start_method`, `process_group_backend`, `timeout`, ... as `DDPStrategy` takes
            them. A link may be down for half of `timeout` (30 minutes by default), and for at most
            about 15 minutes, after which Linux gives its connections up.

    Attributes:
        settings: the arguments above but `overlap`.
        ledger: bytes sent by this rank and seconds waited, by tag.

    Raises:
        ValueError: an argument outside its range.
        TypeError: an argument of another kind, or an unknown one.

    Example::

        strategy = DistributedLionStrategy(vote="majority", node_size=8)
        trainer = Trainer(strategy=strategy, devices=8, num_nodes=4)
    """

    session_type = LockstepSession

    def __init__(
        self,
        vote: str = "majority",
        ties: str = "zero",
        momentum_sync_every: int = 0,
        nonfinite: str = "raise",
        node_size: int = 1,
        inside: str | FSDPSettings | DominoSettings = "ddp",
        overlap: bool = True,
        check_drift_every: int = 100,
        **ddp_kwargs: Any,
    ) -> None:
        super().__init__(chosen(self, inside, node_size, "node_size"), **ddp_kwargs)
        self.settings = LionSettings(
            vote,
            ties,
            momentum_sync_every,
            nonfinite,
            node_size,
            name_of(inside),
            check_drift_every,
        )
        if ties == "random" and isinstance(self.inside, TensorParallel):
            raise ValueError(
                "`ties='random'` does not go with `inside='domino'`: ranks of a tensor group would"
                " draw other ties for what all of them hold. Leave `ties` at 'zero', or take"
                " `inside='fsdp'`."
            )
        if not isinstance(overlap, bool):
            raise TypeError(f"`overlap={overlap!r}` must be True or False.")
        self.overlap = overlap
        self._overlaps = False  # in the latest fit

    # -- the hooks of a fit

    @override
    def begin(self, trainer: pl.Trainer) -> VotingSession:
        self._lions = only_lions(type(self).__name__, self.optimizers)
        agree_on_overflow(self.precision_plugin, self.channels.world)
        why = why_gradients_change(trainer, self.module, self.precision_plugin)
        if not self.module.automatic_optimization:
            why.append("with manual optimization backward runs before the optimizer's step")
        if self.inside.size > 1:
            why.append(f"`node_size={self.inside.size}` averages them over the node first")
        if self.overlap and why:
            rank_zero_warn(
                "Votes start after backward and not during it (`overlap`), because gradients may"
                f" change after backward: {'; '.join(why)}."
            )
        if trainer.gradient_clip_val:
            rank_zero_warn(
                f"`gradient_clip_val={trainer.gradient_clip_val}` clips every worker's gradient by"
                " its own norm, before the vote. The norm of the mean gradient is unknown, because"
                " gradients are not sent."
            )
        self._overlaps = self.overlap and not why
        return VotingSession(self.module, self._lions, self.settings, self.channels, self._overlaps)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        refuse_without_momenta(self._lions, checkpoint.get("global_step", 0))
