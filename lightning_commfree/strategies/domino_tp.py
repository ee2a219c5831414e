"""Domino, arXiv:2409.15241, in Lightning's life cycle."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from typing_extensions import override

from lightning_commfree.comm.ledger import Traffic
from lightning_commfree.domino import (
    DominoSettings,
    GradientMean,
    looks_finite,
    refuse_nonfinite,
)
from lightning_commfree.domino.data_parallel import FLAGS_TAG
from lightning_commfree.strategies.base import ReplicaStrategy
from lightning_commfree.strategies.checks import present
from lightning_commfree.strategies.fit_session import FitSession
from lightning_commfree.strategies.inside.domino import TensorParallel


class DominoSession(FitSession[GradientMean]):
    """A fit whose ranks share a model, and so need each other in every batch.

    Before each step they exchange three numbers: in which batch this rank is, whether its gradient
    is not finite, and whether it wants to stop.
    """

    _stops = False  # some rank wants to, after the step that runs

    @override
    def batch_begins(self) -> None:
        self._stopping.share_last_batch(self._world)

    @contextmanager
    @override
    def accumulating(self) -> Iterator[None]:
        self.between.average.active = False  # gradients stay here
        try:
            with super().accumulating():
                yield
        finally:
            self.between.average.active = True

    @override
    def after_backward(self, loss: Tensor) -> None:
        """Put the mean of all replicas' gradients into place, if an optimizer step follows.

        Raises:
            RuntimeError: on all ranks: a gradient is not finite, or the ranks are in different
                batches.
        """
        if self.accumulates:
            return
        module, world = self._module, self._world
        batch = self._trainer.fit_loop.total_batch_idx
        mine = torch.tensor([batch, not looks_finite(module.parameters()), self._stopping.wanted])
        batches, nonfinite, stops = world.all_gather(mine, FLAGS_TAG).wait().unbind(1)
        if len(set(batches.tolist())) > 1:
            found = [f"rank {rank} is in batch {at}" for rank, at in enumerate(batches.tolist())]
            raise RuntimeError(
                f"The ranks of this fit are in different batches: {', '.join(found)}. Skip a batch"
                " on all ranks or on none, in `training_step` and in callbacks."
            )
        self._stops = bool(stops.any())
        if nonfinite.any():
            step, size = self._trainer.global_step + 1, self._channels.within.size
            refuse_nonfinite(world, module, loss, step, size)
        self.between.land(module)

    @override
    def after_step(self) -> None:
        if self._stops:
            self._stopping.agree_in_step()


class DominoTPStrategy(ReplicaStrategy):
    """Tensor parallelism of an unmodified Hugging Face model, its all-reduces hidden.

    The `GPT2LMHeadModel` or Llama-like model (Llama, Mistral, Qwen2, Qwen3) anywhere inside the
    LightningModule is divided in place when `fit` begins, before the optimizer is made: heads and
    MLPs over the ranks of a tensor group, the vocabulary too. A batch is split into micro-batches
    that take turns, so that the all-reduces of one fly while the others compute, in both
    directions. Other models whose config has a tensor-parallel plan are divided by it, without a
    schedule.

    Checkpoints hold the whole model and the whole optimizer state, so they load at any tensor
    parallel size, in a plain Trainer and, the model's part, by `from_pretrained`. After `fit` the
    module is the plain Hugging Face model again, with all weights in it; `trainer.optimizers` keep
    this rank's part, which `trainer.save_checkpoint` puts together, called on all ranks. The world
    is data parallel times tensor parallel: all ranks of a tensor group must get the same batch,
    which Lightning's sampler sees to. A fit that is resumed on as many ranks goes on bit for bit;
    on other ones from the same weights and optimizer state, and a message says what begins anew.

    NaN or Inf in a gradient ends the fit on all ranks before the step, and the error names where.
    `trainer.should_stop` on one rank and SIGTERM stop all ranks after the same step.

    A model of those classes may be on the `meta` device when `fit` begins (built in
    `configure_model`, under `torch.device("meta")`): each rank then makes its part only, of a
    checkpoint's values (`ckpt_path`) or of fresh ones, drawn layer by layer by the model's own
    `_init_weights`.

    If the model computes its own loss (`labels=`), logits of the whole vocabulary are never put
    together, and the model's output has none; without `labels` it has them all.

    Args:
        tensor_parallel_size: consecutive ranks that share one model; None: those of a node. The
            rest of the world is data parallel.
        split: "batch": rows of the batch (a batch of one is split by tokens instead); "token":
            pieces of the sequence, under causal attention; "weight": outputs of the row linears,
            which hides less; "hybrid": rows and outputs; "none": every all-reduce is waited for.
            "auto": the fastest of "batch", "token" and "none", chosen by timing the first 30
            batches of each size (`domino.auto_split`).
        num_micro_batches: parts, 2 or more.
        **ddp_kwargs: `start_method`, `process_group_backend`, `timeout`, ... as `DDPStrategy` takes
            them. A link may be down for half of `timeout` (30 minutes by default), and for at most
            about 15 minutes, after which Linux gives its connections up.

    Attributes:
        settings: the arguments above.
        ledger: bytes sent by this rank, seconds waited and collectives, by tag.

    Raises:
        ValueError: an argument outside its range.
        TypeError: an argument of another kind, or an unknown one.

    Example::

        trainer = Trainer(strategy=DominoTPStrategy(tensor_parallel_size=8), devices=8, num_nodes=4)
    """

    session_type = DominoSession
    inside: TensorParallel

    def __init__(
        self,
        tensor_parallel_size: int | None = None,
        split: str = "auto",
        num_micro_batches: int = 2,
        **ddp_kwargs: Any,
    ) -> None:
        self.settings = DominoSettings(tensor_parallel_size, split, num_micro_batches)
        super().__init__(TensorParallel(self, self.settings), **ddp_kwargs)
        self.group_ledger = self.ledger  # bytes within a tensor group count like all others

    @property
    def tensor_parallel_size(self) -> int:
        """Ranks that share one model."""
        return self.inside.size

    @override
    def traffic(self, tokens_per_step: int) -> Traffic:  # type: ignore[override]
        """Return what this rank will send in training steps; available from `on_fit_start` on.

        By the tags of the ledger, whose phase `STEPS` then says the same. If the module computes a
        loss of its own, from whole logits, these are gathered in place of `tensor_loss`.

        Args:
            tokens_per_step: of the batches of one tensor group between two optimizer steps.
        """
        trainer = self.module.trainer
        mixed = torch.bfloat16 if self.precision_plugin.precision == "bf16-mixed" else None
        clips = bool(trainer.gradient_clip_val) and trainer.gradient_clip_algorithm != "value"
        how = tokens_per_step, mixed, clips
        sent = self.algorithm.bytes_per_step(self.module, *how)
        return Traffic(sent, 1, super().traffic().ddp_bytes_per_step)

    # -- the hooks of a fit

    @override
    def begin(self, trainer: pl.Trainer) -> GradientMean:
        sharded = present(self.inside.sharded, "no model has been divided")
        return GradientMean(sharded, self.channels, self.settings)
