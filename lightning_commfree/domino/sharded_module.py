"""A module with transformers models divided inside: wholes out of parts, and parts of wholes.

Several ranks hold one model together. An algorithm around it asks for:

=======================  =======================================================================
`prepare`                divide the models, before the optimizer is made
`held`                   the tensors of this rank, and which of them are whole, parts or copies
`mark_parts`             let the tensors themselves say which of them are parts
`whole_state_dict`       the module's state as if it were not divided, one tensor at a time
`part_state_dict`        this rank's parts of such a state
`own_state`              what is each rank's own: random numbers, and what splits have taken
`optimizer_parts`        the same of optimizers
`sum_shared_gradients`   make the gradients of copies what they are of the whole
`clip_gradients`         by the norm of the whole model's gradient
`same_batch`             the ranks that must see the same batch
`check_first`            see that they do
`join`                   make the models transformers' own again
=======================  =======================================================================
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.parts import mark_part
from lightning_commfree.comm.wholes import Wholes, with_values
from lightning_commfree.domino.checks import check_batch, find_models
from lightning_commfree.domino.gradients import gradient_norm, sum_shared
from lightning_commfree.domino.optimizer_parts import (
    STATE_TAG,
    OptimizerParts,
    parameters_of,
    put_together,
)
from lightning_commfree.domino.parallel import ParallelModel, check_divisible
from lightning_commfree.domino.settings import DominoSettings
from lightning_commfree.domino.shard_spec import ShardSpec
from lightning_commfree.domino.sharding import whole_tensor

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

    def whole_state_dict(self, wholes: Wholes) -> dict[str, Any]:
        """Return the module's whole state, tensors of divided parameters in CPU memory.

        Collective, one tensor at a time.

        Args:
            wholes: puts tensors together. Where this rank does not keep them the result is empty.
        """
        specs = {p.data_ptr(): spec for p, spec in self.specs.items()}
        known: dict[int, Tensor] = {}  # tied parameters are gathered once

        state = self._module.state_dict()
        for name, value in list(state.items()):
            if isinstance(value, Tensor) and value.data_ptr() in specs:
                place = value.data_ptr()
                if place not in known:
                    known[place] = put_together(value, specs[place], self._channel, wholes)
                state[name] = known[place]
        return state if wholes.keep else {}

    def part_state_dict(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's parts of a whole module's state."""
        own = self._module.state_dict(keep_vars=True)
        specs, rank = self.specs, self._channel.rank
        parts = {}
        for name, saved in state.items():
            value = with_values(saved)
            parts[name] = specs[own[name]].part(value, rank) if own.get(name) in specs else value
        return parts

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

    def whole_optimizer_state(self, optimizer: Optimizer, wholes: Wholes) -> dict[str, Any]:
        """Return an optimizer's whole state; see `OptimizerParts.whole_state_dict`."""
        return self.optimizer_parts.whole_state_dict(optimizer, self._channel, wholes)

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
