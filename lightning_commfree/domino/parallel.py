"""Putting the schedule into a transformers model: its own code goes on calling it.

A causal language model of transformers loops over its blocks. While a schedule is wanted, the list
of blocks yields a single one, which runs all of them; where blocks are of several kinds, one for
each, which notes what it gets, and the last runs all of them. Everything around the loop stays
transformers': masks, positions, the last norm, head and outputs. Where a schedule does not apply,
in evaluation, generation or when hidden states of single blocks are asked for, the loop runs as
ever, and the sharded modules do their own all-reduces.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.materialize import Materializer
from lightning_commfree.domino.adapters import check_adapters, has_adapters
from lightning_commfree.domino.auto_split import Size, SplitTrial, TimedRun
from lightning_commfree.domino.choose_split import choose_split, legal_splits
from lightning_commfree.domino.families import FAMILIES, Family, family_of
from lightning_commfree.domino.group import TensorGroup, Trace
from lightning_commfree.domino.loss import causal_lm_loss
from lightning_commfree.domino.plan import apply_plan, check_plan, plan_of
from lightning_commfree.domino.schedule import Done, ScheduleRun
from lightning_commfree.domino.settings import AUTO, DominoSettings
from lightning_commfree.domino.sharding import Sharding
from lightning_commfree.domino.stack import run_schedule

_NOT_FOR_BLOCKS = ("past_key_values", "past_key_value", "layer_past", "use_cache")
_NOT_SCHEDULED = ("output_attentions", "output_hidden_states", "encoder_hidden_states")


def check_divisible(model: nn.Module, ranks: int) -> None:
    """See that a model can be divided among so many ranks; it is not changed.

    Raises:
        ValueError: it cannot, with the reason.
    """
    family = family_of(model)
    if family is not None:
        check_adapters(model, family.vocabulary(model))
        family.check(model, ranks)
    elif plan_of(model):
        check_plan(model, ranks)
    else:
        raise ValueError(
            f"Tensor parallelism of `{type(model).__name__}` is not supported: its config has no"
            f" tensor-parallel plan. Scheduled are {', '.join(FAMILIES)}; any other model of"
            " transformers whose config has a `base_model_tp_plan` of column- and row-wise linears"
            " is divided by it."
        )


class ParallelModel:
    """A transformers model that is divided and scheduled, in place.

    Args:
        model: on every rank the same, with the same weights; of `FAMILIES` also on the `meta`
            device: it gets fresh values, a layer at a time (`materialize`).
        channel: to the ranks of the tensor group.
        settings: split and micro-batches.
        seed: of the random numbers that differ from rank to rank.
        init_seed: of the values of a model on `meta`, the same on all ranks.

    Attributes:
        sharding: what is divided, and how.
        trace: if set, told of every event of the schedule: what, which sublayer, micro-batch.
        done: if set, told of a sublayer whose gradients are there, in backward.
        scheduled: the schedule runs its blocks; else they do their own all-reduces.
        divides_loss: its own loss is computed of this rank's logits.
        fell_back: told why a batch was split in another way than asked for.
        trial: finds the split of each size of batches, if that is "auto".

    Raises:
        ValueError: the model cannot be divided, or not among so many ranks; it is unchanged.
    """

    def __init__(
        self,
        model: nn.Module,
        channel: Channel,
        settings: DominoSettings,
        seed: int = 0,
        init_seed: int = 0,
    ) -> None:
        check_divisible(model, channel.size)
        if settings.split in ("weight", "hybrid") and has_adapters(model):
            raise ValueError(
                f"`split={settings.split!r}` sends slices before an adapter has added its own:"
                " choose another `split` for a model with LoRA."
            )
        self.settings = settings
        self.group = TensorGroup(channel, seed)
        self.sharding = Sharding(model, self.group, Materializer(model, init_seed))
        self.trace: Trace | None = None
        self.done: Done | None = None
        self.fell_back: Callable[[str], None] = lambda _: None
        self.trial = SplitTrial(channel)
        self.scheduled = self.divides_loss = False
        self._handles: list[Any] = []
        self._given: list[dict[str, Any]] = []  # to the blocks of this forward, so far
        family = family_of(model)
        if family is not None:
            family.shard(self.sharding)
            self.sharding.materializer.materialize_rest()
            self._schedule(model, family)
            self._divide_loss(model)
        else:
            apply_plan(self.sharding)
        self._refuse_to_save(model)

    def join(self, wholes: dict[nn.Parameter, Tensor]) -> None:
        """Make the model transformers' own again.

        Args:
            wholes: the whole tensors, by this rank's parts; see `whole_tensor`.
        """
        for handle in self._handles:
            handle.remove()

        for parameter, whole in wholes.items():
            parameter.data = whole
            parameter.grad = None
        for undo in reversed(self.sharding.restore):
            undo()

    # -- what is put into the model

    def _schedule(self, model: Any, family: Family) -> None:
        blocks, base = self.sharding.blocks, getattr(model, model.base_model_prefix)
        if not len(blocks):
            return

        self.scheduled = True
        kinds = getattr(model.config, "layer_types", None) or ["same"]
        last = blocks[len(blocks) - 1]
        # each kind of block has a mask of its own: they are gathered until the last one is called
        calls = [self._gather] * (len(blocks) - 1) if len(set(kinds)) > 1 else []
        returns_tensor = family.returns_tensor(last)
        stack = [self._of_block(call, last, returns_tensor) for call in (*calls, self._stack)]
        _become_scheduled(blocks, stack, self.sharding)
        self._handles += [
            base.register_forward_pre_hook(self._begin, with_kwargs=True),
            base.register_forward_hook(self._end, always_call=True),
        ]

    def _divide_loss(self, model: Any) -> None:
        # the user's own; or adapters around the model call its `forward`, past all hooks
        if model.loss_function.__name__ != "ForCausalLMLoss" or has_adapters(model):
            return

        self.divides_loss = True
        head = model.lm_head
        first = head.weight.shape[0] * self.group.rank
        self.sharding.restore.append(_put_back_loss(model))
        model.loss_function = causal_lm_loss(self.group, first, head.words)
        self._handles += [
            model.register_forward_pre_hook(self._begin_loss, with_kwargs=True),
            model.register_forward_hook(self._end_loss, always_call=True),
        ]

    def _refuse_to_save(self, model: nn.Module) -> None:
        if isinstance(getattr(model, "save_pretrained", None), MethodType):
            vars(model)["save_pretrained"] = _refuse_to_save
            self.sharding.restore.append(lambda: vars(model).pop("save_pretrained"))

    def _of_block(
        self, call: Callable[[Tensor, nn.Module], Tensor], block: nn.Module, returns_tensor: bool
    ) -> Any:
        """Return what transformers calls in a block's place; it notes what else the block gets."""
        signature = inspect.signature(type(block).forward)

        def in_place(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(block, hidden, *args, **kwargs).arguments
            extra = {k: v for k, v in bound.items() if k not in ("self", "hidden_states")}
            extra.update(extra.pop("kwargs", {}))
            arguments = {k: v for k, v in extra.items() if k not in _NOT_FOR_BLOCKS}
            arguments = {k: v for k, v in arguments.items() if not k.startswith("encoder_")}

            self._given.append(arguments)
            output = call(hidden, block)
            return output if returns_tensor else (output,)

        return in_place

    def _gather(self, hidden: Tensor, block: nn.Module) -> Tensor:
        del block
        return hidden

    def _stack(self, hidden: Tensor, block: nn.Module) -> Tensor:
        given, self._given = self._given, []
        # masks of other kinds of blocks differ by a window, which matters to no split
        run = self._run(hidden, given[0], _checkpointed(block))
        return run_schedule(run, hidden, given)

    def _run(
        self, hidden: Tensor, arguments: dict[str, Any], checkpoint: bool
    ) -> ScheduleRun | TimedRun:
        unsummed, self.group.unsummed = self.group.unsummed, None
        assert unsummed is None or hidden is unsummed, (
            "the model has changed its embedding before the first block"
        )

        sublayers = self.sharding.sublayers
        attention, settings, timed = sublayers[0].attention, self.settings, False
        if settings.split == AUTO:
            legal = cache(partial(legal_splits, hidden, arguments, attention))
            name, timed = self.trial.choose(Size.of(hidden), legal)
            settings = replace(settings, split=name)

        config = getattr(attention, "config", None)
        split = choose_split(settings, hidden, arguments, config, self.fell_back)
        embedding_flows = unsummed is not None
        run = ScheduleRun(
            sublayers, self.group, split, checkpoint, self.trace, self.done, embedding_flows
        )
        return self.trial.timed(run, name, hidden) if timed else run

    # -- hooks around a forward

    def _begin(self, base: Any, args: Any, kwargs: dict[str, Any]) -> None:
        cache = kwargs.get("past_key_values")
        asked = any(
            kwargs.get(name) if name in kwargs else getattr(base.config, name, None)
            for name in _NOT_SCHEDULED
        )
        # what the model's config implies is put in later: here True was asked for
        cached = cache is not None or kwargs.get("use_cache") is True

        active = torch.is_grad_enabled() and not asked and not cached
        self._blocks.active, self._given = active, []
        # a whole stack that is computed again would find no summands, and take them for the sum
        again = getattr(base, "gradient_checkpointing", False) and not _checkpoints(self._blocks[0])
        self.group.sums_flow = active and self.sharding.embedding_is_stream and not again

    def _end(self, base: Any, args: Any, output: Any) -> None:
        self._blocks.active = False
        self.group.sums_flow, self.group.unsummed = False, None

    def _begin_loss(self, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        names = list(inspect.signature(type(model).forward).parameters)[1:]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        self.group.local_logits = given.get("labels") is not None

    def _end_loss(self, model: Any, args: Any, output: Any) -> Any:
        local, self.group.local_logits = self.group.local_logits, False
        if not local or output is None:
            return output

        if isinstance(output, tuple):
            return (output[0], None, *output[2:])
        return type(output)(**{k: v for k, v in output.items() if k != "logits"})

    @property
    def _blocks(self) -> Any:
        return self.sharding.blocks


class _ScheduledBlocks(nn.ModuleList):
    """A list of blocks that, while `active`, yields others, of which the last runs all of them."""

    active = False
    stack: list[Callable[..., Any]]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.stack) if self.active else super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        if self.active and isinstance(index, slice):
            return self.stack
        return super().__getitem__(index)


def _become_scheduled(blocks: Any, stack: list[Callable[..., Any]], sharding: Sharding) -> None:
    before = type(blocks)
    blocks.__class__ = _ScheduledBlocks
    blocks.stack = stack

    def undo() -> None:
        blocks.__class__ = before
        del blocks.stack

    sharding.restore.append(undo)


def _put_back_loss(model: Any) -> Callable[[], None]:
    own, before = "_loss_function" in vars(model), vars(model).get("_loss_function")

    def undo() -> None:
        if own:
            model._loss_function = before
        else:
            del model._loss_function

    return undo


def _refuse_to_save(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError(
        "The model is divided: `save_pretrained` would write one rank's part of it. Call it after"
        " `fit` has returned, or load a checkpoint, which is whole, into a model of your own."
    )


def _checkpoints(block: Any) -> bool:
    """Return whether a block checkpoints itself; older transformers do it around its call."""
    return hasattr(block, "gradient_checkpointing")


def _checkpointed(block: Any) -> bool:
    return bool(getattr(block, "gradient_checkpointing", False)) and block.training
