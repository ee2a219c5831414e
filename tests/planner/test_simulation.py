"""The simulation: steps by hand and as an explicit graph, identities, required bandwidths."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commfree_planner import (
    Exchange,
    Message,
    log_grid,
    methods,
    utilization,
)
from tests.planner.trainings import TRAINING

GB = 1e9
GB_PER_S = 8.0  # Gbit/s: a message of n GB is n seconds on the link
# Two layers by hand: forward of layer 0 in second 0-1, of layer 1 in 1-2; gradients of
# layer 1 in 2-4, of layer 0 in 4-6.
TWO_LAYERS = [3.0, 3.0]
BANDWIDTHS = log_grid(1e-4, 1e4, 33)


@pytest.mark.parametrize(
    ("sizes", "seconds"),
    [
        ((1, 1), 7),  # layer 1's is on the link 4-5, layer 0's 6-7, for which its forward waits
        ((1, 2), 7),  # 4-6, 6-7
        ((1, 4), 9),  # 4-8, so layer 0's waits: 8-9
        ((0, 3), 6),  # 4-7, and layer 1's forward starts at 7 anyway
        ((0, 4), 7),  # 4-8: the forward of layer 0 runs 6-7, that of layer 1 waits
        ((0, 0), 6),
    ],
)
def test_data_parallel_by_hand(sizes, seconds) -> None:
    messages = tuple(Message(i, i, size * GB) for i, size in enumerate(sizes))
    found = utilization(TWO_LAYERS, Exchange(1, 0, (messages,)), GB_PER_S)
    assert found == pytest.approx(6 / seconds)


def by_explicit_graph(layer_s: list[float], exchange: Exchange, gbit_per_s: float) -> float:
    """Longest path through the graph of many cycles, an independent version of `utilization`."""
    layers, count, period = len(layer_s), exchange.sync_every, 12

    def sent_in(step: int) -> list[Message]:
        due = [p for p in range(len(exchange.fragments)) if exchange.offset(p) == step % count]
        messages = [m for p in due for m in exchange.fragments[p] if m.link_bytes]
        return sorted(messages, key=lambda message: -message.leaves_after)

    @cache
    def sends(step: int) -> tuple[tuple[int, float], ...]:
        """Layers and arrival times of the messages; the last entry is the end of the last one."""
        free = sends(step - 1)[-1][1] if step else 0.0
        arrivals = []
        for message in sent_in(step):
            free = max(free, done(step, "parameters", message.leaves_after))
            free += message.link_bytes * 8e-9 / gbit_per_s
            arrivals.append((message.needed_by, free))
        return (*arrivals, (-1, free))

    @cache
    def done(step: int, node: str, layer: int) -> float:
        third = layer_s[layer] / 3
        if node == "parameters":
            return done(step, "activations", layer) + third
        if node == "activations" and layer == layers - 1:
            return done(step, "forward", layer) + third
        if node == "activations":
            return done(step, "parameters", layer + 1) + third
        launch = step - exchange.overlap_steps - 1
        awaited = [t for i, t in sends(launch) if i == layer] if launch >= 0 else []
        if layer:
            before = done(step, "forward", layer - 1)
        else:
            before = done(step - 1, "parameters", 0) if step else 0.0
        return max(before, *awaited, 0.0) + third

    ends = [done(step, "parameters", 0) for step in range(5 * period * count)]
    return period * count * sum(layer_s) / (ends[-1] - ends[-1 - period * count])


@st.composite
def exchanges(draw: st.DrawFn) -> Exchange:
    sync_every = draw(st.integers(1, 5))
    sizes = st.integers(0, 20).map(lambda tenths: tenths * GB / 10)
    layer, moved = st.integers(0, 1), st.none() | sizes
    message = st.builds(Message, layer, layer, sizes, moved_bytes=moved)
    fragment = st.lists(message, min_size=1, max_size=3).map(tuple)
    fragments = draw(st.lists(fragment, min_size=1, max_size=4).map(tuple))
    return Exchange(sync_every, draw(st.integers(0, sync_every - 1)), fragments)


@settings(max_examples=150, deadline=None)
@given(exchanges(), st.sampled_from([1.0, 3.0, 8.0, 20.0, 100.0]))
def test_utilization_follows_from_the_longest_path(exchange, gbit_per_s) -> None:
    found = utilization([1.0, 2.0], exchange, gbit_per_s)
    expected = by_explicit_graph([1.0, 2.0], exchange, gbit_per_s)
    assert found == pytest.approx(expected, rel=1e-9)


# Identities


@pytest.mark.parametrize("method", methods(TRAINING), ids=lambda method: method.name)
def test_from_no_bandwidth_to_infinite_bandwidth(method) -> None:
    curve = [TRAINING.utilization(method.exchange, gbit) for gbit in [1e-9, *BANDWIDTHS, math.inf]]
    assert curve[0] < 1e-6
    assert curve[-1] == 1.0
    assert all(slow <= fast + 1e-12 for slow, fast in zip(curve, curve[1:], strict=False))


def test_one_replica_sends_nothing() -> None:
    training = replace(TRAINING, num_replicas=1)
    for _, _, exchange in methods(training):
        assert exchange.bytes_per_cycle == 0
        assert training.utilization(exchange, 1e-9) == 1.0
        assert training.needed_gbit_per_s(exchange, 0.99) == 0.0


def test_a_slightly_slow_link_limits_the_cycle() -> None:
    """There is no waiting in the first cycles; the backlog grows by 0.1 % of a cycle in each."""
    fragments = ((Message(0, 0, 60.06 * GB),), (Message(0, 0, 60.06 * GB),))
    exchange = Exchange(20, 19, fragments)  # a cycle computes for 120 s
    assert utilization(TWO_LAYERS, exchange, GB_PER_S) == pytest.approx(120 / 120.12)


# Required bandwidth


def test_the_required_bandwidth_is_the_least_that_reaches_the_target() -> None:
    for _, _, exchange in methods(TRAINING):
        needed = TRAINING.needed_gbit_per_s(exchange, 0.9)
        assert (
            TRAINING.utilization(exchange, needed)
            >= 0.9
            > TRAINING.utilization(exchange, needed / 1.024)
        )
