"""Putting the schedule into a transformers model: its own code goes on calling it.

A causal language model of transformers loops over its blocks. While a schedule is wanted, the list
of blocks yields others, of which the last one runs all of them (`stack`). Everything around stays
transformers': masks, positions, the last norm, head and outputs. Where a schedule does not apply,
in evaluation, generation or when hidden states of single blocks are asked for, the loop runs as
ever, and the sharded modules do their own all-reduces.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
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
from lightning_commfree.domino.micro_sublayer import Arguments
from lightning_commfree.domino.plan import apply_plan, check_plan, plan_of
from lightning_commfree.domino.schedule import Done, ScheduleRun
from lightning_commfree.domino.settings import AUTO, DominoSettings
from lightning_commfree.domino.sharding import Sharding
from lightning_commfree.domino.stack import become_scheduled, run_schedule

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
