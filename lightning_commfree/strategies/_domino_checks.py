"""What a fit must be for `DominoTPStrategy`: before a model is divided, and at its first batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.digest import digest
from lightning_commfree.comm.handshake import check_agreement
from lightning_commfree.domino import check_divisible
from lightning_commfree.lightning_internals import is_compiled
from lightning_commfree.strategies._sharded import check_model, find_models


def check_fit(strategy: str, module: pl.LightningModule, precision: Precision, ranks: int) -> None:
    """See that the strategy can train this module.

    Args:
        strategy: its name.
        module: not divided yet.
        precision: the Trainer's.
        ranks: that shall share a model.

    Raises:
        ValueError: it is compiled, manual optimization, fp16, no model that can be divided, or
            not among so many ranks.
    """
    if is_compiled(module):
        raise ValueError(
            f"`{strategy}` does not support `torch.compile` of the LightningModule: the all-reduces"
            " of a divided model are launched and landed by Python between its layers, where the"
            " compiler fails. Give `fit` the module as it is."
        )
    if not module.automatic_optimization:
        raise ValueError(
            f"`{strategy}` does not support manual optimization: it has to know the last backward"
            " before an optimizer step. Leave `automatic_optimization` True."
        )
    fp16 = isinstance(precision, MixedPrecision) and precision.scaler is not None
    if fp16 or str(precision.precision).startswith("16"):
        raise ValueError(
            f"`{strategy}` does not support precision={precision.precision!r}: ranks of a tensor"
            " group would scale and skip apart. Use 'bf16-mixed', 'bf16-true' or '32-true'."
        )
    check_model(strategy, module)
    for model in find_models(module):
        check_divisible(model, ranks)


def may_change(module: pl.LightningModule) -> bool:
    """Return whether hooks that run once the ranks are there may make or change the model."""
    names = ("configure_model", "configure_sharded_model", "setup")
    return any(is_overridden(name, module, pl.LightningModule) for name in names)


def check_optimizers(optimizers: Iterable[Optimizer], lost: Set[Parameter]) -> None:
    """See that what is optimized is what this rank trains.

    Args:
        optimizers: of the fit.
        lost: parameters that the module had before it was divided, and has no more.

    Raises:
        ValueError: one of them is in an optimizer.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    count = sum(parameter in lost for group in groups for parameter in group["params"])
    if count:
        raise ValueError(
            f"The optimizer holds {count} parameters of the undivided model, which are trained no"
            " more: it, or its list of parameters, was made before the fit. Make both in"
            " `configure_optimizers`, from `self.parameters()`."
        )


def check_states(optimizers: Iterable[Optimizer], parts: Set[Parameter]) -> None:
    """See that optimizers keep numbers for single elements, after their first step.

    What is made of a whole row or column of a parameter would be made of a part of it here, and
    could not be put together for a checkpoint.

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


def warn_once() -> Callable[[str], None]:
    """Return what warns of a text the first time it is told of it."""
    said: set[str] = set()

    def say(text: str) -> None:
        if text not in said:
            said.add(text)
            rank_zero_warn(text)

    return say
