"""Optimizer states of divided parameters: wholes out of parts, and parts of wholes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.wholes import Divided, Wholes, with_values
from lightning_commfree.domino.shard_spec import ShardSpec
from lightning_commfree.domino.sharding import whole_tensor

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
        self, optimizer: Optimizer, channel: Channel, wholes: Wholes
    ) -> dict[str, Any]:
        """Return an optimizer's whole state, tensors of divided parameters in CPU memory.

        Collective, one tensor at a time.

        Args:
            optimizer: of the fit.
            channel: to the tensor group.
            wholes: puts tensors together. Where this rank does not keep them the result is empty.
        """
        saved = optimizer.state_dict()
        result: dict[int, Any] = {}
        for index, parameter in enumerate(parameters_of(optimizer)):
            for key, value in saved["state"].get(index, {}).items():
                whole = self._whole(parameter, value, channel, wholes)
                if wholes.keep:
                    result.setdefault(index, {})[key] = whole
        return {**saved, "state": result} if wholes.keep else {}

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
            for key, saved in own.items():
                own[key] = value = with_values(saved)
                if spec is None or not isinstance(value, Tensor) or value.dim() <= spec.dim:
                    continue
                if value.shape != parameter.shape:  # else it is this rank's already
                    own[key] = spec.part(value, rank)
            if own:
                parts[index] = own
        return {**state, "state": parts}

    def _whole(self, parameter: nn.Parameter, value: Any, channel: Channel, wholes: Wholes) -> Any:
        spec, part_shape = self._parts.get(parameter, (None, None))
        if not isinstance(value, Tensor):
            return value
        if spec is None or value.shape != part_shape:
            return value.cpu() if wholes.keep else value
        return put_together(value, spec, channel, wholes)


def put_together(part: Tensor, spec: ShardSpec, channel: Channel, wholes: Wholes) -> Tensor:
    """Return the whole tensor of a part, as `wholes` puts it together; collective."""
    shape = list(part.shape)
    shape[spec.dim] = spec.size
    gather = partial(whole_tensor, part, spec, channel, STATE_TAG)
    return wholes(Divided(shape, part.dtype, gather))


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return all parameters of an optimizer, in the order of its state."""
    return [p for group in optimizer.param_groups for p in group["params"]]
