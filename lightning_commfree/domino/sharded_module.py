"""A module with transformers models divided inside: wholes out of parts, and parts of wholes.

Several ranks hold one model together. An algorithm around it asks for:

=======================  =======================================================================
`prepare`                divide the models, before the optimizer is made
`held`                   the tensors of this rank, and which of them are whole, parts or copies
`mark_parts`             let the tensors themselves say which of them are parts
`whole_state_dict`       the module's state as if it were not divided
`part_state_dict`        this rank's parts of such a state
`own_state`              what is each rank's own: random numbers, and what splits have taken
`optimizer_parts`        the same of optimizers
`sum_shared_gradients`   make the gradients of copies what they are of the whole
`clip_gradients`         by the norm of the whole model's gradient
`same_batch`             the ranks that must see the same batch
`check_first`            see that they do
`join`                   make the models transformers' own again
=======================  =======================================================================

What a module, its optimizers and its batches must be, so that its models can be divided.

Optimizer states of divided parameters: wholes out of parts, and parts of wholes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.digest import digest
from lightning_commfree.comm.handshake import check_agreement
from lightning_commfree.domino.families import FAMILIES, family_of
from lightning_commfree.domino.gradients import gradient_norm, sum_shared
from lightning_commfree.domino.parallel import ParallelModel, check_divisible
from lightning_commfree.domino.plan import has_plan
from lightning_commfree.domino.settings import DominoSettings
from lightning_commfree.domino.sharding import ShardSpec, whole_tensor
from lightning_commfree.model.fsdp import refuse_wrapped
from lightning_commfree.model.meta_init import on_meta
from lightning_commfree.model.shards import mark_part


def find_models(module: nn.Module) -> list[nn.Module]:
    """Return the outermost models inside that can be divided."""
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for child in module.modules():
        known = family_of(child) is not None or has_plan(child)
        if known and child not in inside and child is not module:
            found.append(child)
            inside.update(child.modules())
    return found


def check_module(strategy: str, module: nn.Module, ranks: int) -> None:
    """See that there is something to divide among so many ranks, as it is; nothing is changed.

    Args:
        strategy: for the messages.
        module: not divided yet.
        ranks: of a tensor group.

    Raises:
        ValueError: there is nothing, it is compiled, wrapped, is without values that nobody can
            give it, does not fit the ranks, or has adapters that cannot be divided.
    """
    refuse_wrapped(strategy, module)

    models = find_models(module)
    if not models:
        names = sorted({type(child).__name__ for child in module.children()})
        raise ValueError(
            f"`{strategy}` found no model in `{type(module).__name__}` that it can divide (its"
            f" children are {', '.join(names) or 'none'}). It divides {', '.join(FAMILIES)} of"
            " transformers, and other models of transformers whose config has a"
            " `base_model_tp_plan`."
        )

    _check_values(strategy, module, models)
    for model in models:
        check_divisible(model, ranks)


def refuse_meta(strategy: str, module: nn.Module) -> None:
    """Refuse, outside of a fit, a model without values.

    Raises:
        ValueError: it is on the `meta` device.
    """
    if without := on_meta(module):
        raise ValueError(
            f"{len(without)} tensors, {without[0]!r} among them, are on the meta device and hold no"
            f" values. `{strategy}` gives them some in `fit` only: call it first, or build the"
            " model on the CPU."
        )


def check_states(optimizers: Iterable[Optimizer], parts: Set[nn.Parameter]) -> None:
    """See that optimizers keep numbers for single elements, after their first step.

    A number for a whole row or column of a parameter would be one for a part of it here. No
    checkpoint could put those together.

    Args:
        optimizers: of the fit.
        parts: parameters of which this rank holds a part.

    Raises:
        ValueError: the state of a part has another shape than the parameter.
    """
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for key, value in state.items() if parameter in parts else ():
                other = isinstance(value, Tensor) and value.numel() > 1
                if other and value.shape != parameter.shape:
                    raise ValueError(
                        f"`{type(optimizer).__name__}` keeps a {key!r} of shape"
                        f" {tuple(value.shape)} for a parameter of shape"
                        f" {tuple(parameter.shape)}, which is a part of a divided one: it would"
                        " train something else than on the whole one. Take an optimizer that treats"
                        " elements one by one, such as AdamW, SGD or Lion."
                    )


def check_batch(channel: Channel, verb: str, batch: Any) -> None:
    """See that all ranks of a tensor group have the same batch; collective.

    Args:
        channel: to the tensor group.
        verb: what is done with it.
        batch: tensors in whatever.

    Raises:
        ValueError: they differ; on all of them alike.
    """
    tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    found = [f"{tuple(t.shape)} {int(digest(t.contiguous()))}" for t in tensors]
    try:
        check_agreement(channel, {"the first batch": " ".join(found)})
    except ValueError as error:
        raise ValueError(
            f"The ranks of a tensor group must {verb} on the same batch, and their first batches"
            f" differ: ranks {list(channel.ranks)}. Let Lightning put its own sampler in, or give"
            " your sampler `num_replicas` and `rank` of `trainer.distributed_sampler_kwargs`."
        ) from error


def _check_values(strategy: str, module: nn.Module, models: Sequence[nn.Module]) -> None:
    known = [model for model in models if family_of(model) is not None]
    empty = [model for model in known if all(p.is_meta for p in model.parameters())]
    gets_values = {id(t) for model in empty for t in (*model.parameters(), *model.buffers())}

    tensors = dict([*module.named_parameters(), *module.named_buffers()])
    left = [name for name in on_meta(module) if id(tensors[name]) not in gets_values]
    if left:
        raise ValueError(
            f"{len(left)} tensors, {left[0]!r} among them, are on the meta device and hold no"
            f" values. `{strategy}` gives values to a {', '.join(FAMILIES)} of which all parameters"
            " are there, and to nothing else: build the rest on the CPU."
        )


STATE_TAG = "tensor_state"


class OptimizerParts:
    """Optimizer states of which each rank of a tensor group has its part: in a fit, and after it.

    After a fit the models are whole on every rank. What an optimizer knows of them is twice as
    much, few ask for it, and it stays where it is.

    Args:
        specs: of the divided parameters, in the fit.
    """

    def __init__(self, specs: Mapping[nn.Parameter, ShardSpec]) -> None:
        self._parts = {parameter: (spec, parameter.shape) for parameter, spec in specs.items()}

    def whole_state_dict(
        self, optimizer: Optimizer, channel: Channel, keep: bool
    ) -> dict[str, Any]:
        """Return an optimizer's whole state, tensors of divided parameters in CPU memory.

        Collective.

        Args:
            optimizer: of the fit.
            channel: to the tensor group.
            keep: whether this rank wants the result; else it is empty.
        """
        saved = optimizer.state_dict()
        result: dict[int, Any] = {}
        for index, parameter in enumerate(parameters_of(optimizer)):
            for key, value in saved["state"].get(index, {}).items():
                whole = self._whole(parameter, value, channel, keep)
                if keep:
                    result.setdefault(index, {})[key] = whole
        return {**saved, "state": result} if keep else {}

    def part_state_dict(
        self, optimizer: Optimizer, state: Mapping[str, Any], rank: int
    ) -> dict[str, Any]:
        """Return a rank's parts of a whole optimizer state.

        Args:
            optimizer: of the fit.
            state: as `whole_state_dict` returned it.
            rank: place in the tensor group.
        """
        parts: dict[int, Any] = {}
        for index, parameter in enumerate(parameters_of(optimizer)):
            spec, _ = self._parts.get(parameter, (None, None))
            own = dict(state["state"].get(index, {}))
            for key, value in own.items():
                if spec is None or not isinstance(value, Tensor) or value.dim() <= spec.dim:
                    continue
                if value.shape != parameter.shape:  # else it is this rank's already
                    own[key] = spec.part(value, rank)
            if own:
                parts[index] = own
        return {**state, "state": parts}

    def _whole(self, parameter: nn.Parameter, value: Any, channel: Channel, keep: bool) -> Any:
        spec, part_shape = self._parts.get(parameter, (None, None))
        if not isinstance(value, Tensor):
            return value
        if spec is None or value.shape != part_shape:
            return value.cpu() if keep else value
        return whole_on_host(value, spec, channel, keep)


def whole_on_host(part: Tensor, spec: ShardSpec, channel: Channel, keep: bool) -> Tensor:
    """Return the full tensor of a shard in host memory, an empty one without `keep`; collective."""
    whole = whole_tensor(part, spec, channel, STATE_TAG)
    return whole.cpu() if keep else whole.new_empty(0)


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return all parameters of an optimizer, in the order of its state."""
    return [p for group in optimizer.param_groups for p in group["params"]]


Kind = Literal["whole", "part", "copy"]


class HeldTensor(NamedTuple):
    """A parameter of this rank.

    Attributes:
        name: in the module, the same with and without a division.
        tensor: this rank's.
        kind: "whole": the same on all ranks of the tensor group; "part": numbers that no other rank
            has; "copy": a part that several ranks have, or a whole one that each uses in part.
        spec: how it is divided; None for a whole one.
    """

    name: str
    tensor: nn.Parameter
    kind: Kind
    spec: ShardSpec | None


class ShardedModule:
    """A module whose transformers models are divided among a tensor group; see `prepare`.

    Attributes:
        models: the divided models.
        optimizer_parts: what optimizers know of them.
    """

    def __init__(self, module: nn.Module, channel: Channel, models: list[ParallelModel]) -> None:
        self.models = models
        self._module, self._channel = module, channel
        self._checked: set[str] = set()  # what has been done with a batch
        self.optimizer_parts = OptimizerParts(self.specs)

    @classmethod
    def prepare(
        cls,
        module: nn.Module,
        channel: Channel,
        settings: DominoSettings,
        seed: int = 0,
        init_seed: int = 0,
    ) -> ShardedModule:
        """Divide the models inside `module`, in place, before the optimizer is made.

        Args:
            module: the same on every rank.
            channel: to the tensor group.
            settings: split and micro-batches.
            seed: see `ParallelModel`.
            init_seed: see `ParallelModel`.

        Raises:
            ValueError: one of them cannot be divided; none is changed then.
        """
        found = find_models(module)
        for model in found:
            check_divisible(model, channel.size)
        models = [ParallelModel(model, channel, settings, seed, init_seed) for model in found]
        return cls(module, channel, models)

    # -- what this rank holds

    @property
    def specs(self) -> dict[nn.Parameter, ShardSpec]:
        """How each divided parameter is divided."""
        return {p: spec for model in self.models for p, spec in model.sharding.specs.items()}

    @property
    def same_batch(self) -> tuple[int, ...]:
        """The ranks that must see the same batch."""
        return self._channel.ranks

    def check_first(self, verb: str, batch: Any) -> None:
        """See that all have the same batch where something is done for the first time; collective.

        Args:
            verb: what is done with it.
            batch: tensors in whatever.

        Raises:
            ValueError: they differ; on all of them alike.
        """
        if verb not in self._checked:
            self._checked.add(verb)
            check_batch(self._channel, verb, batch)

    def held(self) -> list[HeldTensor]:
        """Return the parameters of this rank, a tied one once, in the order of the module's."""
        specs, found = self.specs, []
        for name, parameter in self._module.named_parameters():
            spec = specs.get(parameter)
            kind: Kind = "whole" if spec is None else "copy" if spec.overlapping else "part"
            found.append(HeldTensor(name, parameter, kind, spec))
        return found

    def mark_parts(self, argument: str) -> None:
        """Let the parameters say which of them are parts, to an algorithm that asks them.

        Args:
            argument: what the user calls the size of a tensor group.

        Raises:
            ValueError: some ranks hold the same part, and others another one.
        """
        for name, parameter, _, spec in self.held():
            held = set(() if spec is None else spec.ranges)
            if spec is not None and 1 < len(held) < len(spec.ranges):
                raise ValueError(
                    f"{name!r} is divided into {len(held)} parts among {self._channel.size} ranks:"
                    " several of them hold the same one, as key heads that are fewer than ranks."
                    f" With `inside='domino'` choose `{argument}` up to {len(held)}."
                )
            mark_part(parameter, len(held) > 1)

    def forget_parts(self) -> None:
        """Let no parameter say that it is a part."""
        for held in self.held():
            mark_part(held.tensor, False)

    # -- states

    def whole_state_dict(self, keep: bool) -> dict[str, Any]:
        """Return the module's whole state, tensors of divided parameters in CPU memory.

        Collective.

        Args:
            keep: whether this rank wants the result; else it is empty.
        """
        specs = {p.data_ptr(): spec for p, spec in self.specs.items()}
        known: dict[int, Tensor] = {}  # tied parameters are gathered once

        state = self._module.state_dict()
        for name, value in list(state.items()):
            if isinstance(value, Tensor) and value.data_ptr() in specs:
                place = value.data_ptr()
                if place not in known:
                    known[place] = whole_on_host(value, specs[place], self._channel, keep)
                state[name] = known[place]
        return state if keep else {}

    def part_state_dict(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's parts of a whole module's state."""
        own = self._module.state_dict(keep_vars=True)
        specs, rank = self.specs, self._channel.rank
        return {
            name: specs[own[name]].part(value, rank) if own.get(name) in specs else value
            for name, value in state.items()
        }

    def own_state(self) -> dict[str, Any]:
        """Return what is each rank's own: random numbers, and what `auto_split` has measured."""
        return {
            "random": [model.group.own_state() for model in self.models],
            "splits": [model.trial.state_dict() for model in self.models],
        }

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Put back what `own_state` returned."""
        for model, random, split in zip(self.models, state["random"], state["splits"], strict=True):
            model.group.load_own_state(random)
            model.trial.load_state_dict(split)

    def whole_optimizer_state(self, optimizer: Optimizer, keep: bool) -> dict[str, Any]:
        """Return an optimizer's whole state; see `OptimizerParts.whole_state_dict`."""
        return self.optimizer_parts.whole_state_dict(optimizer, self._channel, keep)

    def part_optimizer_state(
        self, optimizer: Optimizer, state: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return this rank's parts of an optimizer's whole state."""
        return self.optimizer_parts.part_state_dict(optimizer, state, self._channel.rank)

    # -- gradients

    def sum_shared_gradients(self) -> None:
        """Add up the gradients of copies over the ranks that have them; collective."""
        for model in self.models:
            sum_shared(model.sharding.specs, model.group)

    def gradient_norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Return the Euclidean norm of the whole gradient; collective. See `gradients`.

        Args:
            parameters: of this rank.
        """
        return gradient_norm(parameters, self.specs, self.models[0].group)

    def clip_gradients(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clip by the norm of the whole model's gradient, every number counted once; collective."""
        parameters = parameters_of(optimizer)
        norm = self.gradient_norm(parameters)
        torch.nn.utils.clip_grads_with_norm_(parameters, clip_val, norm)

    # -- the end

    def join(self) -> None:
        """Make the models transformers' own again, whole on every rank; optimizers stay as is."""
        for model in self.models:
            wholes = {}
            for parameter, spec in model.sharding.specs.items():
                whole = whole_tensor(parameter.detach(), spec, self._channel, STATE_TAG)
                # to CPU memory, where Lightning puts a module after a fit: it may be too big
                wholes[parameter] = whole.cpu()
            model.join(wholes)
