"""Distributed Lion, arXiv:2404.00438, in Lightning's life cycle."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_commfree.comm.averaging import averaged_buffers
from lightning_commfree.lion import (
    DistributedLion,
    LionSettings,
    Voting,
    agree_on_parameters,
    mean_momenta,
)
from lightning_commfree.resume.rank_state import REPLICA, Adopted, Saved
from lightning_commfree.strategies._gradients import agree_on_overflow, why_gradients_change
from lightning_commfree.strategies._resumable import ResumableStrategy
from lightning_commfree.strategies.lockstep_end import LockstepEnd

BUFFERS_TAG = "buffers"


class DistributedLionStrategy(ResumableStrategy):
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
        node_size: k, consecutive ranks that average their gradients in full precision (DDP) and
            vote as one worker; each carries 1/k of the vote.
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

    _group_argument = "node_size"
    _algorithm = "Distributed Lion"

    def __init__(
        self,
        vote: str = "majority",
        ties: str = "zero",
        momentum_sync_every: int = 0,
        nonfinite: str = "raise",
        node_size: int = 1,
        overlap: bool = True,
        check_drift_every: int = 100,
        **ddp_kwargs: Any,
    ) -> None:
        super().__init__(group_size=node_size, **ddp_kwargs)
        self.settings = LionSettings(
            vote, ties, momentum_sync_every, nonfinite, node_size, check_drift_every
        )
        if not isinstance(overlap, bool):
            raise TypeError(f"`overlap={overlap!r}` must be True or False.")
        self.overlap = overlap
        self._voting: Voting | None = None
        self._overlaps = False
        self._end = LockstepEnd()
        self._averaged: set[str] = set()  # what DDP averages within a node, by name

    # -- the life of a fit

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            if not isinstance(optimizer, DistributedLion):
                raise TypeError(
                    f"`{type(self).__name__}` needs `DistributedLion`, but `configure_optimizers`"
                    f" returned `{type(optimizer).__name__}`: a vote has no meaning for another"
                    " optimizer. Return `lightning_commfree.DistributedLion(self.parameters(),"
                    " lr=1e-4, weight_decay=1.0)`, with a learning rate 3 to 10 times smaller and a"
                    " weight decay as much larger than AdamW's, or use the strategy `ddp`."
                )

    @override
    def _fingerprint(self) -> dict[str, str]:
        return self.settings.fingerprint()

    @override
    def _begin_fit(self, trainer: pl.Trainer) -> None:
        self._join()
        self._averaged = self._trainable()
        assert self._world_channel is not None, "it is open while a fit runs"
        self._end.install(trainer, self._world_channel)
        agree_on_overflow(self.precision_plugin, self._world_channel)
        why = why_gradients_change(trainer, self._module, self.precision_plugin)
        if self._group_size > 1:
            why.append(f"`node_size={self._group_size}` averages them over the node first")
        self._overlaps = self.overlap and not why
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

    @override
    def on_train_start(self) -> None:
        self._lion.follow_parameters()
        super().on_train_start()

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        own = {p for group in self._lion.param_groups for p in group["params"]}
        changed = self._voting is None or self._voting.parameters != own
        if changed or self._lion.voting is not self._voting:
            self._join()  # a callback has added parameters to the optimizer
        assert self._voting is not None, "`_join` has set it"
        if self._group_size > 1:
            self._check_thawed()
        with self._voting.during_backward() if self._overlaps else nullcontext():
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    @override
    def _after_step(self, stop: bool) -> bool:
        assert self._voting is not None, "a step has been taken"
        stop_agreed, self._voting.stop_agreed = self._voting.stop_agreed, False
        parted, self._voting.parted = self._voting.parted, False
        if parted:
            self._end.agree_in_step()
        return stop_agreed

    @override
    def _cycle(self) -> tuple[Mapping[str, int], int]:
        assert self._voting is not None, "the fit has begun"
        return self._voting.cycle()

    @override
    def _figures(self) -> dict[str, float]:
        """The shares of ties, zeros and agreement are those of the latest step."""
        assert self._voting is not None, "a step has been taken"
        return {f"lion/{name}": figure for name, figure in self._voting.figures().items()}

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._average_buffers()

    @override
    def on_train_end(self) -> None:
        self._average_buffers()
        super().on_train_end()

    @override
    def teardown(self) -> None:
        self._end.remove()
        if self._voting is not None:
            self._lion.leave()
            self._voting = None
        super().teardown()

    # -- checkpoints

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state, with floating-point buffers averaged over the ranks."""
        if not self._stopped_by_hand():
            self._average_buffers()
        return super().lightning_module_state_dict()

    @override
    def _rank_state(self) -> dict[str, Any]:
        assert self._voting is not None, "a fit runs"
        return self._voting.state_dict()

    @override
    def _load_rank_state(self, state: dict[str, Any]) -> None:
        assert self._voting is not None, "the fit has begun"
        self._voting.load_state_dict(state)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        step = checkpoint.get("global_step", 0)
        if step and not any("momentum" in own for own in self._lion.state.values()):
            raise ValueError(
                f"The checkpoint was saved after {step} steps and its optimizer state has no"
                " momentum, so it is not one of `DistributedLion`. Resume with the optimizer of"
                " the save, or load the weights alone: `fit` without `ckpt_path`, after"
                " `load_from_checkpoint`."
            )

    @override
    def _resume_fingerprint(self) -> dict[str, str]:
        return {}

    @override
    def _adopt(self, saved: Saved) -> Adopted | None:
        """Give every worker its momentum where it was there, a new one the mean of all."""
        size = int(saved.entry["fingerprint"]["node_size"])
        workers = saved.entry["ranks"] // size
        mine = self.global_rank // self._group_size
        wanted = [mine] if mine < workers else range(workers)

        parts = saved.load_all(worker * size for worker in wanted)
        if not parts:
            return None
        own = {name: parts[0][name] for name in REPLICA}
        if len(parts) > 1:
            own["optimizers"] = [mean_momenta([part["optimizers"][0] for part in parts])]

        said = "every worker takes up the momentum that it had"
        if self.world_size // self._group_size > workers:
            said += f", workers from {workers} on the mean of all"
        return Adopted(own, said)

    # -- inside

    @property
    def _lion(self) -> DistributedLion:
        (optimizer,) = self.optimizers
        assert isinstance(optimizer, DistributedLion), "`setup_optimizers` has looked"
        return optimizer

    def _trainable(self) -> set[str]:
        return {name for name, p in self._module.named_parameters() if p.requires_grad}

    def _check_thawed(self) -> None:
        """See that DDP averages within a node what is trained; it was told in the beginning."""
        if late := sorted(self._trainable() - self._averaged):
            raise RuntimeError(
                f"The parameters {late} became trainable after the fit had begun, and with"
                f" `node_size={self._group_size}` their gradients are not averaged over a node."
                " Make them trainable before `fit`, or use `node_size=1`."
            )

    def _join(self) -> None:
        """Make the optimizer vote on all of its parameters, in the order of the module."""
        channel = self._world_channel
        assert channel is not None, "it is open while a fit runs"
        named = agree_on_parameters(channel, self._module, self._lion.param_groups)
        state = self._voting.state_dict() if self._voting else None
        node = self._group_channel
        self._voting = self._lion.join(named, self.channel, self.settings, node)
        self._voting.stop, self._voting.ends = lambda: self._sigterm.requested, self._end.why
        if state is not None:
            self._voting.load_state_dict(state)

    def _average_buffers(self) -> None:
        if self._voting is not None:
            assert self._world_channel is not None, "it is open while a fit runs"
            for buffer, mean in averaged_buffers(self._module, self._world_channel, BUFFERS_TAG):
                buffer.copy_(mean)
