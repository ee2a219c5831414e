"""The planner: steps played by hand and as an explicit graph, identities, and what is sent."""

from __future__ import annotations

import ast
import math
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_commfree import planner
from lightning_commfree.comm.ledger import ring_all_reduce_bytes
from lightning_commfree.diloco import WIRE_FORMATS, Schedule, split_into_fragments
from lightning_commfree.diloco.exchange import cheaper_exchange
from lightning_commfree.planner import (
    Exchange,
    Job,
    Message,
    Model,
    advise,
    all_reduce_bytes,
    build_exchange,
    exchange_bytes,
    log_grid,
    methods,
    needed_bandwidth,
    payload_bytes,
    utilization,
)

GB = 1e9
GB_PER_S = 8.0  # Gbit/s: a message of n GB is n seconds on the link
# Two layers, played by hand: forward of layer 0 in second 0-1, of layer 1 in 1-2; gradients of
# layer 1 in 2-4, of layer 0 in 4-6.
TWO_LAYERS = [3.0, 3.0]
MODEL = Model((1_000_000,) * 6, 500_000)
JOB = Job(MODEL, step_seconds=0.1)
BANDWIDTHS = log_grid(1e-4, 1e4, 33)


@pytest.mark.parametrize(
    ("sizes", "seconds"),
    [
        ((1, 1), 7),  # layer 1's on the link 4-5, layer 0's 6-7, for which its forward waits
        ((1, 2), 7),  # 4-6, 6-7
        ((1, 4), 9),  # 4-8, so layer 0's has to wait: 8-9
        ((0, 3), 6),  # 4-7, and layer 1's forward begins at 7 anyway
        ((0, 4), 7),  # 4-8: the forward of layer 0 runs 6-7, that of layer 1 waits
        ((0, 0), 6),
    ],
)
def test_data_parallel_by_hand(sizes, seconds) -> None:
    messages = tuple(Message(i, i, size * GB) for i, size in enumerate(sizes))
    found = utilization(TWO_LAYERS, Exchange(1, 0, (messages,)), GB_PER_S)
    assert found == pytest.approx(6 / seconds)


@pytest.mark.parametrize(
    ("overlap_steps", "seconds"),
    [
        (0, 20),  # fragment 0 on the link 6-14 while all wait, fragment 1 in 18-19
        (1, 14),  # 6-14, awaited at 12; fragment 1 in 14-15, awaited after 20
    ],
)
def test_two_fragments_by_hand(overlap_steps, seconds) -> None:
    fragments = ((Message(0, 0, 8 * GB),), (Message(1, 1, 1 * GB),))
    found = utilization(TWO_LAYERS, Exchange(2, overlap_steps, fragments), GB_PER_S)
    assert found == pytest.approx(12 / seconds)


def by_explicit_graph(layer_s: list[float], exchange: Exchange, gbit_per_s: float) -> float:
    """Longest path through the graph of many cycles; the twin of `utilization`."""
    layers, count, period = len(layer_s), exchange.sync_every, 12

    def sent_in(step: int) -> list[Message]:
        due = [p for p in range(len(exchange.fragments)) if exchange.offset(p) == step % count]
        messages = [m for p in due for m in exchange.fragments[p] if m.num_bytes]
        return sorted(messages, key=lambda message: -message.leaves_after)

    @cache
    def sends(step: int) -> tuple[tuple[int, float], ...]:
        """What is needed by which layer, and when it arrives; the link's end stands last."""
        free = sends(step - 1)[-1][1] if step else 0.0
        arrivals = []
        for message in sent_in(step):
            free = max(free, done(step, "parameters", message.leaves_after))
            free += message.num_bytes * 8e-9 / gbit_per_s
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
    message = st.builds(Message, st.integers(0, 1), st.integers(0, 1), sizes)
    fragment = st.lists(message, min_size=1, max_size=3).map(tuple)
    fragments = draw(st.lists(fragment, min_size=1, max_size=4).map(tuple))
    return Exchange(sync_every, draw(st.integers(0, sync_every - 1)), fragments)


@settings(max_examples=150, deadline=None)
@given(exchanges(), st.sampled_from([1.0, 3.0, 8.0, 20.0, 100.0]))
def test_it_is_the_longest_path_through_the_graph(exchange, gbit_per_s) -> None:
    found = utilization([1.0, 2.0], exchange, gbit_per_s)
    expected = by_explicit_graph([1.0, 2.0], exchange, gbit_per_s)
    assert found == pytest.approx(expected, rel=1e-9)


# Boundary identities


@pytest.mark.parametrize("method", methods(JOB), ids=lambda method: method.name)
def test_from_no_bandwidth_to_infinite_bandwidth(method) -> None:
    curve = [JOB.utilization(method.exchange, gbit) for gbit in [1e-9, *BANDWIDTHS, math.inf]]
    assert curve[0] < 1e-6
    assert curve[-1] == 1.0
    assert all(slow <= fast + 1e-12 for slow, fast in zip(curve, curve[1:], strict=False))


@pytest.mark.parametrize("by_layer", [True, False])
@pytest.mark.parametrize("gbit_per_s", BANDWIDTHS)
def test_each_method_is_at_least_as_good_as_the_one_before(by_layer, gbit_per_s) -> None:
    def built(wire, num_fragments, overlap_steps):
        return build_exchange(
            MODEL,
            lambda numel: exchange_bytes(payload_bytes(numel, wire), 2),
            sync_every=100,
            num_fragments=num_fragments,
            overlap_steps=overlap_steps,
            by_layer=by_layer,
        )

    diloco, streaming = built("fp32", 1, 0), built("fp32", 3, 0)
    overlap, fp4 = built("fp32", 3, 1), built("fp4", 3, 1)
    chain = [JOB.data_parallel(), diloco, streaming, overlap, fp4]
    found = [JOB.utilization(exchange, gbit_per_s) for exchange in chain]
    assert all(a <= b + 1e-12 for a, b in zip(found, found[1:], strict=False))


@pytest.mark.parametrize("gbit_per_s", [0.001, 0.1, 10.0])
def test_one_fragment_without_overlap_is_diloco(gbit_per_s) -> None:
    _, diloco, *_ = methods(JOB)
    assert JOB.diloco(1, 0, "fp32") == diloco.exchange
    compute_s = 100 * 0.1
    blocking_s = 4 * MODEL.params * 8e-9 / gbit_per_s
    expected = compute_s / (compute_s + blocking_s)
    assert JOB.utilization(diloco.exchange, gbit_per_s) == pytest.approx(expected)
    streaming = JOB.diloco(3, 0, "fp32")
    assert JOB.utilization(streaming, gbit_per_s) == pytest.approx(expected)


def test_one_replica_sends_nothing() -> None:
    job = replace(JOB, num_replicas=1)
    for _, _, exchange in methods(job):
        assert exchange.bytes_per_cycle == 0
        assert job.utilization(exchange, 1e-9) == 1.0
        assert job.needed_gbit_per_s(exchange, 0.99) == 0.0


def test_a_link_that_is_hardly_too_slow_is_too_slow() -> None:
    """Nobody waits in the first cycles; the backlog grows by a thousandth of a cycle in each."""
    fragments = ((Message(0, 0, 60.06 * GB),), (Message(0, 0, 60.06 * GB),))
    exchange = Exchange(20, 19, fragments)  # a cycle computes for 120 s
    assert utilization(TWO_LAYERS, exchange, GB_PER_S) == pytest.approx(120 / 120.12)


def test_a_longer_overlap_hides_more() -> None:
    found = [JOB.utilization(JOB.diloco(3, tau, "fp32"), 0.5) for tau in range(4)]
    assert found == sorted(found)
    assert found[0] < found[1] < 1.0 == found[3]


# What a target needs


def test_the_bandwidth_that_a_target_needs_is_the_least_that_reaches_it() -> None:
    for _, _, exchange in methods(JOB):
        needed = JOB.needed_gbit_per_s(exchange, 0.9)
        assert JOB.utilization(exchange, needed) >= 0.9 > JOB.utilization(exchange, needed / 1.024)


def test_the_grid_has_equal_ratios() -> None:
    grid = log_grid(0.1, 1000, 50)
    assert (len(grid), grid[0], grid[-1]) == (50, 0.1, pytest.approx(1000))
    ratios = [b / a for a, b in zip(grid, grid[1:], strict=False)]
    assert ratios == pytest.approx([10 ** (4 / 49)] * 49)


def test_the_ends_of_a_grid() -> None:
    seconds, exchange = MODEL.layer_seconds(0.1), JOB.data_parallel()
    assert needed_bandwidth(seconds, exchange, 0.5, [1e-9, 1e-8]) == 2
    assert needed_bandwidth(seconds, exchange, 0.5, [1e8, 1e9]) == 0


# The planner foretells what the library does


@pytest.mark.parametrize("wire", WIRE_FORMATS)
def test_payloads_are_those_of_the_wire_formats(wire) -> None:
    for numel in (1, 2, 255, 256, 257, 1_000_001):
        assert payload_bytes(numel, wire) == WIRE_FORMATS[wire].num_bytes(numel)


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4, 8])
def test_what_is_sent_is_what_the_ledger_counts(num_replicas) -> None:
    reduced = all_reduce_bytes(1_000_000, num_replicas)
    assert math.floor(reduced) == ring_all_reduce_bytes(1_000_000, num_replicas)
    channel = SimpleNamespace(size=num_replicas)
    for wire, wire_format in WIRE_FORMATS.items():
        real = cheaper_exchange(channel, None, wire_format, 4_000_000).num_bytes
        foretold = exchange_bytes(payload_bytes(4_000_000, wire), num_replicas)
        # headers and padding; the other way of exchanging would send half as much more at least
        assert foretold <= real <= 1.005 * foretold


class Blocks(nn.Module):
    def __init__(self, count: int, with_rest: bool) -> None:
        super().__init__()
        if with_rest:
            self.embedding = nn.Embedding(7, 5)
        self.blocks = nn.ModuleList(nn.Linear(5, 3 + i) for i in range(count))


@pytest.mark.parametrize("with_rest", [True, False])
@pytest.mark.parametrize("count", [2, 5, 9])
def test_fragments_are_those_of_the_library(count, with_rest) -> None:
    module = Blocks(count, with_rest)
    sizes = {name: p.numel() for name, p in module.named_parameters()}
    blocks = tuple(sum(p.numel() for p in block.parameters()) for block in module.blocks)
    model = Model(blocks, sum(sizes.values()) - sum(blocks))
    for num_fragments in (None, *range(1, count + with_rest + 1)):
        theirs = split_into_fragments(module, num_fragments, "strided")
        ours = model.fragments(
            model.default_num_fragments if num_fragments is None else num_fragments
        )
        assert [sum(map(model.layer_params, layers)) for layers in ours] == [
            sum(sizes[name] for name in fragment.parameters) for fragment in theirs
        ]


def test_fragments_leave_when_the_schedule_says() -> None:
    for sync_every, count in ((100, 9), (7, 3), (3, 5)):
        exchange = Exchange(sync_every, 0, ((),) * count)
        schedule = Schedule(sync_every, count, 0)
        assert [exchange.offset(p) for p in range(count)] == [
            schedule.offset(p) for p in range(count)
        ]


def test_the_planner_needs_the_standard_library_only() -> None:
    imported = set()
    for file in Path(planner.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                imported.add(node.module)
            elif isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
    own = {name for name in imported if name.startswith("lightning_commfree.planner.")}
    assert own
    assert {name.partition(".")[0] for name in imported - own} <= sys.stdlib_module_names


# Advice


def test_a_fast_link_needs_neither_overlap_nor_another_p() -> None:
    advice = advise(JOB, 1000.0, 0.95)
    assert advice.reaches_target
    assert (advice.sync_every, advice.num_fragments, advice.overlap_steps) == (100, 3, 0)


@pytest.mark.parametrize("gbit_per_s", [0.006, 0.01, 0.03, 0.1])
def test_the_advice_holds_what_it_promises_with_the_shortest_delay(gbit_per_s) -> None:
    advice = advise(JOB, gbit_per_s, 0.95)
    job = replace(JOB, sync_every=advice.sync_every)
    exchange = job.diloco(advice.num_fragments, advice.overlap_steps, "fp4")
    assert job.utilization(exchange, gbit_per_s) == advice.utilization >= 0.95
    for tau in range(advice.overlap_steps):
        for count in range(1, 8):
            assert job.utilization(job.diloco(count, tau, "fp4"), gbit_per_s) < 0.95


def test_a_longer_cycle_is_advised_where_nothing_else_does_and_no_longer_than_it_must_be() -> None:
    advice = advise(JOB, 0.006, 0.95)
    assert advice.reaches_target
    assert 100 < advice.sync_every <= 300
    shorter = replace(JOB, sync_every=advice.sync_every - 1)
    assert advise(shorter, 0.006, 0.95).sync_every == advice.sync_every


def test_where_nothing_reaches_the_target_the_advice_says_what_would() -> None:
    advice = advise(JOB, 1e-4, 0.95)
    assert not advice.reaches_target
    assert advice.utilization < 0.95
    assert any("No P, no overlap_steps up to 5" in reason for reason in advice.reasons)


def test_the_advice_names_what_the_coarser_wire_would_save() -> None:
    reasons = advise(replace(JOB, wire_dtype="fp32"), 0.1, 0.95).reasons
    assert reasons[-1] == "wire_dtype=fp4 would send 7.9 times fewer bytes."
    assert not any("wire_dtype" in reason for reason in advise(JOB, 0.1, 0.95).reasons)


def test_one_replica_needs_no_advice() -> None:
    advice = advise(replace(JOB, num_replicas=1), 1e-6, 0.95)
    assert (advice.utilization, advice.overlap_steps) == (1.0, 0)
    assert advice.reasons == ("One replica sends nothing, so nothing is waited for.",)


# Bad input


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"step_seconds": 0.0}, ValueError, "`step_time=0.0` must be a positive number of seconds"),
        ({"step_seconds": math.inf}, ValueError, "`step_time=inf` must be a positive number"),
        ({"step_seconds": "fast"}, TypeError, "`step_time='fast'` must be a number, but it is a s"),
        ({"num_replicas": 0}, ValueError, "`num_replicas=0` must be at least 1"),
        ({"num_replicas": 2.5}, TypeError, "`num_replicas=2.5` must be a whole number"),
        ({"sync_every": 0}, ValueError, "`sync_every=0` must be at least 1"),
        ({"overlap_steps": 100}, ValueError, "`overlap_steps=100` must be at least 0 and below"),
        ({"overlap_steps": -1}, ValueError, "`overlap_steps=-1` must be at least 0 and below"),
        ({"overlap_steps": "eager"}, TypeError, "plan them as overlap_steps=sync_every-1"),
        ({"num_fragments": 8}, ValueError, "`num_fragments=8` is not between 1 and 7: the model"),
        ({"num_fragments": 0}, ValueError, "or null for 3"),
        ({"wire_dtype": "fp5"}, ValueError, "`wire_dtype='fp5'` is unknown. Choose one of 'fp32'"),
        ({"gradient_dtype": "fp4"}, ValueError, "`gradient_dtype='fp4'` is unknown"),
    ],
)
def test_a_job_that_cannot_be(change, error, message) -> None:
    with pytest.raises(error) as raised:
        replace(JOB, **change)
    assert message in str(raised.value)


@pytest.mark.parametrize("gbit_per_s", [0.0, -1.0, math.nan])
def test_a_bandwidth_that_cannot_be(gbit_per_s) -> None:
    with pytest.raises(ValueError, match=r"`bandwidth=.*` Gbit/s must be positive"):
        JOB.utilization(JOB.data_parallel(), gbit_per_s)


@pytest.mark.parametrize("target", [0.0, 1.0, 95])
def test_a_target_that_cannot_be(target) -> None:
    with pytest.raises(ValueError, match="target utilization of .* is not strictly between 0"):
        JOB.needed_gbit_per_s(JOB.data_parallel(), target)
    with pytest.raises(ValueError, match="`advice_target=.*` must lie strictly between 0 and 1"):
        advise(JOB, 1.0, target)


@pytest.mark.parametrize(("blocks", "rest"), [((), 5), ((3, 0), 0), ((3,), -1)])
def test_a_model_that_cannot_be(blocks, rest) -> None:
    with pytest.raises(ValueError, match="a model needs at least one block"):
        Model(blocks, rest)


def test_a_payload_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="`wire_dtype='fp8'` is unknown. Choose one of 'fp32'"):
        payload_bytes(10, "fp8")
