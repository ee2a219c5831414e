"""Detect ranks whose weights should be identical but have drifted apart.

The check is independent of what the algorithm communicates, so it also detects an optimizer or hook
that bypasses the strategy.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_commfree.comm.channel import Channel
from lightning_commfree.comm.digest import digest
from lightning_commfree.comm.liveness import AgreedError
from lightning_commfree.fit.fit import Fit
from lightning_commfree.fit.session import FitSession
from lightning_commfree.model.replication import digests_of_all
from lightning_commfree.model.shards import is_shard

TAG = "drift"
_NAMED = 3  # maximum number of parameters to name in an error


class DriftCheck:
    """Compares hashes of the trained parameters across ranks at regular intervals.

    `channel` connects the ranks whose weights must be equal. If these are all ranks, each shard is
    also compared with the same shard in the other replicas.
    """

    def __init__(self, fit: Fit, session: FitSession[Any], every: int, channel: Channel) -> None:
        self._fit, self._session = fit, session
        self._every, self._channel = every, channel  # optimizer steps between checks, from 1
        self._period, self._missed = -1, 0  # values at the latest check

    def before_step(self) -> None:
        """If a check is due, compare weights across ranks, and raise if they differ; collective.

        The error is an `AgreedError`, on all ranks that compare these weights.
        """
        step = self._fit.trainer.global_step
        if step // self._every == self._period:
            return
        self._period = step // self._every
        # number of steps that bypassed the strategy, in which the algorithm compared nothing
        missed, self._missed = self._missed, step - self._session.clock.steps
        if self._session.exchanges_every_step and missed == self._missed:
            return
        self.compare()

    def compare(self) -> None:
        """Compare weights across ranks; collective. Raises the error of `before_step`."""
        step = self._fit.trainer.global_step
        groups = [group for one in self._fit.optimizers() for group in one.param_groups]
        # frozen ones too: only some ranks may have frozen them, and all must compare as many
        trained = {p for group in groups for p in group["params"]}
        found: dict[bool, dict[str, nn.Parameter]] = {False: {}, True: {}}
        for name, p in self._fit.module.named_parameters():
            if p in trained:
                found[is_shard(p)][name] = p
        _compare(self._channel, found[False], step)
        channels = self._fit.channels
        if self._channel is channels.world:
            _compare(channels.between, found[True], step)


def _compare(channel: Channel, parameters: dict[str, nn.Parameter], step: int) -> None:
    """Raise an `AgreedError` if parameters differ between the ranks of a channel; collective."""
    if channel.size == 1 or not parameters:
        return
    digests = digests_of_all(channel, list(parameters.values()), TAG, digest)
    differ = digests != digests[0]
    names = [name for name, one in zip(parameters, differ.any(0).tolist(), strict=True) if one]
    if not names:
        return
    ranks = [channel.ranks[place] for place, one in enumerate(differ.any(1).tolist()) if one]
    plural = "s" if len(ranks) > 1 else ""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    raise AgreedError(
        f"Weights that must be equal on ranks {_comma_separated(channel.ranks)} differ before step"
        f" {step + 1}: {', '.join(map(repr, names[:_NAMED]))}{more} (on rank{plural}"
        f" {_comma_separated(ranks)}, compared with rank {channel.ranks[0]}). Some code changes"
        " weights or gradients on only some ranks: a hook that writes to them, an optimizer that"
        " steps without the strategy, or gradients clipped by the norm of a rank's shards (use"
        " `gradient_clip_val`, or `strategy.grad_norm()`). Resume from a checkpoint saved before"
        " the weights diverged."
    )


def _comma_separated(ranks: object) -> str:
    return ", ".join(map(str, ranks))  # type: ignore[call-overload]
