"""Putting the schedule into a transformers model: its own code goes on calling it.

A causal language model of transformers loops over its blocks. While a schedule is wanted, the list
of blocks yields others, of which the last one runs all of them (`stack`). Everything around stays
transformers': masks, positions, the last norm, head and outputs. Where a schedule does not apply,
in evaluation, generation or when hidden states of single blocks are asked for, the loop runs as
ever, and the sharded modules do their own all-reduces.

A stack of blocks as one node of autograd, whose inside is a `ScheduleRun`.

The model's own loop calls its blocks one after the other. Under a schedule it calls stand-ins. They
hand the residual stream on, and note what else they get: a kind of block has a mask of its own. The
last one runs the stack. Where all blocks are of one kind it stands alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from types import MethodType
from typing import Any, cast

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


class _Stack(torch.autograd.Function):
    """The whole stack as one node; a `ScheduleRun` computes its inside."""

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
            # the inside would add to the gradients of all parameters, asked for or not
            raise RuntimeError(
                "A model that is divided and scheduled cannot be differentiated by"
                " `torch.autograd.grad` or `backward(inputs=...)`: its blocks run their own"
                " backward, for all parameters. Call `backward()`, or use another strategy."
            )
        return ctx.run.backward(gradients[0]), None, None


def run_schedule(
    run: ScheduleRun | TimedRun, hidden: Tensor, arguments: Sequence[Arguments]
) -> Tensor:
    """Run `hidden`, shape (B, T, H), through the stack.

    Args:
        run: a new one.
        hidden: the residual stream behind the embedding.
        arguments: what transformers passes to each block besides it, by name; one for all of them,
            or one for each.

    Returns:
        The residual stream before the last norm; gradients flow back through it once.
    """
    if not hidden.requires_grad:  # frozen embeddings: the node must be in the graph all the same
        hidden = hidden.detach().requires_grad_()

    output: Tensor = _Stack.apply(hidden, run, arguments)  # type: ignore[no-untyped-call]
    return output


_NOT_FOR_BLOCKS = ("past_key_values", "past_key_value", "layer_past", "use_cache")

RunStack = Callable[[Tensor, nn.Module, Sequence[Arguments]], Tensor]


class _StandIn:
    """What a model's loop gets in place of a block; its attributes are the block's.

    Args:
        block: in whose place it stands.
        noted: what the blocks of this forward have got so far.
        run: runs the stack; None: the stream goes on to the next one.
        as_tensor: a block returns its output as it is, and not in a tuple.
    """

    def __init__(
        self, block: nn.Module, noted: list[Arguments], run: RunStack | None, as_tensor: bool
    ) -> None:
        self._block, self._noted, self._run, self._as_tensor = block, noted, run, as_tensor
        self._signature = inspect.signature(type(block).forward)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # Python asks for those of a copy before there is a block
            raise AttributeError(name)
        return getattr(self._block, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> _StandIn:
        return self  # as of a function: a copy of the model is no other rank

    def __call__(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        bound = self._signature.bind(self._block, hidden, *args, **kwargs).arguments
        extra = {k: v for k, v in bound.items() if k not in ("self", "hidden_states")}
        extra.update(extra.pop("kwargs", {}))
        arguments = {k: v for k, v in extra.items() if k not in _NOT_FOR_BLOCKS}
        self._noted.append({k: v for k, v in arguments.items() if not k.startswith("encoder_")})

        if self._run is not None:
            given = list(self._noted)
            self._noted.clear()  # or a mask would live until the next forward
            hidden = self._run(hidden, self._block, given)
        return hidden if self._as_tensor else (hidden,)


class _ScheduledBlocks(nn.ModuleList):
    """A list of blocks that yields their stand-ins while `active`."""

    active = False
    noted: list[Arguments]
    stand_ins: list[_StandIn]

    def begin(self, active: bool) -> None:
        """A forward begins, with or without the schedule."""
        self.active = active
        self.noted.clear()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.stand_ins) if self.active else super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        if self.active and isinstance(index, slice):
            return self.stand_ins
        return super().__getitem__(index)


def become_scheduled(
    blocks: nn.ModuleList, run: RunStack, one_kind: bool, as_tensor: bool
) -> Callable[[], None]:
    """Let a list of blocks yield stand-ins while it is `active`; return what makes it plain again.

    Args:
        blocks: of a model.
        run: runs all of them: given the stream, a block, and what the blocks get besides.
        one_kind: all blocks get the same.
        as_tensor: see `_StandIn`.
    """
    known, noted = list(blocks), list[Arguments]()
    passed = [] if one_kind else [_StandIn(block, noted, None, as_tensor) for block in known[:-1]]
    last = _StandIn(known[0] if one_kind else known[-1], noted, run, as_tensor)

    before, scheduled = type(blocks), cast(_ScheduledBlocks, blocks)
    blocks.__class__ = _ScheduledBlocks
    scheduled.active, scheduled.noted, scheduled.stand_ins = False, noted, [*passed, last]

    def undo() -> None:
        blocks.__class__ = before
        del scheduled.active, scheduled.noted, scheduled.stand_ins

    return undo


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
        on_fallback: told why a batch was split in another way than asked for.
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
        self.on_fallback: Callable[[str], None] = lambda _: None
        self.trial = SplitTrial(channel)
        self.scheduled = self.divides_loss = False
        self._handles: list[Any] = []
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
        blocks = self.sharding.blocks
        if not len(blocks):
            return

        self.scheduled = True
        base = getattr(model, model.base_model_prefix)
        kinds = getattr(model.config, "layer_types", None) or ["same"]
        one_kind, as_tensor = len(set(kinds)) == 1, family.returns_tensor(blocks[0])
        undo = become_scheduled(blocks, self._stack, one_kind, as_tensor)
        self.sharding.restore.append(undo)
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

    def _stack(self, hidden: Tensor, block: nn.Module, given: Sequence[Arguments]) -> Tensor:
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
        split = choose_split(settings, hidden, arguments, config, self.on_fallback)
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
        self._blocks.begin(active)
        # a whole stack that is computed again would find no summands, and take them for the sum
        again = getattr(base, "gradient_checkpointing", False) and not _checkpoints(self._blocks[0])
        self.group.sums_flow = active and self.sharding.embedding_is_stream and not again

    def _end(self, base: Any, args: Any, output: Any) -> None:
        self._blocks.begin(False)
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
