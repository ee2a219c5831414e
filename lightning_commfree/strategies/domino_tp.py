"""Domino, arXiv:2409.15241, in Lightning's life cycle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_commfree.comm.in_step import NUM_BYTES
from lightning_commfree.comm.in_step import TAG as IN_STEP_TAG
from lightning_commfree.comm.ledger import Ledger, all_gather_bytes, ring_all_reduce_bytes
from lightning_commfree.comm.mesh import tensor_mesh
from lightning_commfree.comm.sharing import START_TAG, share_random_state
from lightning_commfree.domino import (
    DominoSettings,
    GradientAverage,
    ShardedModule,
    bytes_per_step,
    check_batch,
    check_optimizers,
    check_states,
    looks_finite,
    refuse_nonfinite,
)
from lightning_commfree.strategies._callbacks import PARTS, refuse_callbacks
from lightning_commfree.strategies._domino_checks import check_fit, may_change, warn_once
from lightning_commfree.strategies._sharded_strategy import ShardedStrategy
from lightning_commfree.strategies._start import (
    check_ddp_kwargs,
    common_start,
    refuse_timed_validation,
)
from lightning_commfree.strategies._traffic import FitLog, Traffic
from lightning_commfree.strategies.together import Together


class DominoTPStrategy(ShardedStrategy):
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
    Uneven data, `trainer.should_stop` on one rank and SIGTERM end it on all after the same step.

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
            which hides less; "none": every all-reduce is waited for.
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

    def __init__(
        self,
        tensor_parallel_size: int | None = None,
        split: str = "batch",
        num_micro_batches: int = 2,
        **ddp_kwargs: Any,
    ) -> None:
        ddp_kwargs = check_ddp_kwargs(type(self).__name__, ddp_kwargs, with_ddp=False)
        super().__init__(**ddp_kwargs)
        self.settings = DominoSettings(tensor_parallel_size, split, num_micro_batches)
        self.ledger = Ledger()
        self._average: GradientAverage | None = None
        self._fit_log: FitLog | None = None
        self._together = Together()
        self._checked: set[str] = set()  # what has been looked at in this fit

    @property
    @override
    def tensor_parallel_size(self) -> int:
        """Ranks that share one model."""
        return self.settings.tensor_parallel_size or self.num_processes

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        size = self.tensor_parallel_size
        return {"num_replicas": self.world_size // size, "rank": self.global_rank // size}

    def traffic(self, tokens_per_step: int) -> Traffic:
        """Return what this rank will send in training steps; available from `on_fit_start` on.

        By the tags of the ledger, whose phase `STEPS` then says the same. If the module computes a
        loss of its own, from whole logits, these are gathered in place of `tensor_loss`.

        Args:
            tokens_per_step: of the batches of one tensor group between two optimizer steps.
        """
        module, trainer = self._module, self._module.trainer
        mixed = torch.bfloat16 if self.precision_plugin.precision == "bf16-mixed" else None
        clips = bool(trainer.gradient_clip_val) and trainer.gradient_clip_algorithm != "value"
        models, data = self.sharded.models, self._open.data
        sent = bytes_per_step(models, module.parameters(), tokens_per_step, data.size, mixed, clips)
        words = all_gather_bytes(NUM_BYTES, self.world_size)
        sent[IN_STEP_TAG] = trainer.accumulate_grad_batches * words
        assert self._fit_log is not None, "a fit has begun"
        by_tag = {tag: float(num_bytes) for tag, num_bytes in sent.items() if num_bytes}
        return Traffic(by_tag, 1, self._fit_log.ddp_bytes_per_step)

    def figures(self) -> dict[str, float]:
        """Return the latest figures by name, `comm/*`: this rank's, as the Trainer's loggers get.

        Nothing before the first step of a fit; after the fit those of its end.
        """
        return {} if self._fit_log is None else self._fit_log.figures()

    # -- life cycle, in the order in which the Trainer calls it

    @override
    def check_before_launch(self, trainer: pl.Trainer | None) -> None:
        """Refuse what cannot be trained; of a model that hooks make, `setup` sees to it."""
        if trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            tensor_mesh(self.world_size, self.tensor_parallel_size)
            if not may_change(self._module):
                self._check_fit(trainer)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            self._check_fit(trainer)
            undivided = set(self._module.parameters())
            numel = sum(p.numel() for p in undivided if p.requires_grad)
        super().setup(trainer)
        if fitting:
            check_optimizers(self.optimizers, undivided - set(self._module.parameters()))
            # Lightning clips by the norm of what a rank holds
            self.precision_plugin.clip_grad_by_norm = self._clip  # type: ignore[method-assign]
            ddp_bytes = ring_all_reduce_bytes(4 * numel, self.world_size)
            self._fit_log = FitLog(trainer, self.ledger, float(ddp_bytes))
            self._checked = set()
            self._together.install(trainer, self._open.world)

    @override
    def configure_ddp(self) -> None:
        """Divide the model, in place of the DDP wrapper, and put this rank's part on its device.

        The optimizer is made after it.
        """
        world, tensor, data = self._open
        self._filled = self._on_meta()
        meta = {"a model on the meta device": str(self._filled)}
        common_start(world, self._module, {**self.settings.fingerprint(), **meta})
        seed = torch.initial_seed() % 2**31
        init_seed = int(world.broadcast(torch.tensor(seed), START_TAG).wait())
        self._sharded = ShardedModule.prepare(self._module, tensor, self.settings, seed, init_seed)
        self._module.to(self.root_device)
        self._average = GradientAverage(data)
        for model in self._sharded.models:
            model.done = self._average.sublayer_is_done
            model.fell_back = warn_once()

    @override
    def on_train_start(self) -> None:
        """Let the ranks of a tensor group draw the same random numbers from here on.

        In a resumed fit those that came after the save.
        """
        super().on_train_start()
        share_random_state(self._open.tensor, self.root_device)
        self._resume.go_on()

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:  # a rank without data would leave its tensor group in a forward
            self._together.first_batch()
        super().on_train_batch_start(batch, batch_idx)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._check_first("train", (args, kwargs))
        return super().training_step(*args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._sharded is not None:
            self._check_first("validate", (args, kwargs))
        return super().validation_step(*args, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """In the body gradients accumulate on this rank; Lightning's word for it."""
        assert self._average is not None, "the model is divided"
        self._average.active = False
        try:
            yield
        finally:
            self._average.active = True

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        assert self._average is not None, "the model is divided"
        self._check_finite(closure_loss, self._average.active)
        if self._average.active:
            self._average.land(self._module.parameters())
            self.sharded.sum_shared_gradients()

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        if "states" not in self._checked:
            self._checked.add("states")
            if self.tensor_parallel_size > 1:
                check_states(self.optimizers, self.sharded.specs.keys())
        assert self._fit_log is not None, "a fit has begun"
        self._fit_log.after_step()
        return output

    @override
    def teardown(self) -> None:
        self._average = None
        self._together.remove()
        if self._fit_log is not None:
            self._fit_log.figures()
            self._fit_log.close()
        vars(self.precision_plugin).pop("clip_grad_by_norm", None)
        super().teardown()

    # -- inside

    @override
    def _split_settings(self) -> dict[str, str]:
        fingerprint = self.settings.fingerprint()
        return {name: fingerprint[name] for name in ("split", "num_micro_batches")}

    def _check_fit(self, trainer: pl.Trainer) -> None:
        name, size = type(self).__name__, self.tensor_parallel_size
        refuse_timed_validation(name, trainer)
        check_fit(name, self._module, self.precision_plugin, size)
        if size > 1:
            refuse_callbacks(trainer, name, PARTS)

    def _check_first(self, kind: str, batch: Any) -> None:
        if kind not in self._checked:
            self._checked.add(kind)
            check_batch(self._open.tensor, kind, batch)

    def _check_finite(self, loss: Tensor, steps: bool) -> None:
        """Stop all ranks where one has NaN or Inf, before anything is averaged and stepped with."""
        module, world = self._module, self._open.world
        finite = not steps or looks_finite(module.parameters())
        if not self._together.after_backward(steps, finite):
            step = module.trainer.global_step + 1
            refuse_nonfinite(world, module, loss, step, self.tensor_parallel_size)

    def _clip(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clip by the norm of the whole model's gradient, every number counted once."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norm = self.sharded.gradient_norm(parameters)
        torch.nn.utils.clip_grads_with_norm_(parameters, clip_val, norm)
