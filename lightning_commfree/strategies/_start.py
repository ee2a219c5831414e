"""How the ranks of a fit begin: they see that they mean the same, and take rank 0's weights."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.handshake import check_agreement
from lightning_commfree.comm.sharing import START_TAG, take_first_rank
from lightning_commfree.lightning_internals import validation_seconds

_DDP_KWARGS = (
    "accelerator",
    "parallel_devices",
    "cluster_environment",
    "checkpoint_io",
    "precision_plugin",
    "process_group_backend",
    "timeout",
    "start_method",
)
# what Lightning or the strategy passes to DDP itself
_NOT_OF_THE_USER = {"module", "device_ids", "output_device", "process_group", "kwargs"}


def common_start(channel: Channel, module: nn.Module, fingerprint: Mapping[str, str]) -> None:
    """Compare settings and module over all ranks, then take rank 0's weights where they differ.

    Args:
        channel: over the world.
        module: has the same parameters and buffers on all ranks.
        fingerprint: what else must be equal.

    Raises:
        ValueError: the ranks do not agree; on all of them alike.
    """
    check_agreement(channel, {**fingerprint, **_describe(module)})
    take_first_rank(channel, [*module.parameters(), *module.buffers()], START_TAG)


def refuse_timed_validation(strategy: str, trainer: pl.Trainer) -> None:
    """Refuse a validation that begins when each rank's own clock says so.

    Lightning does not let the ranks agree on it: one validates while the others train on.

    Raises:
        ValueError: the Trainer has a time for `val_check_interval`.
    """
    seconds = validation_seconds(trainer)
    if seconds is not None and trainer.world_size > 1:
        raise ValueError(
            f"`{strategy}` does not support a time as `val_check_interval` ({seconds:g} s here):"
            " every rank would validate by its own clock, after another step than the others. Give"
            " a number of batches, or a share of an epoch."
        )


def check_ddp_kwargs(
    strategy: str, ddp_kwargs: Mapping[str, Any], with_ddp: bool
) -> dict[str, Any]:
    """Refuse what nobody knows, and without DDP in the groups what means nothing then.

    LightningCLI gives every argument of DDP's that a configuration leaves out, with its default:
    such a one says nothing and is left out here too.

    Args:
        strategy: its name.
        ddp_kwargs: what it got besides its own arguments.
        with_ddp: DDP synchronizes gradients within groups of ranks, and takes its arguments.

    Returns:
        Those that are not DDP's defaults.

    Raises:
        TypeError: an argument of that kind.
    """
    taken = [inspect.signature(kind).parameters for kind in (DistributedDataParallel, DDPStrategy)]
    defaults = {name: known.default for names in taken for name, known in names.items()}
    said = {
        name: value
        for name, value in ddp_kwargs.items()
        if name not in defaults or not _is_same(value, defaults[name])
    }
    legal: tuple[str, ...] = _DDP_KWARGS
    why = "It replaces DDP's gradient synchronization, so of `DDPStrategy` it"
    if with_ddp:
        legal = tuple(defaults.keys() - _NOT_OF_THE_USER)
        why = "Of `DDPStrategy` and `DistributedDataParallel` it"
    for name in said:
        if name not in legal:
            near = difflib.get_close_matches(name, legal, n=1)
            hint = f" Did you mean `{near[0]}`?" if near else ""
            raise TypeError(
                f"`{strategy}` got the argument `{name}`. {why} takes only"
                f" {', '.join(f'`{one}`' for one in sorted(legal))}.{hint}"
            )
    return said


def _is_same(value: Any, default: Any) -> bool:
    return value is default or (type(value) is type(default) and bool(value == default))


def _describe(module: nn.Module) -> dict[str, str]:
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return {
        name: f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        + (", trainable" if tensor.requires_grad else "")
        for name, tensor in tensors
    }
