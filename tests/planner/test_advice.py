"""The planner's advice, and the values that it refuses."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from commfree_planner import (
    Model,
    advise,
)
from commfree_planner.pace import SYNC_EVERY
from tests.planner.trainings import TRAINING

FIXABLE = ["sync_every", "overlap_steps"]


def test_a_fast_link_needs_the_shortest_cycle_and_the_defaults() -> None:
    advice = advise(TRAINING, 1000.0, 0.95)
    assert advice.reaches_target
    assert (advice.sync_every, advice.num_fragments, advice.overlap_steps) == (10, 3, 1)


@pytest.mark.parametrize("gbit_per_s", [0.006, 0.01, 0.03, 0.1])
def test_the_advice_reaches_its_utilization_with_the_smallest_h_and_tau(gbit_per_s) -> None:
    advice = advise(TRAINING, gbit_per_s, 0.95)
    training = replace(TRAINING, sync_every=advice.sync_every)
    exchange = training.diloco(advice.num_fragments, advice.overlap_steps, "fp4")
    assert training.utilization(exchange, gbit_per_s) == advice.utilization >= 0.95
    for tau in range(1, advice.overlap_steps):
        for count in range(1, 8):
            assert training.utilization(training.diloco(count, tau, "fp4"), gbit_per_s) < 0.95
    for shorter in (h for h in SYNC_EVERY if h < advice.sync_every):
        fixed = advise(replace(TRAINING, sync_every=shorter), gbit_per_s, 0.95, ["sync_every"])
        assert fixed.utilization < 0.95


@pytest.mark.parametrize("gbit_per_s", [0.001, 0.03, 1000.0])
@pytest.mark.parametrize("fixed", [["sync_every"], ["overlap_steps"], FIXABLE])
def test_the_advice_keeps_what_the_user_has_fixed(gbit_per_s, fixed) -> None:
    for given in (
        replace(TRAINING, sync_every=20, overlap_steps=10),
        replace(TRAINING, sync_every=2, overlap_steps=0, num_fragments=4),
        replace(TRAINING, sync_every=1, overlap_steps=0),
        replace(TRAINING, sync_every=500, overlap_steps=400, num_fragments=1),
    ):
        advice = advise(given, gbit_per_s, 0.95, fixed)
        for name in fixed:
            assert getattr(advice, name) == getattr(given, name)
        assert given.num_fragments in (None, advice.num_fragments)
        assert advice.overlap_steps < advice.sync_every
        assert f"your {' and '.join(fixed)}: sync_every=" in advice.lines(0.95)[0]


def test_an_unreachable_target_is_reported() -> None:
    advice = advise(TRAINING, 1e-4, 0.95)
    assert not advice.reaches_target
    assert (advice.sync_every, advice.utilization < 0.95) == (300, True)
    searched = "any num_fragments and overlap_steps up to 5 and sync_every up to 300 stays below"
    assert any(searched in reason for reason in advice.reasons)
    fixed = advise(replace(TRAINING, num_fragments=3), 1e-4, 0.95, FIXABLE)
    assert any(reason.startswith("Training stays below 95%") for reason in fixed.reasons)


def test_the_advice_names_the_savings_of_fp4() -> None:
    reasons = advise(replace(TRAINING, wire_dtype="fp32"), 0.1, 0.95).reasons
    assert reasons[-1] == "wire_dtype=fp4 sends 7.9 times fewer bytes."
    for wire in ("fp4", "int2"):
        reasons = advise(replace(TRAINING, wire_dtype=wire), 0.1, 0.95).reasons
        assert not any("wire_dtype" in reason for reason in reasons)


def test_one_replica_needs_no_advice() -> None:
    advice = advise(replace(TRAINING, num_replicas=1), 1e-6, 0.95)
    assert (advice.utilization, advice.overlap_steps) == (1.0, 1)
    assert advice.reasons == ("One replica sends nothing, so it never waits.",)


# Invalid values


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"step_seconds": 0.0}, ValueError, "`step_time=0.0` must be a positive number of seconds"),
        ({"step_seconds": "fast"}, TypeError, "`step_time='fast'` must be a number, but it is a s"),
        ({"num_replicas": 0}, ValueError, "`num_replicas=0` must be at least 1"),
        ({"num_replicas": 2.5}, TypeError, "`num_replicas=2.5` must be an integer"),
        ({"sync_every": 0}, ValueError, "`sync_every=0` must be at least 1"),
        ({"overlap_steps": 100}, ValueError, "`overlap_steps=100` must be at least 0 and below"),
        ({"overlap_steps": "eager"}, TypeError, "`overlap_steps='eager'` must be an integer"),
        ({"num_fragments": 8}, ValueError, "`num_fragments=8` is not between 1 and 7: the model"),
        ({"num_fragments": 0}, ValueError, "or null for 3"),
        (
            {"wire_dtype": "fp5"},
            ValueError,
            "`wire_dtype='fp5'` is not valid. Choose one of 'fp32'",
        ),
        ({"gradient_dtype": "fp4"}, ValueError, "`gradient_dtype='fp4'` is not valid"),
    ],
)
def test_invalid_trainings_are_refused(change, error, message) -> None:
    with pytest.raises(error) as raised:
        replace(TRAINING, **change)
    assert message in str(raised.value)


@pytest.mark.parametrize("gbit_per_s", [0.0, math.nan])
def test_invalid_bandwidths_are_refused(gbit_per_s) -> None:
    with pytest.raises(ValueError, match=r"`bandwidth=.*` Gbit/s must be positive"):
        TRAINING.utilization(TRAINING.data_parallel(), gbit_per_s)


@pytest.mark.parametrize("target", [0.0, 95])
def test_invalid_targets_are_refused(target) -> None:
    with pytest.raises(ValueError, match="target utilization of .* is not strictly between 0"):
        TRAINING.needed_gbit_per_s(TRAINING.data_parallel(), target)
    with pytest.raises(ValueError, match="`advice_target=.*` must be strictly between 0 and 1"):
        advise(TRAINING, 1.0, target)


@pytest.mark.parametrize(("blocks", "rest"), [((), 5), ((3, 0), 0), ((3,), -1)])
def test_invalid_models_are_refused(blocks, rest) -> None:
    with pytest.raises(ValueError, match="a model needs at least one block"):
        Model(blocks, rest)
