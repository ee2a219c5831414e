"""Shard a transformers model in place and run its blocks on Domino's schedule.

A causal language model from transformers loops over its list of blocks. While the schedule is
active, the list yields stand-ins for the blocks, and the last stand-in runs all blocks as one
autograd node. Everything around the blocks (masks, positions, last norm, head, outputs) is still
run by transformers. Without the schedule (in evaluation and generation, or if the hidden states of
individual blocks are requested), the loop runs the blocks themselves, whose modules perform their
own all-reduces.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_commfree.comm.channel import Channel
from lightning_commfree.domino.auto_split import Size, SplitTrial, TimedRun
from lightning_commfree.domino.families import FAMILIES, Family, family_of
from lightning_commfree.domino.layers import TensorGroup, Trace
from lightning_commfree.domino.loss import causal_lm_loss
from lightning_commfree.domino.plan import apply_plan, check_plan, plan_of
from lightning_commfree.domino.schedule import Done, ScheduleRun
from lightning_commfree.domino.settings import AUTO, DominoSettings
from lightning_commfree.domino.sharding import Sharding, check_adapters, has_adapters
from lightning_commfree.domino.splits import choose_split, legal_splits
from lightning_commfree.domino.sublayers import Arguments
from lightning_commfree.model.meta_init import Materializer

# arguments that request outputs of individual blocks, or pass inputs to them: not scheduled
_NOT_SCHEDULED = ("output_attentions", "output_hidden_states", "encoder_hidden_states")
# KV cache arguments: a forward with a cache is not scheduled
_CACHE_ARGUMENTS = ("past_key_values", "past_key_value", "layer_past", "use_cache")


def check_divisible(model: nn.Module, num_ranks: int) -> None:
    """Raise a `ValueError` if an unsharded model cannot be divided among `num_ranks` ranks."""
    family = family_of(model)
    if family is not None:
        check_adapters(model, family.vocabulary(model))
        family.check_divisible(model, num_ranks)
    elif plan_of(model):
        check_plan(model, num_ranks)
    else:
        raise ValueError(
            f"Tensor parallelism is not supported for `{type(model).__name__}`: its config has no"
            f" tensor-parallel plan. Use one of {', '.join(FAMILIES)} (these run with Domino's"
            " schedule). Any other transformers model whose config has a `base_model_tp_plan` of"
            " column- and row-wise linear layers also works, without that schedule."
        )


class ParallelModel:
    """Shards a transformers model in place and, if possible, runs it on Domino's schedule.

    Raises a `ValueError`, without changing the model, if it cannot be sharded among the ranks.
    """

    def __init__(
        self,
        # with the same weights on every rank; in `FAMILIES`, it may be on the `meta` device, and is
        # then initialized one layer at a time (`model.meta_init`)
        model: nn.Module,
        channel: Channel,
        settings: DominoSettings,
        seed: int = 0,  # for random numbers that must differ between ranks
        init_seed: int = 0,  # for initializing a model that is on `meta`; the same on all ranks
    ) -> None:
        check_divisible(model, channel.size)
        if settings.split in ("weight", "hybrid") and has_adapters(model):
            raise ValueError(
                f"`split={settings.split!r}` does not support a model with LoRA: it would send"
                " slices of a layer's output before the adapter's output is added. Choose another"
                " `split`."
            )
        self.settings = settings
        self.group = TensorGroup(channel, seed)
        self.sharding = Sharding(model, self.group, Materializer(model, init_seed))
        self.trace: Trace | None = None  # called with every event of the schedule
        self.done: Done | None = None  # called with each sublayer whose gradients are complete
        # called with a message when a batch cannot be split as requested
        self.on_fallback: Callable[[str], None] = lambda _: None
        self.trial = SplitTrial(channel)  # for `split="auto"`
        # whether the blocks have a schedule, instead of performing their own all-reduces, and
        # whether the model's own loss is computed without gathering logits
        self.scheduled = self.shards_loss = False
        self._blocks: _ScheduledBlocks
        self._handles: list[Any] = []
        family = family_of(model)
        if family is not None:
            # shard first: the schedule refers to the sharded modules
            family.shard(self.sharding)
            self.sharding.materializer.materialize_rest()
            self._install_schedule(model, family)
            self._shard_loss(model)
        else:
            apply_plan(self.sharding)
        self._forbid_saving(model)

    def unshard(self, full_tensors: dict[nn.Parameter, Tensor]) -> None:
        """Restore the plain transformers model, given the full tensor of each sharded parameter."""
        for handle in self._handles:
            handle.remove()

        for parameter, values in full_tensors.items():
            parameter.data = values  # keep the object: optimizers and tied modules refer to it
            parameter.grad = None  # it has the shard's shape
        # in reverse: a later change may be inside a module that an earlier one replaced
        for undo in reversed(self.sharding.restore):
            undo()

    # -- changes to the model

    def _install_schedule(self, model: Any, family: Family) -> None:
        """Replace the list of blocks and hook the model, so that the schedule runs the blocks."""
        blocks = self.sharding.blocks
        if not blocks:
            return

        self.scheduled = True
        base = getattr(model, model.base_model_prefix)
        kinds = getattr(model.config, "layer_types", None) or ["same"]
        one_kind, as_tensor = len(set(kinds)) == 1, family.returns_tensor(blocks[0])
        self._blocks = _ScheduledBlocks(blocks, self._run_blocks, one_kind, as_tensor)
        self.sharding.restore.append(self._blocks.replace_in(*family.blocks_in(model)))
        # `always_call`, so that the loop gets the real blocks again even after a failed forward
        self._handles += [
            base.register_forward_pre_hook(self._choose_schedule, with_kwargs=True),
            base.register_forward_hook(self._stop_schedule, always_call=True),
        ]

    def _shard_loss(self, model: Any) -> None:
        """Replace the loss with one on sharded logits, unless it is custom or there is LoRA."""
        # a user's own loss needs full logits, and peft calls the `forward` of the model inside
        # directly, so these hooks would not run
        if model.loss_function.__name__ != "ForCausalLMLoss" or has_adapters(model):
            return

        self.shards_loss = True
        head = model.lm_head
        first = head.weight.shape[0] * self.group.rank
        self.sharding.restore.append(_loss_restorer(model))
        model.loss_function = causal_lm_loss(self.group, first, head.num_words)
        self._handles += [
            model.register_forward_pre_hook(self._choose_logits, with_kwargs=True),
            model.register_forward_hook(self._drop_local_logits, always_call=True),
        ]

    def _forbid_saving(self, model: nn.Module) -> None:
        if isinstance(getattr(model, "save_pretrained", None), MethodType):
            vars(model)["save_pretrained"] = _refuse_to_save
            self.sharding.restore.append(lambda: vars(model).pop("save_pretrained"))

    # -- forward of the blocks

    def _run_blocks(
        self,
        hidden: Tensor,  # after the embedding
        block: nn.Module,  # any of them: it tells whether activations are checkpointed
        given: Sequence[Arguments],  # one for all blocks, or one per block
    ) -> Tensor:
        """Return the residual stream, shape (B, T, H), after all blocks, before the last norm.

        Backward can run through the result only once.
        """
        # the masks of different block kinds differ only by a window, which does not affect splits
        run = self._make_run(hidden, given[0], _is_checkpointed(block))
        if not hidden.requires_grad:  # frozen embeddings: backward must still reach the node
            hidden = hidden.detach().requires_grad_()
        output: Tensor = _Stack.apply(hidden, run, given)  # type: ignore[no-untyped-call]
        return output

    def _make_run(
        self, hidden: Tensor, arguments: dict[str, Any], checkpoint: bool
    ) -> ScheduleRun | TimedRun:
        """Choose a split, and return the run of this batch, timed if the split is on trial."""
        unsummed, self.group.unsummed = self.group.unsummed, None
        assert unsummed is None or hidden is unsummed, (
            "the model has changed its embedding before the first block"
        )

        sublayers = self.sharding.sublayers
        attention, settings, timed = sublayers[0].attention, self.settings, False
        if settings.split == AUTO:
            # cached: reading a mask waits for the device
            legal = cache(partial(legal_splits, hidden, arguments, attention))
            name, timed = self.trial.choose(Size.of(hidden), legal)
            settings = replace(settings, split=name)

        config = getattr(attention, "config", None)
        split = choose_split(settings, hidden, arguments, config, self.on_fallback)
        run = ScheduleRun(
            sublayers,
            self.group,
            split,
            checkpoint,
            self.trace,
            self.done,
            unsummed=unsummed is not None,
        )
        return self.trial.timed(run, name, hidden) if timed else run

    # -- hooks around forward of the model

    def _choose_schedule(self, base: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Forward pre-hook: decide whether the schedule runs the blocks."""
        cache = kwargs.get("past_key_values")
        requested = any(
            kwargs.get(name) if name in kwargs else getattr(base.config, name, None)
            for name in _NOT_SCHEDULED
        )
        # transformers has not applied `config.use_cache` yet, so True is from the caller
        cached = cache is not None or kwargs.get("use_cache") is True

        active = torch.is_grad_enabled() and not requested and not cached
        self._blocks.reset(active)
        # Older versions of transformers checkpoint around the call to a block. The recomputation
        # would mistake the embedding's partial sums for the finished embedding.
        around = getattr(base, "gradient_checkpointing", False) and not hasattr(
            self.sharding.blocks[0], "gradient_checkpointing"
        )
        self.group.overlap_embedding = active and self.sharding.raw_embedding and not around

    def _stop_schedule(self, base: Any, args: Any, output: Any) -> None:
        """Forward hook: end the schedule, also after an error."""
        self._blocks.reset(False)
        self.group.overlap_embedding, self.group.unsummed = False, None

    def _choose_logits(self, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Forward pre-hook: if `labels` are given, let the head return this rank's logits only."""
        names = list(inspect.signature(type(model).forward).parameters)[1:]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        self.group.local_logits = given.get("labels") is not None

    def _drop_local_logits(self, model: Any, args: Any, output: Any) -> Any:
        """Forward hook: return the output without logits if they are only this rank's."""
        local, self.group.local_logits = self.group.local_logits, False
        if not local or output is None:
            return output

        # drop the logits: callers would mistake this rank's logits for the full vocabulary's
        if isinstance(output, tuple):
            return (output[0], None, *output[2:])
        return type(output)(**{k: v for k, v in output.items() if k != "logits"})


class _ScheduledBlocks(nn.ModuleList):
    """List of blocks that yields stand-ins while the schedule is active.

    It replaces the model's own list until `ParallelModel.unshard`. Its children are the blocks,
    under the same names, so parameter names and state dicts do not change.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        run: RunBlocks,
        one_kind: bool,  # all blocks get the same arguments, so that one stand-in is enough
        as_tensor: bool,  # a block returns a tensor instead of a tuple
    ) -> None:
        super().__init__(blocks)
        self.active = False
        self._recorded: list[Arguments] = []
        passed = () if one_kind else blocks[:-1]
        last = blocks[0] if one_kind else blocks[-1]
        self.stand_ins = [_StandIn(block, self._recorded, None, as_tensor) for block in passed]
        self.stand_ins.append(_StandIn(last, self._recorded, run, as_tensor))

    def replace_in(self, owner: nn.Module, name: str) -> Callable[[], None]:
        """Replace the plain list in `owner`, and return a function that undoes the change."""
        plain = getattr(owner, name)
        self.training = plain.training
        setattr(owner, name, self)

        def undo() -> None:
            plain.training = self.training
            setattr(owner, name, plain)

        return undo

    def reset(self, active: bool) -> None:
        """Discard recorded arguments, and set whether the list yields stand-ins (`active`)."""
        self.active = active
        self._recorded.clear()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.stand_ins) if self.active else super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            return super().__getitem__(index)
        # `nn.ModuleList` would construct this class without its arguments
        return self.stand_ins if self.active else nn.ModuleList(list(self)[index])


RunBlocks = Callable[[Tensor, nn.Module, Sequence[Arguments]], Tensor]


class _StandIn:
    """Stand-in for a block in the model's loop; forwards attribute access to the block.

    Calling a stand-in records its block's arguments, because different kinds of blocks get
    different masks. The call returns the residual stream unchanged, except that the last stand-in
    runs all blocks and returns their output.
    """

    def __init__(
        self,
        block: nn.Module,
        recorded: list[Arguments],  # in this forward pass so far; one list for all stand-ins
        run: RunBlocks | None,  # None except in the last stand-in
        as_tensor: bool,  # as in `_ScheduledBlocks`
    ) -> None:
        self._block, self._recorded, self._run, self._as_tensor = block, recorded, run, as_tensor
        self._signature = inspect.signature(type(block).forward)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # `copy` reads such names before `_block` exists
            raise AttributeError(name)
        return getattr(self._block, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> _StandIn:
        return self  # a copied model still runs the blocks of this one

    def __call__(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        bound = self._signature.bind(self._block, hidden, *args, **kwargs).arguments
        extra = {k: v for k, v in bound.items() if k not in ("self", "hidden_states")}
        extra.update(extra.pop("kwargs", {}))
        arguments = {k: v for k, v in extra.items() if k not in _CACHE_ARGUMENTS}
        self._recorded.append({k: v for k, v in arguments.items() if not k.startswith("encoder_")})

        if self._run is not None:
            given = list(self._recorded)
            self._recorded.clear()  # else masks would stay in memory until the next forward
            hidden = self._run(hidden, self._block, given)
        return hidden if self._as_tensor else (hidden,)


class _Stack(torch.autograd.Function):
    """All blocks as one autograd node, computed by a `ScheduleRun`."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, run: ScheduleRun | TimedRun, arguments: Sequence[Arguments]
    ) -> Tensor:
        ctx.run = run
        return run.forward(hidden, arguments)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        if not torch.autograd._is_checkpoint_valid():  # type: ignore[no-untyped-call]
            # the run accumulates gradients of all parameters, whether requested or not
            raise RuntimeError(
                "A model sharded by Domino does not support `torch.autograd.grad` or"
                " `backward(inputs=...)`: its blocks always compute gradients for all parameters."
                " Call `backward()` without `inputs`, or use another strategy."
            )
        return ctx.run.backward(gradients[0]), None, None


def _loss_restorer(model: Any) -> Callable[[], None]:
    """Return a function that restores the model's present loss function."""
    own, before = "_loss_function" in vars(model), vars(model).get("_loss_function")

    def undo() -> None:
        if own:
            model._loss_function = before
        else:
            del model._loss_function

    return undo


def _refuse_to_save(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError(
        "The model is sharded: `save_pretrained` would write only this rank's shard. Call it after"
        " `fit` has returned, or load a checkpoint, which contains the full model, into an"
        " unsharded model."
    )


def _is_checkpointed(block: Any) -> bool:
    return bool(getattr(block, "gradient_checkpointing", False)) and block.training
