"""The settings of Streaming DiLoCo, validated when they are made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_commfree.diloco.codec import CODECS, Codec
from lightning_commfree.diloco.fragments import PATTERNS, has_blocks

OuterOptimizerFactory = Callable[[list[nn.Parameter]], Optimizer | tuple[Optimizer, LRScheduler]]
"""Takes fp32 parameters; returns the outer optimizer, or a tuple of it and its scheduler."""
NONFINITE = ("raise", "abstain")


def cuts_whole(module: nn.Module, settings: DiLoCoSettings) -> bool:
    """Return whether the model becomes one fragment because no blocks were found in it."""
    by_default = settings.num_fragments is None and settings.fragment_pattern != "balanced"
    return by_default and not has_blocks(module)


def default_outer_optimizer(parameters: list[nn.Parameter]) -> Optimizer:
    """Nesterov SGD: the paper's learning rate of 0.4, and the momentum of arXiv:2503.09799."""
    return torch.optim.SGD(parameters, lr=0.4, momentum=0.9, nesterov=True)


def make_outer_optimizer(
    factory: OuterOptimizerFactory, parameters: list[nn.Parameter]
) -> tuple[Optimizer, LRScheduler | None]:
    """Return the outer optimizer, and the scheduler of its learning rate or None.

    Raises:
        TypeError: the factory did not return a torch optimizer.
    """
    made = factory(parameters)
    optimizer, scheduler = made if isinstance(made, tuple) else (made, None)

    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"`outer_optimizer` returned a {type(optimizer).__name__}; it must take a list"
            " of parameters and return a `torch.optim.Optimizer`, like"
            " `functools.partial(torch.optim.SGD, lr=0.4)`, or a tuple of it and a learning"
            " rate scheduler."
        )

    return optimizer, scheduler


@dataclass(frozen=True)
class DiLoCoSettings:
    """The settings of the algorithm; `StreamingDiLoCoStrategy` documents each.

    Raises:
        ValueError: a value is outside its range.
        TypeError: a value has another type, or `outer_optimizer` cannot be called.
    """

    sync_every: int
    num_fragments: int | None
    fragment_pattern: str
    overlap_steps: int
    mix: float
    wire_dtype: str | Codec
    outer_optimizer: OuterOptimizerFactory
    replica_size: int
    inside: Any = "ddp"  # a name, or a value of Domino's settings, which this package cannot import
    nonfinite: str = "raise"
    evaluate: str = "outer"
    check_drift_every: int = 1
    outer_device: str | None = None

    def __post_init__(self) -> None:
        self._check_kinds()
        self._check_schedule()
        self._check_exchange()
        self._check_replicas()

    def fingerprint(self) -> dict[str, str]:
        """Return the settings that must be equal on all ranks, as text.

        The outer optimizer's factory is left out: functions cannot be compared.
        """
        names = (field.name for field in fields(self) if field.name != "outer_optimizer")
        values = {name: getattr(self, name) for name in names}
        if not isinstance(self.wire_dtype, str):  # the object's own text may show an address
            values["wire_dtype"] = self.wire_dtype.name
        return {name: repr(value) for name, value in values.items()}

    def _check_kinds(self) -> None:
        counts = (
            "sync_every",
            "num_fragments",
            "overlap_steps",
            "replica_size",
            "check_drift_every",
        )

        for name in counts:
            value = getattr(self, name)
            if name == "num_fragments" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(
                    f"`{name}={value!r}` must be a whole number, but it is a"
                    f" {type(value).__name__}. Give an int."
                )

        if isinstance(self.mix, bool) or not isinstance(self.mix, int | float):
            raise TypeError(
                f"`mix={self.mix!r}` must be a number, but it is a {type(self.mix).__name__}. Give"
                " a float between 0 and 1."
            )

    def _check_schedule(self) -> None:
        if self.sync_every < 1:
            raise ValueError(
                f"`sync_every={self.sync_every}` must be at least 1: it counts the inner steps"
                " between two syncs of a fragment."
            )

        if self.num_fragments is not None and self.num_fragments < 1:
            raise ValueError(
                f"`num_fragments={self.num_fragments}` must be at least 1, or None to choose it"
                " from the model."
            )

        if self.fragment_pattern not in PATTERNS:
            raise ValueError(
                f"`fragment_pattern={self.fragment_pattern!r}` is unknown. Choose one of"
                f" {', '.join(map(repr, PATTERNS))}."
            )

        if not 0 <= self.overlap_steps < self.sync_every:
            raise ValueError(
                f"`overlap_steps={self.overlap_steps}` must be at least 0 and below"
                f" `sync_every={self.sync_every}`: a fragment has to land before it leaves again."
                " Lower `overlap_steps` or raise `sync_every`."
            )

    def _check_exchange(self) -> None:
        if not 0.0 <= self.mix <= 1.0:
            raise ValueError(
                f"`mix={self.mix}` is outside [0, 1]. It is the weight of the local parameters at"
                " a landing: 0 takes the global ones, 1 ignores them."
            )

        # a tuple: it also compares what cannot be hashed
        if self.wire_dtype not in tuple(CODECS) and not isinstance(self.wire_dtype, Codec):
            raise ValueError(
                f"`wire_dtype={self.wire_dtype!r}` is unknown. Choose one of"
                f" {', '.join(map(repr, CODECS))}, or pass a codec of your own"
                " (`lightning_commfree.diloco.codec.Codec`)."
            )

        if not callable(self.outer_optimizer):
            raise TypeError(
                "`outer_optimizer` must be a factory that takes a list of parameters, like"
                " `functools.partial(torch.optim.SGD, lr=0.4)`, but it is a"
                f" {type(self.outer_optimizer).__name__}."
            )

    def _check_replicas(self) -> None:
        if self.replica_size < 1:
            raise ValueError(
                f"`replica_size={self.replica_size}` must be at least 1: it counts the ranks of"
                " one replica."
            )

        if self.nonfinite not in NONFINITE:
            raise ValueError(
                f"`nonfinite={self.nonfinite!r}` is unknown. Choose one of"
                f" {', '.join(map(repr, NONFINITE))}."
            )

        if self.evaluate not in ("outer", "mean"):
            raise ValueError(
                f"`evaluate={self.evaluate!r}` is unknown. Choose 'outer', the outer weights, or"
                " 'mean', the mean of the replicas' local weights."
            )

        if self.outer_device not in (None, "cpu"):
            raise ValueError(
                f"`outer_device={self.outer_device!r}` is unknown. Choose 'cpu', host memory, or"
                " None, where the parameters are."
            )

        if self.check_drift_every < 0:
            raise ValueError(
                f"`check_drift_every={self.check_drift_every}` must be 0 (never) or more: it counts"
                " the cycles from one comparison of the global copies to the next."
            )
