"""Averaged buffers travel as they are: statistics of BatchNorm stay statistics on every wire."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_commfree.comm.exchange import View
from lightning_commfree.diloco import (
    CODECS,
    DiLoCoSettings,
    Fragment,
    OuterFragment,
    StreamingDiLoCo,
    split_into_fragments,
)
from lightning_commfree.diloco.exchange import cheaper_exchange
from lightning_commfree.diloco.transport import FixedTransport
from tests.diloco.training import DEFAULTS, NESTEROV, alone, world
from tests.world import run_ranks

H = 4
LAST = 3 * H + 2  # nothing lands after the last step but one
CHANNELS = 256  # enough for shards at three replicas


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.wide = nn.Linear(64, CHANNELS)
        self.norm = nn.BatchNorm1d(CHANNELS)


def variances(replica: int, step: int) -> Tensor:
    """From 1e-6 to 1: a difference to the initial 1.0, rounded to a power of two, would give 0."""
    generator = torch.Generator().manual_seed(10 * step + replica)
    return 10 ** (-6 * torch.rand(CHANNELS, generator=generator))


def mean_of_variances(size: int, step: int) -> Tensor:
    mean = torch.zeros(CHANNELS)
    for replica in range(size):
        mean += variances(replica, step)
    return mean / size


def train(rank: int, size: int, wire_dtype: str) -> Any:
    module = Normed()
    changes = {"sync_every": H, "num_fragments": 1, "wire_dtype": wire_dtype}
    settings = DiLoCoSettings(**{**DEFAULTS, **changes, "overlap_steps": 1})
    channel = world(rank, size)
    fragments = split_into_fragments(module, 1, "strided")
    diloco = StreamingDiLoCo(module, fragments, settings, FixedTransport(channel))
    seen = []
    for step in range(1, LAST + 1):
        with torch.no_grad():
            module.wide.weight.add_(torch.randn_like(module.wide.weight), alpha=0.01 * (1 + rank))
            module.norm.running_var.copy_(variances(rank, step))
        diloco.after_step()
        with diloco.weight_swap.outer_weights():
            seen.append(module.norm.running_var.clone())
        local = module.norm.running_var.clone()
        seen[-1] = seen[-1], local
    diloco.finish()
    seen.append((module.norm.running_var.clone(), module.wide.weight.detach().clone()))
    way = diloco.transport.exchange(0).route.two_phase
    diloco.close()
    channel.close()
    return way, seen


@pytest.mark.parametrize(
    ("size", "two_phase", "wire_dtype"), [(2, False, "int8"), (3, True, "fp4"), (3, True, "fp32")]
)
def test_the_outer_statistics_are_the_replicas_mean(
    wire_dtype: str, size: int, two_phase: bool, tmp_path: Path
) -> None:
    for rank, (got_way, seen) in enumerate(run_ranks(train, size, tmp_path, wire_dtype)):
        assert got_way is two_phase
        for step, (outer, local) in enumerate(seen[:-1], 1):
            launched = (step - 1) // H * H  # what has landed left one step before
            expected = mean_of_variances(size, launched) if launched else torch.ones(CHANNELS)
            assert torch.equal(outer, expected), (rank, step)
            merged = torch.lerp(variances(rank, step), expected, 0.5)
            landed_now = launched and step == launched + 1
            assert torch.equal(local, merged if landed_now else variances(rank, step))
        assert torch.equal(seen[-1][0], mean_of_variances(size, LAST))


def test_the_mean_of_equal_buffers_is_exact(tmp_path: Path) -> None:
    """A third of three times 0.1 is not 0.1 in fp32, and -inf less itself is no number."""
    for values in run_ranks(average_constants, 3, tmp_path):
        assert torch.equal(values, torch.tensor([0.1, -torch.inf, 1e-42, 0.7]))


def average_constants(rank: int, size: int) -> Tensor:
    module = nn.Linear(300, 300)
    module.register_buffer("table", torch.tensor([0.1, -torch.inf, 1e-42, 0.7]))
    changes = {"sync_every": 2, "overlap_steps": 0, "wire_dtype": "fp4", "mix": 0.0}
    settings = DiLoCoSettings(**{**DEFAULTS, **changes})
    channel = world(rank, size)
    diloco = StreamingDiLoCo(
        module, split_into_fragments(module, 1, "strided"), settings, FixedTransport(channel)
    )
    for _ in range(6):
        diloco.after_step()
    diloco.close()
    channel.close()
    return module.table


def test_buffers_cost_four_bytes_each_and_models_without_them_nothing() -> None:
    channel = alone()
    for size in (2, 8):
        channel.size = size  # the formulas ask for nothing else
        for name, wire in CODECS.items():
            place = View.of(channel), wire, 100_000
            without, with_some = cheaper_exchange(*place), cheaper_exchange(*place, 2 * 512)
            assert with_some.route == without.route
            # gathered, or in shards that go up and come down
            often = 2 * (size - 1) / size if without.route.two_phase else size - 1
            assert with_some.num_bytes - without.num_bytes == pytest.approx(
                4 * 1024 * often, abs=16 * size
            ), (size, name)
            assert without.route.two_phase == (size == 8)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_shard_has_no_parameter_steps_nothing(rank: int) -> None:
    """One value for two ranks, and a layer whose second half are buffers."""
    channel = alone()
    channel.size, channel.rank = 2, rank
    module = nn.BatchNorm1d(4)
    module.register_parameter("scale", nn.Parameter(torch.ones(1)))
    for fragment, parameters in (
        (Fragment(("scale",)), [1, 0]),
        (Fragment(("weight", "bias"), ("running_mean", "running_var")), [8, 0]),
    ):
        outer = OuterFragment(module, fragment, NESTEROV, channel)
        held = sum(p.numel() for group in outer.optimizer.param_groups for p in group["params"])
        assert held == parameters[rank]
        if fragment.buffers:
            assert outer.parameter_numel == parameters[rank]
        left = outer.outer_gradient()
        outer.outer_step(left)
        outer.average_buffers(left)
        assert outer.local_equals_shared()
        outer.load_state_dict(outer.state_dict())
