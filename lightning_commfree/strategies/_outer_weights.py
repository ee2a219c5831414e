"""What `StreamingDiLoCoStrategy` does with outer weights, apart from its hooks."""

from __future__ import annotations

from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_commfree.comm.weight_swap import ADVICE
from lightning_commfree.diloco import StreamingDiLoCo


def copies(state: dict[str, Any], diloco: StreamingDiLoCo) -> dict[str, Any]:
    """Return a state with host copies of what is exchanged, which becomes local again.

    What is frozen stays what it is: it may be large. Hyperparameters are of the user's own classes,
    which need not bear to be taken apart.
    """
    exchanged = {tensor.untyped_storage().data_ptr() for tensor in diloco.weight_swap.in_module}

    def copied(value: Any) -> Any:
        found = []

        def copy(tensor: Tensor) -> Tensor:
            found.append(tensor.untyped_storage().data_ptr() in exchanged)
            return tensor.detach().to("cpu", copy=True) if found[-1] else tensor

        replaced = apply_to_collection(value, Tensor, copy)
        return replaced if any(found) else value

    return {
        key: value if key.endswith("hyper_parameters") else copied(value)
        for key, value in state.items()
    }


def refuse_written(diloco: StreamingDiLoCo) -> None:
    """See, when all has landed, that the parameters are still the outer weights.

    Raises:
        RuntimeError: somebody has written to one.
    """
    if not diloco.weight_swap.is_local(buffers=False):
        raise RuntimeError(f"Parameters were written to after the last step of the fit. {ADVICE}")
