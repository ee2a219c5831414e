"""Load optimizer states without rounding them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def restore_dtypes(
    optimizers: Iterable[Optimizer], states: Iterable[Mapping[str, Any]], saved: Collection[str]
) -> None:
    """Load states again that `Optimizer.load_state_dict` has cast to their parameter's dtype.

    Otherwise, it rounds them, for example the `mu_product` of `NAdam` with bf16 parameters. The
    optimizers have loaded `states`. `saved` are the dtypes of the saved parameters, as strings: if
    a parameter had another dtype then, torch's cast is what adapts its state, and it stays.
    """
    for optimizer, state in zip(optimizers, states, strict=True):
        indices = [index for group in state["param_groups"] for index in group["params"]]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for index, parameter in zip(indices, parameters, strict=True):
            if str(parameter.dtype) not in saved:
                continue
            for name, value in state["state"].get(index, {}).items():
                held = optimizer.state[parameter].get(name)
                are_tensors = isinstance(value, Tensor) and isinstance(held, Tensor)
                if are_tensors and held.dtype != value.dtype:
                    optimizer.state[parameter][name] = value.to(held.device, copy=True)
