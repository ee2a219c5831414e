"""Checks for arguments, Trainer settings and callbacks."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.digest import digest
from lightning_commfree.comm.handshake import check_agreement
from lightning_commfree.host import (
    DDPStrategy,
    MixedPrecision,
    Precision,
    callbacks,
    is_overridden,
    pl,
)
from lightning_commfree.lightning_internals import is_compiled, validation_seconds
from lightning_commfree.model.blocks import is_compiled_submodule
from lightning_commfree.model.meta_init import on_meta
from lightning_commfree.model.replication import CommonGradScaler

_HOOKS = ("on_after_backward", "on_before_optimizer_step")


def why_gradients_change(
    trainer: pl.Trainer, module: pl.LightningModule, precision: Precision
) -> list[str]:
    """Return the reasons why gradients may change between backward and the optimizer step."""
    reasons = []
    if trainer.gradient_clip_val:
        reasons.append("`gradient_clip_val` is set")
    if isinstance(precision, MixedPrecision) and precision.scaler is not None:
        reasons.append("fp16 scaling is undone after backward")
    reasons += _overridden(module, pl.LightningModule, (*_HOOKS, "configure_gradient_clipping"))
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        reasons += _overridden(callback, pl.Callback, _HOOKS)
    return reasons


def compiled_as_a_whole(module: pl.LightningModule) -> str | None:
    """Return the name of a compiled submodule that contains most trained parameters, or None.

    All gradients of a compiled module become available together, when its backward ends, so their
    communication cannot overlap with backward.
    """

    def trained_numel(part: nn.Module) -> int:
        return sum(p.numel() for p in part.parameters() if p.requires_grad)

    for name, part in module.named_modules():  # the module itself comes first
        compiled = is_compiled(module) if part is module else is_compiled_submodule(part)
        if compiled and 2 * trained_numel(part) > trained_numel(module):
            return name or type(module).__name__
    return None


def _overridden(owner: Any, parent: type, hooks: Sequence[str]) -> list[str]:
    """Return a text for each of `hooks` that `owner` overrides."""
    name = type(owner).__name__
    return [f"`{name}` overrides `{hook}`" for hook in hooks if is_overridden(hook, owner, parent)]


def agree_on_overflow(precision: Precision, channel: Channel) -> None:
    """With fp16, replace the scaler: all ranks skip a step if the gradients of any overflow."""
    if not isinstance(precision, MixedPrecision) or precision.scaler is None or channel.size == 1:
        return
    precision.scaler = CommonGradScaler(precision.scaler, precision.device, channel)


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
# Lightning or the strategy passes these to DDP
_INTERNAL_DDP_KWARGS = {"module", "device_ids", "output_device", "process_group", "kwargs"}

# as strings, because Lightning before 2.6 has no `WeightAveraging`
_AVERAGES = ("WeightAveraging", "StochasticWeightAveraging")
_COPIES_FULL = "it copies the full model before it is sharded"
REFUSED_IF_LOCAL = {
    "LearningRateFinder": (
        "its trial steps would be counted and exchanged as training steps. Run it, or"
        " `Tuner.lr_find`, with the `ddp` strategy, and use the learning rate it finds here"
    ),
    "StochasticWeightAveraging": (
        "it averages the local weights of each replica, so every rank would end with different"
        " weights. In Lightning 2.6 and later, `WeightAveraging` and `EMAWeightAveraging` average"
        " the outer weights, which are the same on all ranks"
    ),
    "ModelPruning": (
        "it renames parameters in the middle of a fit, although they are exchanged by name, and"
        " each replica would compute masks from its own local weights"
    ),
}
REFUSED_IF_SHARDED = {
    **dict.fromkeys(_AVERAGES, _COPIES_FULL),
    "ModelPruning": (
        "it would choose what to prune within each rank's shard instead of the full weight, and it"
        " renames parameters, so checkpoints could not be gathered"
    ),
}


def refuse_callbacks(trainer: pl.Trainer, strategy: str, reasons: Mapping[str, str]) -> None:
    """Raise a `ValueError` if the Trainer has a callback that `strategy` does not support.

    `reasons` maps the class name of each unsupported callback to the reason. Subclasses of these
    callbacks are refused too, and so are callbacks that `Tuner` adds.
    """
    for name, reason in reasons.items():
        kind = getattr(callbacks, name, None)
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if kind is not None and isinstance(callback, kind):
                raise ValueError(
                    f"`{strategy}` does not support the callback `{type(callback).__name__}`:"
                    f" {reason}. Remove it, or train with the `ddp` strategy or on a single device."
                )


def refuse_modes(strategy: str, optimizers: Iterable[Optimizer]) -> None:
    """Raise a `ValueError` if an optimizer swaps the weights with `train()` and `eval()`.

    The optimizers of `schedulefree` do.
    """
    for optimizer in optimizers:
        if all(callable(getattr(optimizer, name, None)) for name in ("train", "eval")):
            raise ValueError(
                f"`{strategy}` does not support `{type(optimizer).__name__}`: it keeps a second set"
                " of weights in its state, which `train()` and `eval()` swap with the parameters,"
                " but replicas exchange only the parameters. Use an optimizer without these"
                " methods, or train with the `ddp` strategy."
            )


def refuse_max_norm(strategy: str, module: nn.Module) -> None:
    """Raise a `ValueError` if an embedding has a `max_norm`, which makes ranks' weights differ."""
    for name, one in module.named_modules():
        if isinstance(one, nn.Embedding | nn.EmbeddingBag) and one.max_norm is not None:
            raise ValueError(
                f"`{strategy}` does not support `max_norm={one.max_norm}` of the embedding"
                f" {name!r}: forward rescales the rows that a rank looks up, on that rank only, so"
                " ranks that must hold equal weights would differ. Rescale all rows yourself, in"
                " `on_train_batch_end`."
            )


def refuse_timed_validation(strategy: str, trainer: pl.Trainer) -> None:
    """Raise a `ValueError` if several ranks would validate at intervals of time.

    Each rank would measure time with its own clock, so some ranks could start validating while
    others are still training.
    """
    seconds = validation_seconds(trainer)
    if seconds is not None and trainer.world_size > 1:
        raise ValueError(
            f"`{strategy}` does not support a time interval as `val_check_interval` (here"
            f" {seconds:g} s), because ranks with different clocks would validate after different"
            " steps. Set a number of batches or a fraction of an epoch."
        )


def refuse_compiled(strategy: str, module: pl.LightningModule) -> None:
    """Raise a `ValueError` if a LightningModule to be sharded is compiled (`torch.compile`)."""
    if is_compiled(module):
        raise ValueError(
            f"`{strategy}` does not support a LightningModule compiled with `torch.compile`: a"
            " sharded model launches its all-reduces from Python code between its layers, and the"
            " compiler cannot handle that. Pass the uncompiled module to `fit`."
        )


def refuse_manual(strategy: str, module: pl.LightningModule, reason: str) -> None:
    """Raise a `ValueError` with `reason` if a LightningModule uses manual optimization.

    This also rules out multiple optimizers, which Lightning allows only in manual optimization.
    """
    if not module.automatic_optimization:
        raise ValueError(
            f"`{strategy}` does not support manual optimization: {reason}. Set"
            " `automatic_optimization = True` and use one optimizer, with a parameter group for"
            " each learning rate, or use `StreamingDiLoCoStrategy` with `inside='ddp'`, which"
            " supports manual optimization, or the `ddp` strategy."
        )


def refuse_fp16(strategy: str, precision: Precision) -> None:
    """Raise a `ValueError` if a sharded model would train in fp16.

    Each rank would scale its gradients, and skip steps on overflow, independently of the others.
    """
    fp16 = isinstance(precision, MixedPrecision) and precision.scaler is not None
    if fp16 or str(precision.precision).startswith("16"):
        raise ValueError(
            f"`{strategy}` does not support precision={precision.precision!r} for a sharded model:"
            " each rank would scale gradients and skip steps on its own. Use 'bf16-mixed',"
            " 'bf16-true' or '32-true'."
        )


def refuse_muon(strategy: str, optimizers: Iterable[Optimizer]) -> None:
    """Raise a `ValueError` if a sharded model would be trained with Muon.

    Muon would orthogonalize each shard separately instead of the full matrix. An optimizer counts
    as Muon if a parameter group has an "ns_steps" above 0, as in `torch.optim.Muon`.
    """
    for optimizer in optimizers:
        if any(group.get("ns_steps") for group in optimizer.param_groups):
            raise ValueError(
                f"`{strategy}` does not support `{type(optimizer).__name__}` for a sharded model:"
                " Muon orthogonalizes whole matrices, but each rank holds only shards of them. Use"
                " an element-wise optimizer, such as AdamW, or `inside='ddp'`, under which every"
                " rank holds the full model."
            )


def check_ddp_kwargs(cls: type, ddp_kwargs: Mapping[str, Any], with_ddp: bool) -> dict[str, Any]:
    """Return what differs from DDP's defaults; raise a TypeError for what does not apply.

    `with_ddp` is whether DDP averages gradients within a replica. If not, the arguments of
    `DistributedDataParallel`, and most of `DDPStrategy`'s, do not apply: they raise a `TypeError`.
    """
    taken = [inspect.signature(kind).parameters for kind in (DistributedDataParallel, DDPStrategy)]
    defaults = {name: known.default for names in taken for name, known in names.items()}
    given = {
        name: value
        for name, value in ddp_kwargs.items()
        if name not in defaults or not _is_same(value, defaults[name])
    }
    legal: tuple[str, ...] = _DDP_KWARGS
    why = "DDP does not average its gradients, so of `DDPStrategy`'s arguments it"
    if with_ddp:
        legal = tuple(defaults.keys() - _INTERNAL_DDP_KWARGS)
        why = "Of the arguments of `DDPStrategy` and `DistributedDataParallel` it"
    for name in given:
        if name not in legal:
            own = [one for one in inspect.signature(cls).parameters if one != "ddp_kwargs"]
            near = difflib.get_close_matches(name, (*own, *legal), n=1)
            hint = f" Did you mean `{near[0]}`?" if near and name not in defaults else ""
            raise TypeError(
                f"`{cls.__name__}` does not accept the argument `{name}`.{hint} Supported"
                f" arguments: {', '.join(f'`{one}`' for one in own)}. {why} accepts only"
                f" {', '.join(f'`{one}`' for one in sorted(legal))}."
            )
    return given


def _is_same(value: Any, default: Any) -> bool:
    return value is default or (type(value) is type(default) and bool(value == default))


def refuse_meta(strategy: str, module: nn.Module) -> None:
    """Raise a `ValueError` if tensors are on the meta device; only a fit initializes them."""
    if without := on_meta(module):
        raise ValueError(
            f"{len(without)} tensors, including {without[0]!r}, are on the meta device and have no"
            f" values. `{strategy}` initializes them only in `fit`: call `fit` first, or build the"
            " model on the CPU."
        )


def check_batch(channel: Channel, verb: str, batch: Any) -> None:
    """Raise a `ValueError` on all ranks of a replica if their batches differ; collective.

    `verb` is "train" or "validate"; the tensors of `batch` may be in nested containers.
    """
    tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    # compare hashes as text: they are much smaller than the batches
    found = [f"{tuple(t.shape)} {int(digest(t.contiguous()))}" for t in tensors]
    try:
        check_agreement(channel, {"the first batch": " ".join(found)})
    except ValueError as error:
        raise ValueError(
            f"The ranks of a replica must {verb} on the same batch, but the first batches of"
            f" ranks {list(channel.ranks)} differ. Let Lightning insert its own sampler, or give"
            " yours the `num_replicas` and `rank` from `trainer.distributed_sampler_kwargs`."
        ) from error
