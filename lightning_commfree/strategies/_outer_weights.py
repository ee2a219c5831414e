"""What `StreamingDiLoCoStrategy` does with outer weights, apart from its hooks."""

from __future__ import annotations

from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_commfree.diloco import StreamingDiLoCo
from lightning_commfree.diloco.weight_swap import ADVICE


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


def unlanded(diloco: StreamingDiLoCo, what: str) -> str | None:
    """Return what to say of outer weights that nothing has moved yet; None if all have moved.

    Args:
        diloco: in its fit.
        what: uses the outer weights.
    """
    count = sum(not fragment.landings for fragment in diloco.fragments)
    if not count:
        return None
    schedule = diloco.schedule
    return (
        f"This {what} uses the outer weights, and after {diloco.step} inner steps those of {count}"
        f" of {len(diloco.fragments)} fragments are still those with which the fit began. With"
        f" `sync_every={diloco.settings.sync_every}` and"
        f" `overlap_steps={diloco.settings.overlap_steps}` every fragment has landed once after"
        f" step {schedule.complete_after}. `evaluate='mean'` takes the mean of the replicas' local"
        " weights."
    )


def refuse_written(diloco: StreamingDiLoCo) -> None:
    """See, when all has landed, that the parameters are still the outer weights.

    Raises:
        RuntimeError: somebody has written to one.
    """
    if diloco.differs_from_outer(buffers=False):
        raise RuntimeError(f"Parameters were written to after the last step of the fit. {ADVICE}")
