"""What all workers must agree on before they vote: the parameters, their order, their groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.handshake import check_agreement


def agree_on_parameters(
    channel: Channel, module: nn.Module, groups: Sequence[Mapping[str, Any]]
) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of an optimizer with their names, in the order of the module.

    Args:
        channel: over all ranks; collective.
        module: that holds the parameters.
        groups: `param_groups` of the optimizer.

    Raises:
        ValueError: the module does not hold all of them, or names, groups or hyperparameters are
            not the same on all ranks.
    """
    group_of = {p: i for i, group in enumerate(groups) for p in group["params"]}
    named = [(name, p) for name, p in module.named_parameters() if p in group_of]
    if len(named) < len(group_of):
        raise ValueError(
            f"{len(group_of) - len(named)} parameters of `DistributedLion` belong to no"
            " submodule of the LightningModule, so the ranks could not agree on them. Register"
            " them, or leave them out of the optimizer."
        )

    fingerprint = {f"parameter {name} in group": str(group_of[p]) for name, p in named}
    names = {p: name for name, p in named}
    for i, group in enumerate(groups):
        for key in ("lr", "betas", "weight_decay"):
            fingerprint[f"{key} of group {i}"] = repr(group[key])
        for j, p in enumerate(group["params"]):
            fingerprint[f"parameter {j} of group {i}"] = names[p]

    check_agreement(channel, fingerprint)
    return named
