"""Settings for Streaming DiLoCo, validated on creation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from commfree_planner.pace import OVERLAP_STEPS, SYNC_EVERY
from lightning_commfree.comm.settings import check_choice, check_count
from lightning_commfree.diloco.codec import CODECS, Codec
from lightning_commfree.diloco.fragments import PATTERNS, has_blocks

OuterOptimizerFactory = Callable[[list[nn.Parameter]], Optimizer | tuple[Optimizer, LRScheduler]]
"""Creates the outer optimizer, or an (optimizer, scheduler) tuple, for a list of parameters."""
NONFINITE = ("raise", "abstain")


def is_single_fragment(module: nn.Module, settings: DiLoCoSettings) -> bool:
    """Return whether, by default, the model becomes one fragment because it has no blocks."""
    by_default = settings.num_fragments is None and settings.fragment_pattern != "balanced"
    return by_default and not has_blocks(module)


def default_outer_optimizer(replicas: int, sync_every: int) -> partial[torch.optim.SGD]:
    """Return a factory for the default outer optimizer, SGD with Nesterov momentum 0.9.

    The learning rate is 0.4, as in the paper (arXiv:2501.18512, section 3), or 0.8 if there are at
    least four replicas and `sync_every` is at least 100: the best learning rate increases with the
    number of replicas and with the number of steps between exchanges (arXiv:2503.09799, Figure 7).
    With four and eight replicas, 0.8 reached a lower loss than 0.4 at 100 steps between exchanges,
    but not at 30 (`benchmarks/size_ladder/result.md`). The momentum is from arXiv:2503.09799.
    """
    lr = 0.8 if replicas >= 4 and sync_every >= 100 else 0.4
    return partial(torch.optim.SGD, lr=lr, momentum=0.9, nesterov=True)


def make_outer_optimizer(
    factory: OuterOptimizerFactory, parameters: list[nn.Parameter]
) -> tuple[Optimizer, LRScheduler | None]:
    """Return the factory's optimizer and scheduler (or None); raise a `TypeError` otherwise."""
    made = factory(parameters)
    optimizer, scheduler = made if isinstance(made, tuple) else (made, None)

    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"`outer_optimizer` returned a {type(optimizer).__name__}, but it must take a list of"
            " parameters and return a `torch.optim.Optimizer`, such as"
            " `functools.partial(torch.optim.SGD, lr=0.4)`, or a tuple of an optimizer and a"
            " learning rate scheduler."
        )

    return optimizer, scheduler


# H and the least tau of `sync_every="auto"` until exchanges have been measured
AUTO_BEGINS, AUTO_OVERLAP = SYNC_EVERY[0], OVERLAP_STEPS[0]


@dataclass(frozen=True)
class DiLoCoSettings:
    """Settings for Streaming DiLoCo; `StreamingDiLoCoStrategy` documents each of them.

    Raises:
        ValueError: a value is out of range.
        TypeError: a value has the wrong type, or `outer_optimizer` is not callable.
    """

    sync_every: int | str = "auto"  # or a number of steps
    num_fragments: int | None = None
    fragment_pattern: str = "strided"
    overlap_steps: int = 1
    mix: float = 0.5
    wire_dtype: str | Codec = "fp4"
    outer_optimizer: OuterOptimizerFactory | None = None
    replica_size: int = 1
    # how the ranks of a replica hold the model; only "ddp" if `replica_size` is 1
    inside: Any = "ddp"  # a name, or Domino settings (`diloco` must not import their class)
    nonfinite: str = "raise"
    evaluate: str = "mean"
    check_drift_every: int = 1
    outer_device: str | None = None

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_choices()
        if self.outer_optimizer is not None and not callable(self.outer_optimizer):
            raise TypeError(
                "`outer_optimizer` must be a factory that takes a list of parameters, such as"
                " `functools.partial(torch.optim.SGD, lr=0.4)`, but it is a"
                f" {type(self.outer_optimizer).__name__}."
            )

    @property
    def is_auto(self) -> bool:
        """Whether `sync_every` is "auto"."""
        return self.sync_every == "auto"

    @property
    def first_sync_every(self) -> int:
        """H when a fit begins."""
        return AUTO_BEGINS if isinstance(self.sync_every, str) else self.sync_every

    @property
    def first_overlap_steps(self) -> int:
        """Tau when a fit begins; with "auto", also the least to which it may fall."""
        return max(self.overlap_steps, AUTO_OVERLAP) if self.is_auto else self.overlap_steps

    def fingerprint(self) -> dict[str, str]:
        """Return all settings but `outer_optimizer` as strings, which ranks can compare."""
        # functions cannot be compared
        names = (field.name for field in fields(self) if field.name != "outer_optimizer")
        values = {name: getattr(self, name) for name in names}
        if not isinstance(self.wire_dtype, str):  # its repr may contain a memory address
            values["wire_dtype"] = self.wire_dtype.name
        return {name: repr(value) for name, value in values.items()}

    def _check_numbers(self) -> None:
        meaning = ": it counts the inner steps between two exchanges of a fragment (or pass 'auto')"
        if not self.is_auto:
            check_count("sync_every", self.sync_every, 1, meaning)
        if self.num_fragments is not None:
            meaning = ", or None to derive it from the model"
            check_count("num_fragments", self.num_fragments, 1, meaning)
        check_count("overlap_steps", self.overlap_steps, 0)
        meaning = ": it counts the ranks of one replica"
        check_count("replica_size", self.replica_size, 1, meaning)
        check_count("check_drift_every", self.check_drift_every, 0, ", where 0 means never")

        if self.is_auto and self.overlap_steps > AUTO_BEGINS - 2:
            raise ValueError(
                f"`overlap_steps={self.overlap_steps}` must be at most {AUTO_BEGINS - 2} with"
                f" `sync_every='auto'`, which begins with {AUTO_BEGINS} steps and raises both as"
                " the link requires."
            )
        if self.overlap_steps >= self.first_sync_every:
            raise ValueError(
                f"`overlap_steps={self.overlap_steps}` must be at least 0 and below"
                f" `sync_every={self.sync_every}`: a fragment has to land before its next launch."
                " Lower `overlap_steps` or raise `sync_every`."
            )
        if isinstance(self.mix, bool) or not isinstance(self.mix, int | float):
            raise TypeError(
                f"`mix={self.mix!r}` must be a number, but it is a {type(self.mix).__name__}. Pass"
                " a float between 0 and 1."
            )
        if not 0.0 <= self.mix <= 1.0:
            raise ValueError(
                f"`mix={self.mix}` is outside [0, 1]. It is the weight of the local parameters when"
                " a fragment lands: 0 uses only the global parameters; 1 keeps only the local ones."
            )

    def _check_choices(self) -> None:
        check_choice("fragment_pattern", self.fragment_pattern, PATTERNS)
        check_choice("nonfinite", self.nonfinite, NONFINITE)
        # compared with a tuple, because the value may not be hashable
        if self.wire_dtype not in tuple(CODECS) and not isinstance(self.wire_dtype, Codec):
            raise ValueError(
                f"`wire_dtype={self.wire_dtype!r}` is not valid. Choose one of"
                f" {', '.join(map(repr, CODECS))}, or pass your own codec"
                " (`lightning_commfree.diloco.codec.Codec`)."
            )
        if self.evaluate not in ("outer", "mean"):
            raise ValueError(
                f"`evaluate={self.evaluate!r}` is not valid. Choose 'outer' (the outer weights) or"
                " 'mean' (the mean of the replicas' local weights)."
            )
        if self.outer_device not in (None, "cpu"):
            raise ValueError(
                f"`outer_device={self.outer_device!r}` is not valid. Choose 'cpu' (host memory) or"
                " None (the device of the parameters)."
            )
