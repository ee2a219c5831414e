"""The Lightning strategy for Domino tensor parallelism, arXiv:2409.15241."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.ledger import Traffic
from lightning_commfree.comm.requests import union
from lightning_commfree.comm.settings import check_count
from lightning_commfree.domino import DominoSettings, GradientMean, looks_finite, refuse_nonfinite
from lightning_commfree.domino.data_parallel import FLAGS_TAG
from lightning_commfree.fit.base import ReplicaStrategy
from lightning_commfree.fit.contracts import Algorithm
from lightning_commfree.fit.session import FitSession
from lightning_commfree.host import pl
from lightning_commfree.layouts.tensor_parallel import TensorParallel


class DominoMean(GradientMean, Algorithm):
    """`GradientMean` as the algorithm of a fit, with the contract's defaults for all else."""


class DominoSession(FitSession[DominoMean]):
    """Fit session for Domino, in which the ranks that share a model communicate on every batch.

    Before each optimizer step, every rank sends three numbers to all others: the index of its
    batch, whether its gradient contains NaN or Inf, and its requests.
    """

    @override
    def batch_begins(self) -> None:
        """End the epoch after this batch if it is the last one on any rank; collective."""
        self._stopping.share_last_batch(self._world)

    @contextmanager
    @override
    def backward(self, loss: Tensor) -> Iterator[None]:
        """Context manager that sends gradients if a step follows, and waits for their average.

        Raises:
            RuntimeError: a gradient is not finite, or ranks are on different batches; raised on all
                ranks.
        """
        self.between.average.active = not self.accumulates  # whether backward sends gradients
        yield
        if self.accumulates:
            return
        module, world = self._module, self._world
        batch = self._trainer.fit_loop.total_batch_idx
        is_finite = looks_finite(module.parameters(), world.peers)
        mine = torch.tensor([batch, not is_finite, self._stopping.requests.outgoing()])
        batches, nonfinite, requests = world.all_gather(mine, FLAGS_TAG).wait().unbind(1)
        if len(set(batches.tolist())) > 1:
            found = [f"rank {rank} is in batch {at}" for rank, at in enumerate(batches.tolist())]
            raise RuntimeError(
                f"The ranks are on different batches: {', '.join(found)}. `training_step` or a"
                " callback probably skipped a batch on only some ranks. Skip it on all ranks or on"
                " none."
            )
        self._stopping.requests.incoming(union(requests.tolist()))
        if nonfinite.any():
            step, size = self._trainer.global_step + 1, self._channels.within.size
            refuse_nonfinite(world, module, loss, step, size)
        self.between.land(module)


class DominoTPStrategy(ReplicaStrategy):
    """Tensor parallelism for an unmodified Hugging Face model, with overlapped all-reduces.

    When `fit` begins, before the optimizer is created, the `GPT2LMHeadModel` or Llama-like model
    (Llama, Mistral, Qwen2, Qwen3, Gemma) that the LightningModule contains, at any depth, is
    sharded in place: attention heads, MLPs and vocabulary are divided among the ranks of a tensor
    group. A batch is split into micro-batches that take turns, so that the all-reduces of one
    overlap with the computation of the others, in forward and backward passes. Any other model
    whose config has a tensor-parallel plan is sharded according to that plan, without overlap.

    Checkpoints contain the full model and optimizer state. They can be loaded at any
    tensor-parallel size, in a plain Trainer and, for the model's weights, with `from_pretrained`.
    After `fit`, the module contains the plain Hugging Face model again, with full weights;
    `trainer.optimizers` keep this rank's shards, which `trainer.save_checkpoint` gathers if all
    ranks call it. The world size is the data-parallel size times the tensor-parallel size. All
    ranks of a tensor group must get the same batch, which Lightning's own sampler ensures. A fit
    resumed on the same number of ranks continues bit for bit. With a different number of ranks, it
    continues from the same weights and optimizer state, and a warning lists everything that is
    reset.

    NaN or Inf in a gradient ends the fit on all ranks before the step, with an error that names the
    rank and parameter. `trainer.should_stop` on any rank and SIGTERM stop all ranks after the same
    step.

    A model of the classes above may be on the `meta` device when `fit` begins (built in
    `configure_model`, under `torch.device("meta")`): each rank then allocates only its shards, with
    values from a checkpoint (`ckpt_path`) or initialized layer by layer by the model's own
    `_init_weights`.

    If the model computes its own loss (`labels=`), the logits of the full vocabulary are never
    gathered, and the model's output has no logits. Without `labels`, the output contains the
    full logits.

    Args:
        tensor_parallel_size: number of consecutive ranks that share one model; if None, all ranks
            of a node. The groups train with data parallelism.
        split: how a batch is split into micro-batches. "batch": by rows (a batch of one row is
            split by tokens instead); "token": by chunks of the sequence, under causal attention;
            "weight": by outputs of row-parallel linear layers, which hides less communication;
            "hybrid": by rows and outputs; "none": wait for every all-reduce; "auto": the fastest of
            "batch", "token" and "none", chosen by timing the first 30 batches of each size
            (`domino.auto_split`).
        num_micro_batches: number of micro-batches, 2 or more.
        check_drift_every: number of steps between checks that parameters held by several ranks are
            still equal. The ranks compare hashes; a difference ends the fit with an error that
            names the parameters and ranks. 0 disables the check.
        **ddp_kwargs: `start_method`, `process_group_backend`, `timeout`, ... as in `DDPStrategy`.
            Training survives a network outage of up to half of `timeout` (30 minutes by default),
            but no more than about 15 minutes, because Linux then drops the connections.

    Attributes:
        settings: the arguments above except `check_drift_every`.
        ledger: bytes sent by this rank, seconds waited and number of collectives, by tag.

    Raises:
        ValueError: an argument is out of range.
        TypeError: an argument has the wrong type or does not exist.

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
        check_drift_every: int = 100,
        **ddp_kwargs: Any,
    ) -> None:
        check_count("check_drift_every", check_drift_every, 0, ", where 0 means never")
        self.settings = DominoSettings(tensor_parallel_size, split, num_micro_batches)
        self.check_drift_every = check_drift_every
        super().__init__(TensorParallel(self.settings), **ddp_kwargs)
        self.group_ledger = self.ledger  # one ledger for both axes: tags tell them apart

    @property
    def tensor_parallel_size(self) -> int:
        """Number of ranks that share one model; 0 if the Trainer has not set the devices yet."""
        return self.settings.tensor_parallel_size or self.num_processes

    @override
    def traffic(self, tokens_per_step: int) -> Traffic:  # type: ignore[override]
        """Forecast the bytes that this rank sends per optimizer step, by ledger tag.

        Call it in `on_fit_start` or later. The ledger's phase `STEPS` contains the measured bytes.
        The forecast assumes that a model that can compute its loss (`labels=`) does so. A module
        that computes the loss itself needs full logits and sends more than the forecast.

        Args:
            tokens_per_step: number of tokens that a tensor group trains on per optimizer step.
        """
        trainer = self.module.trainer
        mixed = torch.bfloat16 if self.precision_plugin.precision == "bf16-mixed" else None
        clips = bool(trainer.gradient_clip_val) and trainer.gradient_clip_algorithm != "value"
        sent = self.algorithm.bytes_per_step(self.module, tokens_per_step, mixed, clips)
        return Traffic(sent, 1, super().traffic().ddp_bytes_per_step)

    @override
    def fingerprint(self) -> dict[str, str]:
        return {**super().fingerprint(), "check_drift_every": repr(self.check_drift_every)}

    # -- the hooks of a fit

    @override
    def set_world_ranks(self) -> None:
        """Set the size of tensor groups, and then the ranks."""
        self.inside.size = self.tensor_parallel_size  # the Trainer has set the devices by now
        super().set_world_ranks()

    @override
    def drift_check_plan(self) -> tuple[int, Channel]:
        """Return `check_drift_every` and the channel of all ranks."""
        return self.check_drift_every, self.channels.world

    @override
    def make_algorithm(self, trainer: pl.Trainer) -> DominoMean:
        """Return a `DominoMean` of the models that `prepare` has sharded."""
        sharded = self.inside.sharded
        assert sharded is not None, "`prepare` has sharded the model"
        return DominoMean(sharded, self.channels, self.settings)
