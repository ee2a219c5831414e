"""A LightningModule with models divided inside it: whole states out of parts, and parts of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_commfree.comm.channel import Channel
from lightning_commfree.domino import (
    FAMILIES,
    DominoSettings,
    ParallelModel,
    ShardSpec,
    check_divisible,
    on_meta,
    whole_tensor,
)

TAG = "tensor_state"


class OptimizerParts:
    """Optimizer states of which each rank of a tensor group has its part: in a fit, and after it.

    After a fit the models are whole on every rank; what an optimizer knows of them is twice as
    much, few ask for it, and it stays where it is.

    Args:
        specs: how each sharded parameter is divided, in the fit.
    """

    def __init__(self, specs: Mapping[nn.Parameter, ShardSpec]) -> None:
        self._specs = {parameter: (spec, parameter.shape) for parameter, spec in specs.items()}

    def whole_state(self, optimizer: Optimizer, channel: Channel, keep: bool) -> dict[str, Any]:
        """Return an optimizer's whole state, tensors of divided parameters in CPU memory.

        Collective, one tensor at a time.

        Args:
            optimizer: of the fit.
            channel: to the tensor group.
            keep: whether this rank wants it; else the result is empty.
        """
        saved = optimizer.state_dict()
        result: dict[int, Any] = {}
        for index, parameter in enumerate(_parameters(optimizer)):
            for key, value in saved["state"].get(index, {}).items():
                whole = self._whole(parameter, value, channel)
                if keep:
                    on_cpu = whole.cpu() if isinstance(whole, Tensor) else whole
                    result.setdefault(index, {})[key] = on_cpu
        return {**saved, "state": result} if keep else {}

    def _whole(self, parameter: nn.Parameter, value: Any, channel: Channel) -> Any:
        spec, part_shape = self._specs.get(parameter, (None, None))
        if spec is None or not isinstance(value, Tensor) or value.shape != part_shape:
            return value
        return whole_tensor(value, spec, channel, TAG)


def find_models(module: nn.Module) -> list[nn.Module]:
    """Return the outermost models inside that can be divided."""
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for child in module.modules():
        known = type(child).__name__ in FAMILIES or _has_plan(child)
        if known and child not in inside and child is not module:
            found.append(child)
            inside.update(child.modules())
    return found


def check_model(strategy: str, module: pl.LightningModule) -> None:
    """See that there is something to divide, as it is.

    Raises:
        ValueError: there is nothing, or it is compiled, wrapped, has adapters, or is without values
            that nobody can give it.
    """
    for name, child in module.named_modules():
        wrapped = isinstance(child, DistributedDataParallel) or "FSDP" in type(child).__name__
        compiled = (
            type(child).__name__ == "OptimizedModule" or child._compiled_call_impl is not None
        )
        if wrapped or compiled:
            raise ValueError(
                f"'{name}' is {'compiled' if compiled else 'wrapped'} already, as"
                f" `{type(child).__name__}`, and `{strategy}` has to divide the model before that."
                " Give it the plain model."
            )
        if hasattr(child, "base_layer"):  # peft's name for what an adapter stands beside
            raise ValueError(
                f"'{name}' is a `{type(child).__name__}`, an adapter around a layer, and"
                f" `{strategy}` divides plain layers only. Train adapters with another strategy:"
                " few bytes are sent for them; or merge them into the model first."
            )
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


def _check_values(strategy: str, module: nn.Module, models: Sequence[nn.Module]) -> None:
    whole = [m for m in models if type(m).__name__ in FAMILIES]
    whole = [m for m in whole if all(p.is_meta for p in m.parameters())]
    filled = {id(t) for m in whole for t in (*m.parameters(), *m.buffers())}
    tensors = dict([*module.named_parameters(), *module.named_buffers()])
    left = [name for name in on_meta(module) if id(tensors[name]) not in filled]
    if left:
        raise ValueError(
            f"{len(left)} tensors, {left[0]!r} among them, are on the meta device and hold no"
            f" values. `{strategy}` gives values to a {', '.join(FAMILIES)} of which all parameters"
            " are there, and to nothing else: build the rest on the CPU."
        )


class ShardedModule:
    """A module whose transformers models are divided among a tensor group.

    Args:
        module: changed in place.
        channel: to the tensor group.
        settings: split and micro-batches.
        seed: see `ParallelModel`.
        init_seed: see `ParallelModel`.

    Attributes:
        models: the divided models.
        optimizer_parts: what optimizers know of them.

    Raises:
        ValueError: one of them cannot be divided; none is changed then.
    """

    def __init__(
        self,
        module: nn.Module,
        channel: Channel,
        settings: DominoSettings,
        seed: int,
        init_seed: int = 0,
    ) -> None:
        self._module, self._channel = module, channel
        found = find_models(module)
        for model in found:
            check_divisible(model, channel.size)
        self.models = [ParallelModel(model, channel, settings, seed, init_seed) for model in found]
        self.optimizer_parts = OptimizerParts(self.specs)

    @property
    def specs(self) -> dict[nn.Parameter, ShardSpec]:
        """How each sharded parameter is divided."""
        return {p: spec for model in self.models for p, spec in model.sharding.specs.items()}

    def state_dict(self, keep: bool) -> dict[str, Any]:
        """Return the module's whole state, tensors of divided parameters in CPU memory.

        Collective, one tensor at a time.

        Args:
            keep: whether this rank wants it; else the result is empty.
        """
        specs = {p.data_ptr(): spec for p, spec in self.specs.items()}
        known: dict[int, Tensor] = {}  # tied parameters are gathered once
        state = self._module.state_dict()
        for name, value in list(state.items()):
            if isinstance(value, Tensor) and value.data_ptr() in specs:
                place = value.data_ptr()
                if place not in known:
                    whole = whole_tensor(value, specs[place], self._channel, TAG)
                    known[place] = whole.cpu() if keep else whole.new_empty(0)
                state[name] = known[place]
        return state if keep else {}

    def parts_of(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's parts of a whole module's state."""
        own = self._module.state_dict(keep_vars=True)
        specs, rank = self.specs, self._channel.rank
        return {
            name: specs[own[name]].part(value, rank) if own.get(name) in specs else value
            for name, value in state.items()
        }

    def optimizer_parts_of(self, optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's parts of a whole optimizer state."""
        specs, rank, parts = self.specs, self._channel.rank, {}
        for index, parameter in enumerate(_parameters(optimizer)):
            spec = specs.get(parameter)
            own = dict(state["state"].get(index, {}))
            for key, value in own.items():
                if spec is not None and isinstance(value, Tensor) and value.dim() > spec.dim:
                    own[key] = spec.part(value, rank)
            if own:
                parts[index] = own
        return {**state, "state": parts}

    def join(self) -> None:
        """Make the models transformers' own again, whole on every rank; optimizers stay as is."""
        for model in self.models:
            wholes = {}
            for parameter, spec in model.sharding.specs.items():
                # to CPU memory, where Lightning puts a module after a fit: it may be too big
                wholes[parameter] = whole_tensor(parameter.detach(), spec, self._channel, TAG).cpu()
            model.join(wholes)


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _has_plan(module: nn.Module) -> bool:
    config: Any = getattr(module, "config", None)
    plan = getattr(config, "base_model_tp_plan", None)
    return bool(plan) and hasattr(module, "base_model_prefix")
