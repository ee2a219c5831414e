"""Simulation of M replicas of Streaming DiLoCo in one process, with all ways to end a fit.

The replicas' messages depend on their weights only, so the loss after a last round needs no real
communication. Fragments, schedule, global copies and wire formats are the library's; the mean is
computed here, with the same arithmetic as the library's exchange.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any, cast

import lightning.pytorch as pl
import torch
from hydra.utils import instantiate
from lightning.pytorch.utilities.types import LRSchedulerConfigType
from torch import Tensor, nn

from benchmarks.common.pretraining import Config, batches
from lightning_commfree.diloco import (
    CODECS,
    Codec,
    DiLoCoSettings,
    OuterFragment,
    Schedule,
    split_into_fragments,
)
from lightning_commfree.diloco.codec import codec_of, decode_all
from recipes.training.evaluation import token_loss
from recipes.training.language_model import LanguageModel
from recipes.training.pretraining import build_data, build_module

LAST_ROUNDS = ("mean", "mean_fp32", "outer")


class SimulatedDiLoCo:
    """`StreamingDiLoCo` on M replicas at once.

    Args:
        modules: one per replica, with equal weights. A fragment needs at least three blocks of 256
            values per replica; for smaller fragments the library gathers instead of exchanging by
            shards.
        settings: of `StreamingDiLoCo`, with one rank per replica.
    """

    def __init__(self, modules: Sequence[nn.Module], settings: DiLoCoSettings) -> None:
        assert settings.replica_size == 1, "the simulation has one module per replica"
        fragments = split_into_fragments(
            modules[0], settings.num_fragments, settings.fragment_pattern
        )
        self.schedule = Schedule(settings.sync_every, len(fragments), int(settings.overlap_steps))
        self.step = 0
        self._mix, self._wire = settings.mix, codec_of(settings.wire_dtype)
        self._fragments = [
            [OuterFragment(module, fragment, settings.outer_optimizer) for module in modules]
            for fragment in fragments
        ]
        self._in_flight: dict[int, Tensor] = {}  # mean outer gradient by fragment

    @torch.no_grad()
    def after_steps(self) -> None:
        """Count an inner step of all replicas; launch and land the fragments that are due."""
        self.step += 1
        for p in self.schedule.launched_at(self.step):
            self._in_flight[p] = self._mean(p, self._wire)
        for p in self.schedule.landed_at(self.step):
            self._land(p, self._mix)

    @torch.no_grad()
    def last_rounds(self) -> Iterator[str]:
        """Land all fragments, then yield each way to end while the first module has its result.

        "mean": the mean of the replicas' local weights, with their differences from the global copy
        sent in the wire format; "mean_fp32": the same in fp32; "outer": an outer step, whose result
        replaces the local weights.
        """
        for p in list(self._in_flight):
            self._land(p, self._mix)
        every = range(len(self._fragments))
        means = {
            "mean": [self._mean(p, self._wire) for p in every],
            "mean_fp32": [self._mean(p, CODECS["fp32"]) for p in every],
        }
        firsts = [replicas[0] for replicas in self._fragments]
        copies = [first.global_copy.clone() for first in firsts]
        for name, of_fragments in means.items():
            for first, copy, mean in zip(firsts, copies, of_fragments, strict=True):
                first.global_copy.copy_(copy - mean)
                first.merge(mix=0.0)
            yield name
        for first, copy, mean in zip(firsts, copies, means["mean"], strict=True):
            first.global_copy.copy_(copy)
            first.outer_step(mean)
            first.merge(mix=0.0)
        yield "outer"

    def _mean(self, p: int, wire: Codec) -> Tensor:
        """Return the mean outer gradient, summed in replica order after a trip over the wire."""
        total: Tensor | None = None
        for replica in self._fragments[p]:
            received = _received(wire, replica.outer_gradient())
            total = received + 0.0 if total is None else total.add_(received)
        assert total is not None
        mean = total / len(self._fragments[p])
        by_shards = len(self._fragments[p]) > 2  # the owner of a shard encodes the mean again
        return _received(wire, mean) if by_shards else mean

    def _land(self, p: int, mix: float) -> None:
        mean = self._in_flight.pop(p)
        for replica in self._fragments[p]:
            replica.outer_step(mean)
            replica.merge(mix)


def _received(wire: Codec, values: Tensor) -> Tensor:
    """Encode and decode values in a wire format."""
    payload = torch.empty(wire.num_bytes(values.numel()), dtype=torch.uint8)
    wire.encode(values, payload)
    return decode_all(wire, payload, torch.empty_like(values))


def train(config: Config) -> dict[str, float]:
    """Train from a seed; return the validation loss in nats per token after each last round.

    Args:
        config: of `recipes.pretrain`, with one device per replica and the global batch. Of the
            Trainer, only `max_steps`, `devices` and `gradient_clip_val` are used.

    Raises:
        FloatingPointError: the run has diverged.
    """
    pl.seed_everything(config["seed"], workers=True, verbose=False)
    data = build_data(config)
    module = build_module(config, data)
    modules = [module, *(deepcopy(module) for _ in range(config["trainer"]["devices"] - 1))]
    made = [module.configure_optimizers() for module in modules]
    settings = instantiate(config["strategy"], _convert_="all").settings
    diloco = SimulatedDiLoCo(modules, settings)
    trainer = config["trainer"]
    for batch in batches(data, trainer["max_steps"]):
        take_steps(modules, made, batch, trainer["gradient_clip_val"])
        diloco.after_steps()
    losses = {}
    for name in diloco.last_rounds():
        losses[name] = token_loss(module, data.val_dataloader())
        if not math.isfinite(losses[name]):
            raise FloatingPointError(f"The validation loss after {name!r} is {losses[name]}.")
    return losses


def take_steps(
    modules: Sequence[LanguageModel], made: Sequence[Any], batch: Tensor, clip: float | None
) -> None:
    """Take an inner step on every replica.

    Args:
        modules: one per replica.
        made: their optimizers and schedules, as returned by `configure_optimizers`.
        batch: int64, shape (blocks of all replicas, block_size + 1). Replica m takes blocks m,
            m + M, and so on, like `DistributedSampler`.
        clip: largest norm of a replica's gradient; None: no clipping.
    """
    assert len(batch) % len(modules) == 0, "all replicas need batches of the same size"
    for m, (module, of_module) in enumerate(zip(modules, made, strict=True)):
        optimizer = of_module["optimizer"]
        optimizer.zero_grad()
        module.loss(batch[m :: len(modules)]).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        cast(LRSchedulerConfigType, of_module["lr_scheduler"])["scheduler"].step()
