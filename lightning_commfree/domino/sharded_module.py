"""A module with sharded transformers models inside, as an algorithm around it sees it.

=======================  =======================================================================
`prepare`                shard the models, before the optimizer is created
`held`                   this rank's tensors, and whether each is whole, a part or a copy
`mark_parts`             mark the sharded tensors themselves
`whole_state_dict`       gather the module's full state
`part_state_dict`        take this rank's shards of a full state
`own_state`              each rank's own state: random numbers and timings of splits
`optimizer_parts`        the same of optimizers
`sum_shared_gradients`   sum the gradients of tensors that several ranks hold
`clip_gradients`         clip by the norm of the full gradient
`same_batch`             the ranks that must train on the same batch
`check_first`            check that they do
`join`                   turn the models back into plain transformers models
=======================  =======================================================================

Before it: checks of a module, its optimizers and its batches; and `OptimizerParts`, which gathers
and shards the states of optimizers.
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
    """Return the outermost models inside a module that can be sharded."""
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for child in module.modules():
        known = family_of(child) is not None or has_plan(child)
        if known and child not in inside and child is not module:
            found.append(child)
            inside.update(child.modules())
    return found


def check_module(strategy: str, module: nn.Module, ranks: int) -> None:
    """Check that a module has a model that can be sharded, without changing it.

    Args:
        strategy: its name, for the messages.
        module: not sharded yet.
        ranks: of a tensor group.

    Raises:
        ValueError: there is no such model, or it is wrapped, has tensors on the meta device that
            get no values, does not fit the ranks, or has unsupported adapters.
    """
    refuse_wrapped(strategy, module)

    models = find_models(module)
    if not models:
        names = sorted({type(child).__name__ for child in module.children()})
        raise ValueError(
            f"`{strategy}` found no model in `{type(module).__name__}` that it can divide (its"
            f" children are {', '.join(names) or 'none'}). It supports {', '.join(FAMILIES)} of"
            " transformers, and other models of transformers whose config has a"
            " `base_model_tp_plan`."
        )

    _check_values(strategy, module, models)
    for model in models:
        check_divisible(model, ranks)


def refuse_meta(strategy: str, module: nn.Module) -> None:
    """Refuse a module on the meta device outside of a fit.

    Raises:
        ValueError: it has such tensors.
    """
    if without := on_meta(module):
        raise ValueError(
            f"{len(without)} tensors, {without[0]!r} among them, are on the meta device and have no"
            f" values. `{strategy}` gives them values in `fit` only: call it first, or build the"
            " model on the CPU."
        )


def check_states(optimizers: Iterable[Optimizer], parts: Set[nn.Parameter]) -> None:
    """Check that optimizers keep state for single elements, after their first step.

    State for a full row or column of a parameter, as Adafactor's, would be computed from a shard of
    it here, and no checkpoint could gather it.

    Args:
        optimizers: of the fit.
        parts: sharded parameters of this rank.

    Raises:
        ValueError: a shard's state has another shape than the shard.
    """
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for key, value in state.items() if parameter in parts else ():
                other = isinstance(value, Tensor) and value.numel() > 1
                if other and value.shape != parameter.shape:
                    raise ValueError(
                        f"`{type(optimizer).__name__}` keeps a {key!r} of shape"
                        f" {tuple(value.shape)} for a parameter of shape"
                        f" {tuple(parameter.shape)}, which is a shard: it would train differently"
                        " than on the full parameter. Use an optimizer that treats elements one by"
                        " one, such as AdamW, SGD or Lion."
                    )


def check_batch(channel: Channel, verb: str, batch: Any) -> None:
    """Check that all ranks of a tensor group have the same batch; collective.

    Args:
        channel: the tensor group.
        verb: "train" or "validate", for the message.
        batch: tensors in any containers.

    Raises:
        ValueError: they differ; the same on all ranks.
    """
    tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    # digests instead of batches: a few bytes, and the channel compares them as text
    found = [f"{tuple(t.shape)} {int(digest(t.contiguous()))}" for t in tensors]
    try:
        check_agreement(channel, {"the first batch": " ".join(found)})
    except ValueError as error:
        raise ValueError(
            f"The ranks of a tensor group must {verb} on the same batch, but their first batches"
            f" differ: ranks {list(channel.ranks)}. Let Lightning insert its own sampler, or pass"
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
            f"{len(left)} tensors, {left[0]!r} among them, are on the meta device and have no"
            f" values. `{strategy}` gives values only to models that are on it with all of their"
            f" parameters: {', '.join(FAMILIES)}. Build the rest on the CPU."
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
        name: in the module, the same as without sharding.
        tensor: this rank's.
        kind: "whole": the same on all ranks of the tensor group; "part": a shard that no other rank
            holds; "copy": a shard that several ranks hold, or a full tensor whose gradients must
            be summed (`Sharding.share`).
        spec: of the shard; None for a whole tensor.
    """

    name: str
    tensor: nn.Parameter
    kind: Kind
    spec: ShardSpec | None


class ShardedModule:
    """A module whose transformers models are sharded among a tensor group; see `prepare`.

    Attributes:
        models: the sharded models.
        optimizer_parts: gathers and shards the states of their optimizers.
    """

    def __init__(self, module: nn.Module, channel: Channel, models: list[ParallelModel]) -> None:
        self.models = models
        self._module, self._channel = module, channel
        self._checked: set[str] = set()  # verbs whose first batch has been checked
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
        """Shard the models inside `module` in place, before the optimizer is created.

        Args: as of `ParallelModel`; `module` must be the same on every rank.

        Raises:
            ValueError: one of them cannot be sharded; none is changed then.
        """
        found = find_models(module)
        for model in found:  # all of them first, so that an error leaves none changed
            check_divisible(model, channel.size)
        models = [ParallelModel(model, channel, settings, seed, init_seed) for model in found]
        return cls(module, channel, models)

    # -- tensors of this rank

    @property
    def specs(self) -> dict[nn.Parameter, ShardSpec]:
        """The spec of each sharded parameter."""
        return {p: spec for model in self.models for p, spec in model.sharding.specs.items()}

    @property
    def same_batch(self) -> tuple[int, ...]:
        """The ranks that must train on the same batch."""
        return self._channel.ranks

    def check_first(self, verb: str, batch: Any) -> None:
        """Check a verb's first batch as `check_batch` does; collective the first time."""
        if verb not in self._checked:
            self._checked.add(verb)
            check_batch(self._channel, verb, batch)

    def held(self) -> list[HeldTensor]:
        """Return the parameters of this rank, a tied one once, in the module's order."""
        specs, found = self.specs, []
        for name, parameter in self._module.named_parameters():
            spec = specs.get(parameter)
            kind: Kind = "whole" if spec is None else "copy" if spec.overlapping else "part"
            found.append(HeldTensor(name, parameter, kind, spec))
        return found

    def mark_parts(self, argument: str) -> None:
        """Mark the parameters that are shards, for an algorithm that knows nothing of Domino.

        Args:
            argument: the user's name for the size of a tensor group.

        Raises:
            ValueError: several ranks, but not all, hold the same shard.
        """
        for name, parameter, _, spec in self.held():
            held = set(() if spec is None else spec.ranges)
            if spec is not None and 1 < len(held) < len(spec.ranges):
                raise ValueError(
                    f"{name!r} has {len(held)} shards for {self._channel.size} ranks, so several"
                    " ranks hold the same one, as of key heads that are fewer than ranks. With"
                    f" `inside='domino'` choose `{argument}` up to {len(held)}."
                )
            mark_part(parameter, len(held) > 1)

    def forget_parts(self) -> None:
        """Remove the marks of `mark_parts`."""
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
        """Sum the gradients of copies over the ranks that hold them; collective."""
        for model in self.models:
            sum_shared(model.sharding.specs, model.group)

    def gradient_norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Return the Euclidean norm of the full gradient of this rank's parameters; collective."""
        return gradient_norm(parameters, self.specs, self.models[0].group)

    def clip_gradients(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clip by the norm of the full gradient, each element counted once; collective."""
        parameters = parameters_of(optimizer)
        norm = self.gradient_norm(parameters)
        torch.nn.utils.clip_grads_with_norm_(parameters, clip_val, norm)

    # -- the end

    def join(self) -> None:
        """Turn the models back into plain ones, full on every rank; optimizers keep their state."""
        for model in self.models:
            wholes = {}
            for parameter, spec in model.sharding.specs.items():
                whole = whole_tensor(parameter.detach(), spec, self._channel, STATE_TAG)
                # to the CPU, where Lightning moves a module after a fit: it may not fit the device
                wholes[parameter] = whole.cpu()
            model.join(wholes)
