"""Eager updates against a twin in one process, and at their boundary."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_commfree.diloco import DiLoCoSettings, EagerDiLoCo, split_into_fragments
from tests.diloco.training import (
    ADAMW,
    DEFAULTS,
    NESTEROV,
    Net,
    alone,
    backward,
    start,
    state_of,
    through,
    world,
)
from tests.world import run_ranks

H = 4
STEPS = 14
SETTINGS: dict[str, Any] = {"sync_every": H, "num_fragments": 2, "overlap_steps": "eager"}


def start_eager(module: Net, channel: Any, **changes: Any) -> EagerDiLoCo:
    settings = DiLoCoSettings(**{**DEFAULTS, **SETTINGS, **changes})
    fragments = split_into_fragments(module, settings.num_fragments, settings.fragment_pattern)
    return EagerDiLoCo(module, fragments, settings, channel)


def train(
    rank: int, size: int, mix: float, stop_at: int | None = None, wire_dtype: str = "fp32"
) -> Any:
    """Train; with `stop_at` go on from there with a new object and the state of the old one."""
    module = Net()
    channel = world(rank, size)
    diloco = start_eager(module, channel, mix=mix, wire_dtype=wire_dtype)
    optimizer = ADAMW(module.parameters())
    states = []
    for step in range(1, STEPS + 1):
        backward(module, rank, step)
        optimizer.step()
        diloco.after_step()
        states.append(state_of(module))
        if step == stop_at:
            state = deepcopy(diloco.state_dict())
            diloco = start_eager(module, channel, mix=mix, wire_dtype=wire_dtype)
            diloco.load_state_dict(*state)
    diloco.finish()
    states.append(state_of(module))
    return states, [list(f.parameters) for f in split_into_fragments(module, 2, "strided")]


def twin(  # noqa: C901 - a twin reads top to bottom
    size: int, mix: float, fragments: list[list[str]], wire_dtype: str = "fp32"
) -> list[list[dict[str, Tensor]]]:
    modules = [Net() for _ in range(size)]
    inner = [ADAMW(module.parameters()) for module in modules]
    outer = [
        {n: torch.nn.Parameter(p.detach().clone()) for n, p in state_of(m).items()} for m in modules
    ]
    steppers = [[NESTEROV([copies[n] for n in f]) for f in fragments] for copies in outer]
    before: dict[tuple[int, str], Tensor] = {}  # by replica and name: what it sent last
    states: list[list[dict[str, Tensor]]] = [[] for _ in modules]

    def deltas(names: list[str]) -> dict[str, list[Tensor]]:
        return {
            n: [(outer[m][n] - modules[m].get_parameter(n)).detach() for m in range(size)]
            for n in names
        }

    def received(now: dict[str, list[Tensor]]) -> dict[str, list[Tensor]]:
        """What everybody decodes: a fragment is encoded as one vector."""
        flat = [torch.cat([now[n][m].flatten() for n in now]) for m in range(size)]
        sizes = [now[n][0].numel() for n in now]
        parts = [through(wire_dtype)(values).split(sizes) for values in flat]
        return {n: [parts[m][i].view_as(now[n][m]) for m in range(size)] for i, n in enumerate(now)}

    @torch.no_grad()
    def step_outer(m: int, p: int, gradients: dict[str, Tensor], weight: float) -> None:
        for name in fragments[p]:
            outer[m][name].grad = gradients[name]
        steppers[m][p].step()
        for name in fragments[p]:
            modules[m].get_parameter(name).lerp_(outer[m][name], 1.0 - weight)

    def others_before(m: int, name: str) -> Tensor | float:
        if (0, name) not in before:
            return 0.0
        return sum(before[k, name] for k in range(size) if k != m) / size

    for step in range(1, STEPS + 1):
        for m in range(size):
            backward(modules[m], m, step)
            inner[m].step()
        for p, names in enumerate(fragments):
            since = step - p * H // 2
            if since >= H and since % H == 0:
                now = received(deltas(names))  # one's own part, too, is what others decode
                for m in range(size):
                    step_outer(
                        m, p, {n: now[n][m] / size + others_before(m, n) for n in names}, mix
                    )
                before.update({(m, n): now[n][m] for n in names for m in range(size)})
        for m in range(size):
            states[m].append(state_of(modules[m]))
    for p, names in enumerate(fragments):
        for m in range(size):
            if (0, names[0]) in before:
                step_outer(m, p, {n: others_before(m, n) for n in names}, mix)
        for name in names:
            average = sum(module.get_parameter(name).detach() for module in modules) / size
            for module in modules:
                with torch.no_grad():
                    module.get_parameter(name).copy_(average)
    for m in range(size):
        states[m].append(state_of(modules[m]))
    return states


@pytest.mark.parametrize(
    ("size", "mix", "wire_dtype"),
    [(2, 0.0, "fp32"), (2, 0.5, "fp4"), (3, 0.0, "int8"), (3, 0.5, "fp32")],
)
def test_equals_the_twin(size: int, mix: float, wire_dtype: str, tmp_path: Path) -> None:
    """To rounding: the others' part is a mean minus one's own here, a sum without it there."""
    ranks = run_ranks(train, size, tmp_path, mix, None, wire_dtype)
    fragments = ranks[0][1]
    expected = twin(size, mix, fragments, wire_dtype)
    for rank in range(size):
        for got, state in zip(ranks[rank][0], expected[rank], strict=True):
            for name in state:
                torch.testing.assert_close(got[name], state[name], rtol=2e-4, atol=2e-5)
        for name, tensor in ranks[0][0][-1].items():
            assert torch.equal(ranks[rank][0][-1][name], tensor), "all ranks end with the same"
    other = twin(
        size, 1.0, fragments, wire_dtype
    )  # the likely mistake, a wrong mix, is far outside
    assert (other[0][-2]["head.weight"] - expected[0][-2]["head.weight"]).abs().max() > 2e-3


def test_going_on_from_a_state_in_mid_flight_is_exact(tmp_path: Path) -> None:
    straight = run_ranks(train, 2, tmp_path, 0.5)
    resumed = run_ranks(train, 2, tmp_path, 0.5, 9)
    for one, other in zip(straight, resumed, strict=True):
        for a, b in zip(one[0], other[0], strict=True):
            assert all(torch.equal(a[name], b[name]) for name in a)


def test_one_replica_is_diloco_without_delay() -> None:
    modules = [Net(), Net()]
    eager = start_eager(modules[0], alone())
    plain = start(modules[1], alone(), **{**SETTINGS, "overlap_steps": 0})
    optimizers = [ADAMW(module.parameters()) for module in modules]
    for step in range(1, STEPS + 1):
        for module, optimizer, diloco in zip(modules, optimizers, (eager, plain), strict=True):
            backward(module, 0, step)
            optimizer.step()
            diloco.after_step()
        for name, tensor in state_of(modules[1]).items():
            torch.testing.assert_close(modules[0].get_parameter(name), tensor, rtol=1e-5, atol=1e-6)


def test_it_is_made_by_the_settings() -> None:
    assert DiLoCoSettings(**{**DEFAULTS, **SETTINGS}).eager
    assert not DiLoCoSettings(**DEFAULTS).eager
