"""Interface between strategies and a LightningModule whose transformers models are sharded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_commfree.comm.channel import Channel
from lightning_commfree.domino.families import FAMILIES, family_of
from lightning_commfree.domino.gradients import gradient_norm, sum_shared
from lightning_commfree.domino.parallel import ParallelModel, check_divisible
from lightning_commfree.domino.plan import has_plan
from lightning_commfree.domino.settings import DominoSettings
from lightning_commfree.domino.sharding import ShardSpec, gather_full_tensor
from lightning_commfree.model.meta_init import on_meta
from lightning_commfree.model.shards import mark_shard, refuse_wrapped


def find_models(module: nn.Module) -> list[nn.Module]:
    """Return the outermost submodules that Domino can shard."""
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for child in module.modules():
        known = family_of(child) is not None or has_plan(child)
        if known and child not in inside and child is not module:
            found.append(child)
            inside.update(child.modules())
    return found


def check_module(strategy_name: str, module: nn.Module, num_ranks: int) -> None:
    """Raise a `ValueError` if the models in a module cannot be sharded; change nothing."""
    refuse_wrapped(strategy_name, module)

    models = find_models(module)
    if not models:
        names = sorted({type(child).__name__ for child in module.children()})
        raise ValueError(
            f"`{strategy_name}` found no model in `{type(module).__name__}` that it can shard (its"
            f" children are {', '.join(names) or 'none'}). It supports {', '.join(FAMILIES)} from"
            " transformers, and any other transformers model whose config has a"
            " `base_model_tp_plan`."
        )

    _check_meta_tensors(strategy_name, module, models)
    for model in models:
        check_divisible(model, num_ranks)


def check_states(optimizers: Iterable[Optimizer], sharded_parameters: Set[nn.Parameter]) -> None:
    """Raise a `ValueError` if optimizer state is not element-wise; call it after the first step."""
    # state per row or column, such as Adafactor's, would be computed from the shard instead of the
    # full parameter, and a checkpoint could not gather it
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for key, value in state.items() if parameter in sharded_parameters else ():
                is_tensor = isinstance(value, Tensor) and value.numel() > 1  # not a step count
                if is_tensor and value.shape != parameter.shape:
                    raise ValueError(
                        f"`{type(optimizer).__name__}` keeps a {key!r} of shape"
                        f" {tuple(value.shape)} for a shard of shape {tuple(parameter.shape)}. It"
                        " is not element-wise, so its steps on shards would differ from steps on"
                        " the full parameter. Use an element-wise optimizer, such as AdamW, SGD or"
                        " Lion."
                    )


def _check_meta_tensors(strategy_name: str, module: nn.Module, models: Sequence[nn.Module]) -> None:
    """Raise a `ValueError` if a tensor on the meta device would get no values."""
    known = [model for model in models if family_of(model) is not None]
    empty = [model for model in known if all(p.is_meta for p in model.parameters())]
    gets_values = {id(t) for model in empty for t in (*model.parameters(), *model.buffers())}

    tensors = dict([*module.named_parameters(), *module.named_buffers()])
    left = [name for name in on_meta(module) if id(tensors[name]) not in gets_values]
    if left:
        raise ValueError(
            f"{len(left)} tensors, including {left[0]!r}, are on the meta device and have no"
            f" values. `{strategy_name}` can initialize only {', '.join(FAMILIES)}, and only if all"
            " parameters of the model are on the meta device. Build everything else on the CPU."
        )


STATE_TAG = "tensor_state"


class OptimizerShards:
    """Gathers and shards a tensor group's optimizer states, during and after a fit."""

    # After a fit every rank has the full models again, but optimizer states stay sharded: AdamW's
    # state is twice the size of the model, and few users save it then.
    def __init__(self, specs: Mapping[nn.Parameter, ShardSpec]) -> None:
        # keep the shards' shapes: after the fit, parameters have their full shapes again
        self._sharded = {parameter: (spec, parameter.shape) for parameter, spec in specs.items()}

    def full_state_dict(self, optimizer: Optimizer, channel: Channel, keep: bool) -> dict[str, Any]:
        """Return an optimizer's full state in CPU memory, or {} if `keep` is False; collective."""
        saved = optimizer.state_dict()
        result: dict[int, Any] = {}
        for index, parameter in enumerate(parameters_of(optimizer)):
            for key, value in saved["state"].get(index, {}).items():
                full = self._gather(parameter, value, channel, keep)
                if keep:
                    result.setdefault(index, {})[key] = full
        return {**saved, "state": result} if keep else {}

    def shard_state_dict(
        self, optimizer: Optimizer, state: Mapping[str, Any], rank: int
    ) -> dict[str, Any]:
        """Return an optimizer's state with full tensors replaced by a rank's shards."""
        sharded: dict[int, Any] = {}
        for index, parameter in enumerate(parameters_of(optimizer)):
            spec, _ = self._sharded.get(parameter, (None, None))
            own = dict(state["state"].get(index, {}))
            for key, value in own.items():
                if spec is None or not isinstance(value, Tensor) or value.dim() <= spec.dim:
                    continue
                if value.shape != parameter.shape:  # else it is a shard already
                    own[key] = spec.shard(value, rank)
            if own:
                sharded[index] = own
        return {**state, "state": sharded}

    def _gather(self, parameter: nn.Parameter, value: Any, channel: Channel, keep: bool) -> Any:
        """Return an entry of a parameter's state in full, in CPU memory; collective for a shard."""
        spec, shard_shape = self._sharded.get(parameter, (None, None))
        if not isinstance(value, Tensor):
            return value
        if spec is None or value.shape != shard_shape:
            return value.cpu() if keep else value
        return gather_to_host(value, spec, channel, keep)


def gather_to_host(shard: Tensor, spec: ShardSpec, channel: Channel, keep: bool) -> Tensor:
    """Gather a full tensor in CPU memory, or an empty one if `keep` is False; collective."""
    full = gather_full_tensor(shard, spec, channel, STATE_TAG)
    return full.cpu() if keep else full.new_empty(0)


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return all parameters of an optimizer, in the order of their indices in its state."""
    return [p for group in optimizer.param_groups for p in group["params"]]


class ShardedModule:
    """A module whose models are sharded across a tensor group; created by `prepare`."""

    def __init__(self, module: nn.Module, channel: Channel, models: list[ParallelModel]) -> None:
        self.models = models
        self._module, self._channel = module, channel
        self.optimizer_shards = OptimizerShards(self.specs)

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

        All ranks must pass the same module; arguments and errors are those of `ParallelModel`.
        """
        found = find_models(module)
        for model in found:  # check all of them first, so that an error leaves no model changed
            check_divisible(model, channel.size)
        models = [ParallelModel(model, channel, settings, seed, init_seed) for model in found]
        return cls(module, channel, models)

    @property
    def specs(self) -> dict[nn.Parameter, ShardSpec]:
        """The spec of each sharded parameter; every rank holds all other parameters in full."""
        return {p: spec for model in self.models for p, spec in model.sharding.specs.items()}

    def refuse_partly_shared(self, argument_name: str) -> None:
        """Raise a `ValueError` if a shard is held by several ranks but not by all.

        It refers to the strategy's argument that sets the group size.
        """
        specs = self.specs
        for name, parameter in self._module.named_parameters():
            shards = set(specs[parameter].ranges) if parameter in specs else set()
            if parameter in specs and 1 < len(shards) < len(specs[parameter].ranges):
                raise ValueError(
                    f"{name!r} has only {len(shards)} shards for {self._channel.size} ranks, so"
                    " several ranks would hold the same one. The model probably has fewer key"
                    f" heads than ranks. With `inside='domino'`, set `{argument_name}` to at most"
                    f" {len(shards)}."
                )

    def mark_shards(self) -> None:
        """Mark each parameter as a shard or full tensor, for code that ignores `specs`."""
        specs = self.specs
        for parameter in self._module.parameters():
            mark_shard(parameter, parameter in specs and len(set(specs[parameter].ranges)) > 1)

    def unmark_shards(self) -> None:
        """Undo `mark_shards`."""
        for parameter in self._module.parameters():
            mark_shard(parameter, False)

    # -- states

    def full_state_dict(self, keep: bool) -> dict[str, Any]:
        """Return the module's full state in CPU memory, or {} if `keep` is False; collective."""
        gathered: dict[Any, Tensor] = {}  # tied parameters are gathered once
        state, specs = self._module.state_dict(), self.specs
        for name, parameter in self._parameters_in(state).items():
            value = state[name]
            key = parameter, value.dtype
            if key not in gathered:
                gathered[key] = gather_to_host(value, specs[parameter], self._channel, keep)
            state[name] = gathered[key]
        return state if keep else {}

    def shard_state_dict(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a full state with sharded parameters replaced by this rank's shards."""
        own, specs, rank = self._parameters_in(state), self.specs, self._channel.rank
        return {
            name: specs[own[name]].shard(value, rank) if name in own else value
            for name, value in state.items()
        }

    def _parameters_in(self, state: Mapping[str, Any]) -> dict[str, nn.Parameter]:
        """Return the module's own sharded parameters that are named in `state`, by these names."""
        # The module's own `state_dict` may rename parameters, or copy them. Without copies, their
        # addresses tell which they are.
        by_address = {p.data_ptr(): p for p in self.specs}
        found = dict(self._module.named_parameters(remove_duplicate=False))
        for name, value in self._module.state_dict().items():
            if isinstance(value, Tensor) and value.data_ptr() in by_address:
                found[name] = by_address[value.data_ptr()]
        return {n: found[n] for n in state if n in found and found[n] in self.specs}

    def own_state(self) -> dict[str, Any]:
        """Return the state that differs between ranks: RNG state and `auto_split` timings."""
        return {
            "random": [model.group.own_state() for model in self.models],
            "splits": [model.trial.state_dict() for model in self.models],
        }

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `own_state`."""
        for model, random, split in zip(self.models, state["random"], state["splits"], strict=True):
            model.group.load_own_state(random)
            model.trial.load_state_dict(split)

    def full_optimizer_state(self, optimizer: Optimizer, keep: bool) -> dict[str, Any]:
        """Return an optimizer's full state in CPU memory, or {} if `keep` is False; collective."""
        return self.optimizer_shards.full_state_dict(optimizer, self._channel, keep)

    def shard_optimizer_state(
        self, optimizer: Optimizer, state: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return an optimizer's full state with tensors replaced by this rank's shards."""
        return self.optimizer_shards.shard_state_dict(optimizer, state, self._channel.rank)

    # -- gradients

    def sum_shared_gradients(self) -> None:
        """Sum the gradients of parameters that several ranks hold; collective."""
        for model in self.models:
            sum_shared(model.sharding.specs, model.group)

    def gradient_norm(self, parameters: Iterable[nn.Parameter], norm_type: float = 2.0) -> Tensor:
        """Return the norm of the full gradient, counting shared elements once; collective."""
        return gradient_norm(parameters, self.specs, self.models[0].group, norm_type)

    def clip_gradients(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clip an optimizer's gradients by the norm of the full gradient; collective."""
        parameters = parameters_of(optimizer)
        norm = self.gradient_norm(parameters)
        torch.nn.utils.clip_grads_with_norm_(parameters, clip_val, norm)

    # -- the end of a fit

    def unshard(self) -> None:
        """Restore the full models on every rank, but not optimizer states; collective."""
        for model in self.models:
            full = {}
            for parameter, spec in model.sharding.specs.items():
                # on the CPU, where Lightning moves a module after a fit anyway: the full model may
                # not fit on the device
                full[parameter] = gather_full_tensor(
                    parameter.detach(), spec, self._channel, STATE_TAG
                ).cpu()
            model.unshard(full)
