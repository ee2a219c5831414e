"""Latency, the messages of methods other than DiLoCo, and the recommended strategy."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from commfree_planner import (
    Exchange,
    LayerSums,
    Message,
    Model,
    advise,
    choose,
    inside_bytes,
    methods,
    payload_bytes,
    utilization,
)
from commfree_planner.bytes_sent import exchange_rounds, power_sgd_floats, vote_bytes
from commfree_planner.choice import alternatives
from commfree_planner.pace import plan_auto
from commfree_planner.store import store_exchange
from lightning_commfree.comm.exchange import View
from lightning_commfree.comm.ledger import all_gather_bytes, ring_all_reduce_bytes
from lightning_commfree.lion.ballot import cheaper_ballot_exchange
from lightning_commfree.lion.vote import Majority
from tests.planner.trainings import TRAINING

MB, GB = 1e6, 1e9
MB_PER_S = 8e-3
GB_PER_S = 8.0  # Gbit/s: a message of n GB is n seconds on the link
TWO_LAYERS = [3.0, 3.0]


def named(training, name):
    return next(method.exchange for method in methods(training) if method.name == name)


# Latency


def test_latency_delays_an_awaited_message_by_hand() -> None:
    """Layer 0's message is on the link from 6 to 7 and arrives at 7.5, when its forward starts."""
    messages = (Message(1, 1, 1 * MB, rounds=2), Message(0, 0, 1 * MB, rounds=2))
    exchange = Exchange(1, 0, (messages,))
    assert utilization(TWO_LAYERS, exchange, MB_PER_S) == pytest.approx(6 / 7)
    assert utilization(TWO_LAYERS, exchange, MB_PER_S, 0.25) == pytest.approx(6 / 7.5)


def test_an_infinite_bandwidth_leaves_the_latency() -> None:
    """26 MB are 17,956 segments: windows of 10 to 2,560 in 9 round trips, then 2,897 in each."""
    training = replace(TRAINING, latency_s=0.05)
    blocking = training.diloco(1, 0, "fp32")
    round_trips = 9 + (17_956 - 5_110) / 2_897
    expected = 10 / (10 + 2 * 0.05 + 0.1 * round_trips)
    assert training.utilization(blocking, math.inf) == pytest.approx(expected, rel=1e-3)
    assert training.needed_gbit_per_s(training.data_parallel(), 0.9) == math.inf
    nearby = replace(TRAINING, latency_s=0.005)
    assert nearby.utilization(nearby.diloco(3, 1, "fp4"), math.inf) == 1.0, "a step hides it"


def test_the_work_of_a_sync_is_added_to_a_cycle() -> None:
    """Cycles of DiLoCo compute for 10 s; methods that exchange in every step have none."""
    training = replace(TRAINING, sync_seconds=2.5)
    assert training.utilization(training.diloco(3, 1, "fp4"), math.inf) == pytest.approx(0.8)
    assert training.utilization(training.data_parallel(), math.inf) == 1.0
    assert (
        replace(training, num_replicas=1).utilization(
            replace(training, num_replicas=1).diloco(1, 0, "fp32"), 1.0
        )
        == 1.0
    )


@pytest.mark.parametrize("latency_s", [-1.0, math.inf, math.nan])
def test_invalid_latencies_are_refused(latency_s) -> None:
    with pytest.raises(ValueError, match=r"`latency=.*` must be a number of seconds of at least 0"):
        replace(TRAINING, latency_s=latency_s)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("loss", 0.5, "`loss=0.5` must be a share of packets, at least 0 and below 0.5"),
        ("loss", -0.1, "`loss=-0.1` must be a share"),
        ("sync_seconds", math.nan, "`sync_time=nan` must be a number of seconds of at least 0"),
    ],
)
def test_invalid_losses_and_sync_times_are_refused(name, value, said) -> None:
    with pytest.raises(ValueError, match=said):
        replace(TRAINING, **{name: value})


def test_an_exchange_by_shards_has_twice_the_latencies() -> None:
    assert [exchange_rounds(m) for m in (1, 2, 3, 4)] == [0, 2, 4, 4]


# Messages


@pytest.mark.parametrize("num_replicas", [2, 3, 4, 8])
def test_votes_equal_the_librarys(num_replicas) -> None:
    numel = 8 * 8 * 3 * 35_000 * 8  # whole words for every number of workers
    channel = SimpleNamespace(size=num_replicas, rank=0)
    valid = torch.full((numel // 8,), 255, dtype=torch.uint8)
    way = cheaper_ballot_exchange(View.of(channel), numel // 8, 1, valid, Majority())
    real, predicted = way.bytes_by_tag.total(), vote_bytes(numel, num_replicas)
    assert predicted <= real <= 1.001 * predicted, "plus headers"


def test_power_sgd_is_close_to_the_measurement() -> None:
    """benchmarks/bandwidth/result.md: 561,000 bytes a step, of GPT-2 with 6 blocks of width 256."""
    model = Model((789_760,) * 6, 1_081_856)
    sent = named(replace(TRAINING, model=model), "DDP, PowerSGD").bytes_per_step
    assert 0.8 * 561_000 < sent < 561_000, "vectors, which are ignored, are a sixth"


def test_power_sgd_counts_rows_and_columns() -> None:
    assert power_sgd_floats(12 * 64**2, 64, 4, in_block=True) == 4 * 16 * 64
    assert power_sgd_floats(1000 * 64, 64, 4, in_block=False) == 4 * (1000 + 64)
    assert power_sgd_floats(10, 64, 4, in_block=False) == 10, "at most all parameters"


def test_domino_by_hand() -> None:
    """Two blocks of 3 s: a half computes 1/4 s per all-reduce in forward and 1/2 s in backward."""

    def reached(seconds_per_half: float) -> float:
        sums = LayerSums(2, 2 * seconds_per_half * GB, rounds=2)
        return utilization([0.0, *TWO_LAYERS], sums, GB_PER_S)

    assert reached(0.25) == 1.0
    assert reached(0.5) == pytest.approx(6 / (2 * (4 * 0.5 + 4 * 0.5)))
    assert reached(1.0) == pytest.approx(6 / (2 * 8 * 1.0))
    sums = LayerSums(2, 0.5 * GB, rounds=2)
    assert sums.bytes_per_step == 2 * 4 * 0.5 * GB
    assert utilization([0.0, *TWO_LAYERS], sums, GB_PER_S, 0.25) == pytest.approx(6 / (16 * 0.75))


def test_domino_sends_the_activations_of_all_replicas() -> None:
    training = replace(TRAINING, model=replace(TRAINING.model, width=512), tokens_per_step=100)
    sums = named(training, "Domino")
    assert sums.bytes_per_sum == 2 * 100 * 512 * 4, "a ring of two sends each value once"
    assert "Domino" not in [method.name for method in methods(TRAINING)]


def test_elastic_replicas_wait_for_the_bytes_in_both_directions() -> None:
    """One fragment without overlap: a cycle is 10 s of steps, and the time on the link."""
    training = replace(TRAINING, num_replicas=4, num_fragments=1, overlap_steps=0)
    found = store_exchange(training.model.params, 4, "fp4")
    u = payload_bytes(training.model.params, "fp4")
    assert found.sent == pytest.approx((1 + 1 / 4) * u, rel=0.01)
    assert found.moved == pytest.approx((3 - 1 / 4) * u, rel=0.01)
    assert found.total == pytest.approx(4 * (3 - 1 / 4) * u, rel=0.01)
    state = 8 * training.model.params / 4  # a fourth of it in each cycle
    pairs = ("elastic bucket", found.moved + state), ("elastic hub", found.total + state)
    for name, on_link in pairs:
        exchange = named(training, name)
        assert exchange.bytes_per_cycle == found.sent + state / 4
        reached = training.utilization(exchange, MB_PER_S)
        assert reached == pytest.approx(10 / (10 + on_link / MB))
        # 3 requests in a row and 2 M - 1 more, each there and back; windows are longer on top
        distant = replace(training, latency_s=0.1).utilization(exchange, MB_PER_S)
        assert distant < 10 / (10 + on_link / MB + 0.1 * 2 * 10)


def test_two_elastic_replicas_gather() -> None:
    pair = named(replace(TRAINING, num_fragments=1), "elastic bucket").fragments[0][0]
    state = 8 * TRAINING.model.params / 4
    assert pair.link_bytes - state == pytest.approx(2 * (pair.num_bytes - state / 2))
    alone = methods(replace(TRAINING, num_replicas=1))
    assert not [method.name for method in alone if method.name.startswith("elastic")]


# Within a replica


def test_traffic_within_a_replica_equals_the_ledgers_formulas() -> None:
    training = replace(TRAINING, model=replace(TRAINING.model, width=512), tokens_per_step=100)
    size = 4 * training.model.params
    sent = inside_bytes(training, 4)
    assert sent["ddp"] == ring_all_reduce_bytes(size, 4)
    assert sent["fsdp"] == 3 * all_gather_bytes(size // 4, 4)
    blocks = len(training.model.block_params)
    assert sent["domino"] == 4 * blocks * ring_all_reduce_bytes(4 * 100 * 512, 4)
    halved = inside_bytes(replace(training, gradient_dtype="bf16"), 4)
    assert halved == {layout: num_bytes / 2 for layout, num_bytes in sent.items()}


# Strategies


def chosen(gbit_per_s: float, **changes):
    training = replace(TRAINING, **changes)
    return choose(training, gbit_per_s, 0.95, advise(training, gbit_per_s, 0.95))


def test_data_parallelism_is_recommended_for_a_fast_link() -> None:
    choice = chosen(1000.0)
    assert (choice.strategy, choice.setting) == ("ddp", "")
    assert "other strategies gain nothing" in choice.reasons[0]
    assert chosen(0.001, num_replicas=1).strategy == "ddp"


def test_bf16_is_recommended_if_half_of_the_bytes_suffice() -> None:
    needed = [
        TRAINING.needed_gbit_per_s(TRAINING.data_parallel(dtype), 0.95)
        for dtype in ("fp32", "bf16")
    ]
    choice = chosen(sum(needed) / 2)
    assert (choice.strategy, choice.setting) == ("ddp", "ddp_comm_hook=bf16_compress_hook")
    assert choice.utilization >= 0.95


def test_diloco_with_auto_is_recommended_for_a_slow_link() -> None:
    choice = chosen(0.01, tokens_per_step=1024)
    auto = plan_auto(TRAINING, 0.01)
    assert (choice.strategy, choice.setting) == ("streaming_diloco", 'sync_every="auto"')
    assert choice.utilization == auto.utilization >= 0.95
    assert f"It exchanges every {auto.sync_every} steps" in choice.reasons[0]
    assert f"overlap_steps={auto.overlap_steps}." in choice.reasons[0]
    text = " ".join(choice.reasons)
    assert "Use distributed_lion if weights must be equal after every step" in text
    assert "Use domino_tp between these ranks if the model does not fit on one device" in text


def test_what_the_user_has_fixed_is_recommended_before_auto() -> None:
    training = replace(TRAINING, sync_every=20, overlap_steps=10, num_fragments=3)
    advice = advise(training, 0.05, 0.95, ["sync_every", "overlap_steps"])
    choice = choose(training, 0.05, 0.95, advice)
    assert choice.setting.startswith("sync_every=20, num_fragments=3, overlap_steps=10,")
    assert choice.utilization == advice.utilization
    assert 'sync_every="auto"' in alternatives(training, 0.05, 0.95, choice, advice)[-1]


def test_auto_keeps_the_fragments_and_the_wire_that_are_not_defaults() -> None:
    setting = chosen(0.01, num_fragments=4, wire_dtype="int2").setting
    assert setting == "sync_every=\"auto\", num_fragments=4, wire_dtype='int2'"


def test_alternatives_do_not_repeat_the_choice() -> None:
    for gbit_per_s, named in ((1000.0, True), (0.01, False)):
        advice = advise(TRAINING, gbit_per_s, 0.95)
        choice = choose(TRAINING, gbit_per_s, 0.95, advice)
        others = alternatives(TRAINING, gbit_per_s, 0.95, choice, advice)
        assert any('"auto"' in line for line in others) == named
