"""Shard a module across the ranks of a replica, unit by unit, with FSDP2's `fully_shard`.

With the Trainer's precision "bf16-mixed", parameters are gathered in bf16 (`choose_policies`).
Gathered in fp32, twice the bytes would be sent, and autocast's bf16 copy of each weight, which
FSDP2 does not free, would stay in memory from the weight's forward to its backward pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from numbers import Real
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from lightning_commfree.comm.ledger import all_gather_bytes
from lightning_commfree.model.blocks import block_names, outermost
from lightning_commfree.model.meta_init import Materializer

# methods of a LightningModule, besides `forward`, that run the model
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")

# Gradients are still averaged in fp32, as under DDP with bf16-mixed.
_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@dataclass(frozen=True)
class FSDPSettings:
    """Settings for `inside="fsdp"`.

    Args:
        units: class names. The outermost modules of these classes are gathered one at a time; the
            rest of the model is gathered together. If empty, the units are the transformer blocks;
            a model without blocks is a single unit.
        folder_above_bytes: if the parameters exceed this many bytes, a checkpoint is a folder that
            all ranks of the first replica write in parallel to a shared disk (`resume.folders`). If
            None, a checkpoint is always a single file, which rank 0 gathers in host memory.
        mp_policy: mixed precision of all units, as `fully_shard` takes it. If None, parameters are
            gathered in bf16 under `precision="bf16-mixed"` (`choose_policies`), and in their own
            dtype otherwise; `MixedPrecisionPolicy()` gathers them in their own dtype always.

    Raises:
        TypeError: `units` is not a sequence of strings, `folder_above_bytes` is not a number, or
            `mp_policy` is not a `MixedPrecisionPolicy`.
        ValueError: `folder_above_bytes` is negative or NaN.
    """

    units: Sequence[str] = ()
    folder_above_bytes: float | None = None
    mp_policy: MixedPrecisionPolicy | None = None

    def __post_init__(self) -> None:
        given: Any = self.units
        is_list = isinstance(given, Sequence) and not isinstance(given, str)
        if not is_list or not all(isinstance(name, str) for name in given):
            raise TypeError(
                f"`units={self.units!r}` must be a list of class names, such as ['Stage', 'Head']."
            )
        object.__setattr__(self, "units", tuple(self.units))  # YAML passes a list
        policy: Any = self.mp_policy
        if not isinstance(policy, MixedPrecisionPolicy | None):
            raise TypeError(
                f"`mp_policy={policy!r}` must be a `torch.distributed.fsdp.MixedPrecisionPolicy` or"
                " None."
            )
        size: Any = self.folder_above_bytes
        if size is None:
            return
        text = f"`folder_above_bytes={size!r}` must be a number of bytes, such as 20e9, or None."
        if isinstance(size, bool) or not isinstance(size, Real):
            raise TypeError(text)
        if not float(size) >= 0:  # also rejects NaN
            raise ValueError(text)


def why_unavailable() -> str | None:
    """Return the reason why this version of torch cannot shard a module, or None if it can."""
    # Older releases keep the outermost unit gathered after a forward pass, regardless of the
    # arguments, and do not run on CPUs.
    if inspect.signature(fully_shard).parameters["reshard_after_forward"].default is None:
        return None
    return (
        f"`fully_shard` in torch {torch.__version__} is too old. Install a newer torch (2.13 is"
        " tested)"
    )


Policies = Mapping[str, MixedPrecisionPolicy]  # by name of an FSDP unit; "" is the rest


def choose_policies(
    module: nn.Module, settings: FSDPSettings, bf16_mixed: bool
) -> dict[str, MixedPrecisionPolicy]:
    """Choose the FSDP units of an unsharded module; return the mixed precision of each by name.

    Each transformer block, or each outermost module of a class in `settings.units`, is a unit, and
    the rest of the module is another one. Without a module of these classes, raise a `ValueError`.
    """
    units = settings.units
    names = [*(outermost(module, units) if units else block_names(module)), ""]
    if settings.mp_policy is not None or not bf16_mixed:
        return dict.fromkeys(names, settings.mp_policy or MixedPrecisionPolicy())

    policies = dict.fromkeys(names, _BF16)
    # the module's own input is a batch, whose targets must keep their precision
    policies[""] = replace(_BF16, cast_forward_inputs=False)
    for name in _units_that_keep_their_dtype(module, names):
        policies[name] = MixedPrecisionPolicy()
    return policies


def _units_that_keep_their_dtype(module: nn.Module, units: Sequence[str]) -> Iterator[str]:
    """Yield the names of units that bf16 would break, some more than once."""
    for name, child in module.named_modules():
        # torch's kernels need the scale in the dtype of the running statistics, which are buffers
        if isinstance(child, _NormBase) and child.running_mean is not None:
            yield _unit_of(name, units)
    for name, parameter in module.named_parameters():
        if parameter.dtype not in (torch.float32, torch.bfloat16):
            yield _unit_of(name, units)


def _unit_of(name: str, units: Iterable[str]) -> str:
    """Return the unit of a module or parameter; "" if it is outside all others."""
    return next((unit for unit in units if unit and f"{name}.".startswith(f"{unit}.")), "")


def apply_fsdp(
    module: nn.Module,  # the same on all ranks of the replica
    group: dist.ProcessGroup,  # of the replica; must not be destroyed before the module
    device: torch.device,  # each unit is moved there before it is sharded
    policies: Policies,
    materializer: Materializer | None = None,  # fills `meta` units one at a time, never the whole
) -> None:
    """Shard the parameters of a plain module in place, on any device, across a replica's ranks.

    A unit's parameters are gathered for its forward pass and again for its backward pass, after
    which its gradients are averaged over the replica. Parameters become `DTensor`s. A parameter
    that FSDP2 cannot train raises a `ValueError`. `save_pretrained` of its modules raises then,
    because they hold shards.
    """
    names = [name for name in policies if name]
    _check_parameters(module, names)
    ties = _tied_parameters(module)
    # By default, the outermost unit stays gathered after a forward pass without backward, so the
    # training step after a validation would use the validation's weights.
    # The name tells the meshes of several fits apart. torch caches the results of operations on
    # `DTensor`s by mesh, and tensors of this fit would otherwise use the group of an earlier fit.
    names_of_axes = (f"replica_{group.group_name}",)
    mesh = DeviceMesh.from_group(group, device.type, mesh_dim_names=names_of_axes)
    how: dict[str, Any] = {"mesh": mesh}
    how["reshard_after_forward"] = True
    for name in names:
        block = module.get_submodule(name)
        if materializer is not None:
            materializer.materialize(block)
        if next(block.parameters(), None) is not None:
            fully_shard(block, **how, mp_policy=policies[name])

    if materializer is not None:
        materializer.materialize_rest()
        # each occurrence of a tied parameter was initialized separately, so tie them again
        for first, *others in ties:
            for owner, name in others:
                setattr(owner, name, getattr(*first))
    fully_shard(module, **how, mp_policy=policies[""])
    for step in _STEPS:  # FSDP2 would gather the root's parameters only for `forward`
        if hasattr(module, step):
            register_fsdp_forward_method(module, step)
    _disable_save_pretrained(module)


_CANNOT_TRAIN = "FSDP2 (`inside='fsdp'`) cannot train"


def _check_parameters(module: nn.Module, units: Sequence[str]) -> None:
    """Raise a `ValueError` that names a parameter that FSDP2 cannot train.

    FSDP2 itself would raise an error later and without naming the parameter. `units` contains the
    names of the submodules that are gathered separately.
    """
    dtypes: dict[str, dict[torch.dtype, str]] = {}  # by unit: its dtypes, with an example of each
    for owner_name, owner in module.named_modules():
        for name, parameter in owner.named_parameters(owner_name, recurse=False):
            if not parameter.requires_grad:
                continue
            if parameter.numel() == 0:
                why = "is empty. Remove it, set `requires_grad=False` on it, or make it a buffer"
                raise ValueError(f"{_CANNOT_TRAIN} {name!r}, which {why}.")
            if isinstance(owner, nn.Embedding | nn.EmbeddingBag) and owner.sparse:
                why = f"has sparse gradients. Use `sparse=False` in its `{type(owner).__name__}`"
                raise ValueError(f"{_CANNOT_TRAIN} {name!r}, which {why}.")
            dtypes.setdefault(_unit_of(name, units), {}).setdefault(parameter.dtype, name)
    for examples in dtypes.values():
        if len(examples) > 1:
            found = " and ".join(f"{name!r} ({dtype})" for dtype, name in examples.items())
            raise ValueError(
                f"{_CANNOT_TRAIN} parameters of different dtypes that it gathers together: {found}."
                " Convert the model to one dtype, or make the modules separate units by listing"
                " their classes: `inside=FSDPSettings(units=[...])`."
            )


def _disable_save_pretrained(module: nn.Module) -> None:
    """Make `save_pretrained` of all submodules raise an error, as it would save shards."""
    for model in module.modules():  # transformers and peft models may be submodules
        if isinstance(getattr(model, "save_pretrained", None), MethodType):
            vars(model)["save_pretrained"] = _refuse_to_save


def _refuse_to_save(*args: Any, **kwargs: Any) -> None:
    """Raise a `RuntimeError`; replaces `save_pretrained`."""
    raise RuntimeError(
        "The model is still sharded after `fit`, so `save_pretrained` would save only this rank's"
        " shard. Call `trainer.save_checkpoint(path)` on all ranks, load the checkpoint's"
        " `state_dict` into an unsharded model, and call `save_pretrained` on that model."
    )


def _tied_parameters(module: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Return the (module, attribute name) pairs of each tied parameter, one list per parameter."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            places.setdefault(parameter, []).append((owner, name))
    return [found for found in places.values() if len(found) > 1]


@contextmanager
def reducing_gradients(module: nn.Module, reduces: bool) -> Iterator[None]:
    """Context manager in which backward passes reduce gradients over the replica.

    If `reduces` is False, each rank accumulates full gradients locally, and the next backward pass
    that reduces includes them. Outside of a fit, `module` may not be sharded.
    """
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(reduces)
    try:
        yield
    finally:
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(True)


def step_bytes(module: nn.Module, policies: Policies) -> tuple[int, int]:
    """Return the bytes that this rank sends per step in FSDP2's all-gathers and reduce-scatters.

    Parameters are gathered twice, for forward and backward, and the gradients of trained parameters
    are reduce-scattered once, each in the dtype of its unit's policy. Frozen units through which no
    gradient flows are gathered only once but counted twice.
    """
    gathered = scattered = 0
    for name, parameter in module.named_parameters():
        assert isinstance(parameter, DTensor), "`apply_fsdp` must come first"
        policy = policies[_unit_of(name, policies)]
        low = policy.param_dtype if parameter.is_floating_point() else None
        dtype = low or parameter.dtype

        # each of n ranks holds ceil(r / n) of a parameter's r rows, with padding
        rows, size = parameter.shape[0], parameter.device_mesh.size()
        numbers = -(-rows // size) * (parameter.numel() // max(rows, 1))
        gathered += 2 * all_gather_bytes(numbers * dtype.itemsize, size)
        if parameter.requires_grad:
            reduced = policy.reduce_dtype or dtype
            scattered += all_gather_bytes(numbers * reduced.itemsize, size)
    return gathered, scattered


def check_optimizers(optimizers: Iterable[Optimizer], held: Set[nn.Parameter]) -> None:
    """Raise a `ValueError` if an optimizer holds any but `held`, the sharded parameters."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    count = sum(parameter not in held for group in groups for parameter in group["params"])
    if count:
        raise ValueError(
            f"The optimizer holds {count} parameters that were created before the model was"
            " sharded, or that are not part of the model, so they would not be trained. The"
            " optimizer or its list of parameters was probably created before `fit`. Create both"
            " in `configure_optimizers`, from `self.parameters()`."
        )
